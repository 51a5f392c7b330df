"""Compares the log-probs that an engine reports for its tokens with the reference's, and says which
sampling setting or which position explains a difference. It needs no layers of the engine: this is
what can be said about a server."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.certify.causes import Cause
from slime_like.certify.compare import TIMES_ROUNDING, Finding
from slime_like.certify.layered import LayeredModel
from slime_like.engines.base import GenerateOutput, GenerateRequest

NATS = 2e-5  # a difference of log-probs below it is none in float32
TEMPERATURES = torch.linspace(math.log(0.05), math.log(20), 400).exp()
BUCKETS = 4  # parts of the depth that are reported


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What an engine sampled, with the reference's logits at each token."""

    logits: Tensor  # [N, V] float64, not divided by a temperature
    tokens: Tensor  # [N]
    reported: Tensor  # [N] log-probs
    depth: Tensor  # [N] tokens before each
    position: Tensor  # [N] in its response
    masks: tuple[Tensor, ...] | None  # of each token, the tokens that were kept

    def expected(self, temperature: float) -> Tensor:
        """Log-probs [N], over the kept tokens where there are masks."""
        log_probs = (self.logits / temperature).log_softmax(-1)
        chosen = log_probs.gather(1, self.tokens[:, None])[:, 0]
        if self.masks is None:
            return chosen
        kept = torch.stack([row[m.long()].logsumexp(0) for row, m in zip(log_probs, self.masks)])
        return chosen - kept


def is_answer(output: GenerateOutput) -> bool:
    """Whether there is something to compare."""
    return bool(output.tokens) and output.failure is None


def sampled_tokens(
    model: LayeredModel, requests: Sequence[GenerateRequest], outputs: Sequence[GenerateOutput]
) -> SampledTokens:
    """Run the reference on prompts and responses; aborted responses are left out."""
    logits, tokens, reported, depth, position = [], [], [], [], []
    masks: list[Tensor] = []
    for request, output in zip(requests, outputs, strict=True):
        if not is_answer(output):
            continue
        prompt = len(request.prompt_tokens)
        count = len(output.tokens)
        row = torch.tensor([*request.prompt_tokens, *output.tokens])
        out = model.run([row])["logits"].double()
        logits.append(out[prompt - 1 : prompt - 1 + count])
        tokens.append(torch.tensor(output.tokens))
        reported.append(torch.tensor(output.log_probs, dtype=torch.float64))
        depth.append(torch.arange(prompt, prompt + count))
        position.append(torch.arange(count))
        masks += output.sampling_mask or ()
    if not tokens:
        raise ValueError("the engine answered none of the requests of the certificate")
    return SampledTokens(
        torch.cat(logits),
        torch.cat(tokens),
        torch.cat(reported),
        torch.cat(depth),
        torch.cat(position),
        tuple(masks) or None,
    )


@dataclass(frozen=True, slots=True)
class LogProbGaps:
    """Differences of log-probs, in nats."""

    largest: float
    limit: float
    by_depth: tuple[tuple[int, float], ...]  # (tokens before, mean difference from there on)
    by_position: tuple[tuple[int, float], ...]
    findings: tuple[Finding, ...]


def compare_log_probs(
    subject: str,
    exact: SampledTokens,
    rounded: SampledTokens,
    temperature: float,
    find: Callable[[float], Cause | None] | None = None,
) -> LogProbGaps:
    """Compare what an engine reported.

    Args:
        exact: With the logits of the reference in float64.
        rounded: With those of the same model in the dtype of the run.
        temperature: Of the run; greedy sampling counts as 1.
        find: Looks for another cause, with the limit of the differences.
    """
    temperature = temperature or 1.0
    expected = exact.expected(temperature)
    gap = (exact.reported - expected).abs()
    rounding = (rounded.expected(temperature) - expected).abs().max()
    limit = max(NATS, TIMES_ROUNDING * float(rounding))
    over = ~(gap <= limit)
    findings: tuple[Finding, ...] = ()
    if bool(over.any()):
        cause = sampler_cause(exact, temperature, limit)
        if cause is None and find is not None:
            cause = find(limit)
        if cause is None:
            cause = profile(exact, over, gap)
        findings = (
            Finding(
                subject, "log-probs", None, "sampler", int(exact.position[over].min()), None,
                cause.cause, cause.evidence, float(gap.max()), limit,
            ),
        )  # fmt: skip
    return LogProbGaps(
        float(gap.max()),
        limit,
        means(exact.depth, gap),
        means(exact.position, gap),
        findings,
    )


def means(place: Tensor, gap: Tensor) -> tuple[tuple[int, float], ...]:
    """Mean differences in parts of equal width of a place."""
    low = int(place.min())
    width = max(1, -(-(int(place.max()) + 1 - low) // BUCKETS))
    found = []
    for start in range(low, int(place.max()) + 1, width):
        inside = (place >= start) & (place < start + width)
        if bool(inside.any()):
            found.append((start, float(gap[inside].mean())))
    return tuple(found)


def sampler_cause(sampled: SampledTokens, temperature: float, limit: float) -> Cause | None:
    """The sampling setting with which the reference gives the reported log-probs."""
    best = min(
        TEMPERATURES.tolist(),
        key=lambda value: float((sampled.expected(value) - sampled.reported).abs().mean()),
    )
    low = best / 1.03
    high = best * 1.03
    for _ in range(60):  # ternary search
        third = (high - low) / 3
        errors = [
            float((sampled.expected(t) - sampled.reported).abs().mean())
            for t in (low + third, high - third)
        ]
        if errors[0] < errors[1]:
            high -= third
        else:
            low += third
    found = (low + high) / 2
    if abs(found / temperature - 1) > 1e-4 and _holds(sampled.expected(found), sampled, limit):
        return Cause(
            "temperature",
            f"the log-probs are those of temperature {found:.4g}, not {temperature:g}",
        )
    log_probs = (sampled.logits / temperature).log_softmax(-1)
    order = log_probs.sort(dim=-1, descending=True).values
    chosen = log_probs.gather(1, sampled.tokens[:, None])[:, 0]
    mass = (chosen - sampled.reported).exp()  # probability of what was kept
    if bool((mass < 1 - limit).any()) and bool((mass <= 1 + 10 * limit).all()):
        sums = order.exp().cumsum(-1)
        kept = (sums - mass[:, None]).abs().min(dim=1)
        if bool((kept.values <= 10 * limit).all()):
            counts = kept.indices + 1
            if int(counts.max()) == int(counts.min()):
                text = f"over the {int(counts[0])} most likely tokens"
                return Cause("top-k", f"the log-probs are normalised {text}")
            text = f"over the most likely tokens, with {float(mass.min()):.3g} of the probability"
            return Cause("top-p", f"the log-probs are normalised {text} or more")
    for step in (-1, 1):
        if sampled.logits.size(0) > 3:
            moved = sampled.expected(temperature).roll(step)
            inside = sampled.position.roll(step) == sampled.position - step
            near = (moved - sampled.reported).abs() <= limit
            if bool(inside.any()) and bool(near[inside].all()):
                return Cause("order of tokens", "each token has its neighbour's log-prob")
    return None


def _holds(expected: Tensor, sampled: SampledTokens, limit: float) -> bool:
    return bool(((expected - sampled.reported).abs() <= 3 * limit).all())


def profile(sampled: SampledTokens, over: Tensor, gap: Tensor) -> Cause:
    """What the places of the differences say, where no setting explains them."""
    share = float(over.double().mean())
    depths = means(sampled.depth, gap)
    text = ", ".join(f"{value:.2g} from token {start}" for start, value in depths)
    first = int(sampled.depth[over].min())
    text = f"{share:.0%} of the tokens, the first behind {first} others; mean difference {text}"
    grows = len(depths) > 1 and depths[-1][1] > 3 * depths[0][1]
    if grows or first > int(sampled.depth.min()) + 2:
        return Cause("grows with the depth", f"{text}: rope, window or cache")
    return Cause("alike at all depths", f"{text}: weights, norms or dtype")
