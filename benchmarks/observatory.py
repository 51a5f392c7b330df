"""Losses against staleness: each loss trains a tiny policy on answers of weights that are exactly 0
to 8 optimizer steps old, with five seeds.

    python benchmarks/observatory.py                 # one process, a few minutes of CPU
    python benchmarks/observatory.py --only ppo estr --steps 50
    python benchmarks/observatory.py --write-docs    # table and picture of docs/*/observatory.md

The task is that of `slime-like new`: to write a letter twice, the score being the share of
characters in their place. The policy is a network of one hidden layer over verb, letter, place and
character before, and not a transformer; losses, corrections and reductions are the package's. All
seeds are trained at once, side by side in the same tensors, with their own weights and their own
random numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime_like.losses import (  # noqa: E402
    LossTerms,
    OffPolicyConfig,
    compute_off_policy_correction,
    compute_policy_loss,
    policy_losses,
)

SEEDS = (1, 2, 3, 4, 5)
STALENESS = (0, 1, 2, 4, 8)
STUDENT = 2.776  # 97.5 % quantile of Student's t with 4 degrees of freedom

VERBS = 4
LETTERS = 8
END = LETTERS  # the token that ends an answer
START = LETTERS + 1  # what stands before the first token
LENGTH = 4  # tokens at most
WIDTH = 32
PROMPTS = 32  # of a step
ANSWERS = 8  # to each of them
LEARNING_RATE = 0.06  # large enough that old answers do harm
ENTROPY_COEF = 0.02
EVALUATED = 32  # answers to each of the 32 prompts
INTERVAL = 10  # steps between two evaluations


@dataclass(frozen=True)
class Setting:
    """A line of the table."""

    label: str
    loss: str
    config: Mapping[str, Any] = field(default_factory=dict)
    terms: Mapping[str, Any] = field(default_factory=dict)
    # the old policy is the one that sampled (--use-rollout-logprobs); otherwise the current one, so
    # that the loss does not see the staleness, and a correction is what is left
    from_engine: bool = True
    correction: OffPolicyConfig | None = None
    one_answer: bool = False  # one answer a prompt, against the mean of the batch


SETTINGS = (
    Setting("gpg", "gpg", from_engine=False),
    Setting(
        "gpg, token TIS",
        "gpg",
        from_engine=False,
        correction=OffPolicyConfig(tis_ratio_type="token"),
    ),
    Setting("importance_sampling", "importance_sampling"),
    Setting("ppo", "ppo"),
    Setting("ppo, estr 0.5", "ppo", terms={"estr_threshold": 0.5}),
    Setting("rollout_is 0.3, 5 (SAO)", "rollout_is", {"eps_clip": 0.3, "eps_clip_high": 5.0}),
    Setting("cispo, rollout", "cispo", {"cispo_anchor": "rollout"}),
    Setting("dppo_kl", "dppo", {"dppo_type": "binary_kl"}),
    Setting("dppo_kl, batch_mean", "dppo", {"dppo_type": "binary_kl"}, one_answer=True),
)
Weights = tuple[Tensor, ...]


@dataclass(frozen=True)
class Result:
    """Of a setting at a staleness."""

    label: str
    staleness: int
    scores: list[float]  # of each seed: the mean over the evaluations of the run
    at_end: list[float]  # of each seed: the last evaluation
    ratio_max: float  # largest ratio to the policy that sampled, over the run and all seeds

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def half_width(self) -> float:
        """Of the 95 % confidence interval of the mean."""
        return STUDENT * statistics.stdev(self.scores) / math.sqrt(len(self.scores))


def start(generators: Sequence[torch.Generator]) -> Weights:
    """Initial weights, [seeds, ...] each."""
    inputs = VERBS + LETTERS + LENGTH + START + 1

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.stack([scale * torch.randn(*shape, generator=g) for g in generators])

    return (
        normal(inputs, WIDTH, scale=1.0),
        torch.zeros(len(generators), 1, WIDTH),
        normal(WIDTH, END + 1, scale=0.3),
        torch.zeros(len(generators), 1, END + 1),
    )


def logits(weights: Weights, prompts: Tensor, place: Tensor, before: Tensor) -> Tensor:
    """[seeds, N, END + 1] of the next character.

    Args:
        prompts: [seeds, N], verb * LETTERS + letter.
        place, before: [seeds, N], index of the character, and the one before it.
    """
    table, bias, out, out_bias = weights
    rows = (
        prompts // LETTERS,
        VERBS + prompts % LETTERS,
        VERBS + LETTERS + place,
        VERBS + LETTERS + LENGTH + before,
    )
    seeds = torch.arange(table.shape[0])[:, None]
    hidden = torch.tanh(sum(table[seeds, row] for row in rows) + bias)
    return hidden @ out + out_bias


@torch.no_grad()
def sample(
    weights: Weights, prompts: Tensor, generators: Sequence[torch.Generator]
) -> tuple[Tensor, Tensor, Tensor]:
    """Answers: tokens [seeds, N, LENGTH], their log-probs, and the mask up to the end."""
    count = prompts.shape[1]
    noise = torch.stack([torch.rand(LENGTH, count, END + 1, generator=g) for g in generators])
    before = torch.full_like(prompts, START)
    tokens = []
    log_probs = []
    for place in range(LENGTH):
        scores = logits(weights, prompts, torch.full_like(prompts, place), before)
        log_p = scores.log_softmax(-1)
        before = (log_p - (-noise[:, place].log()).log()).argmax(-1)
        tokens.append(before)
        log_probs.append(log_p.gather(-1, before[..., None])[..., 0])
    found = torch.stack(tokens, -1)
    ended = (found == END).cumsum(-1)
    mask = (ended == 0) | ((ended == 1) & (found == END))
    return found, torch.stack(log_probs, -1), mask


def grade(tokens: Tensor, prompts: Tensor) -> Tensor:
    """[seeds, N]: the score of the starter's reward.py."""
    letter = prompts % LETTERS
    length = ((tokens == END).cumsum(-1) == 0).sum(-1)  # characters before the end
    first = (tokens[..., 0] == letter) & (length > 0)
    second = (tokens[..., 1] == letter) & (length > 1)
    right = first.float() + second.float() + (length == 2).float()
    return right / (length + 1).clamp(min=3)


def advantages_of(rewards: Tensor, *, one_answer: bool) -> Tensor:
    """grpo's over groups of ANSWERS, or batch_mean's. rewards: [seeds, N]."""
    if one_answer:
        return rewards - rewards.mean(1, keepdim=True)
    groups = rewards.view(rewards.shape[0], -1, ANSWERS)
    centred = groups - groups.mean(-1, keepdim=True)
    return (centred / (groups.std(-1, keepdim=True) + 1e-6)).view_as(rewards)


def train(setting: Setting, staleness: int, steps: int) -> Result:
    """Train all seeds; the answers of step s are of the weights before step s - staleness."""
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    weights = tuple(w.requires_grad_() for w in start(generators))
    optimizer = torch.optim.Adam(weights, lr=LEARNING_RATE)
    loss = policy_losses.get(setting.loss)
    config = loss.config_type(**setting.config)
    terms = LossTerms(entropy_coef=ENTROPY_COEF, **setting.terms)
    past: deque[Weights] = deque(maxlen=staleness + 1)
    curve = []
    ratio_max = 1.0
    for step in range(steps):
        past.append(tuple(w.detach().clone() for w in weights))
        count = PROMPTS * ANSWERS if setting.one_answer else PROMPTS
        drawn = [torch.randint(VERBS * LETTERS, (count,), generator=g) for g in generators]
        prompts = torch.stack(drawn)
        if not setting.one_answer:
            prompts = prompts.repeat_interleave(ANSWERS, 1)
        tokens, engine, mask = sample(past[0], prompts, generators)
        advantages = advantages_of(grade(tokens, prompts), one_answer=setting.one_answer)
        log_probs, entropy = score(weights, prompts, tokens)
        ratio_max = max(ratio_max, float((log_probs.detach() - engine)[mask].max().exp()))
        old = engine if setting.from_engine else log_probs.detach()
        corrected: dict[str, Any] = {}
        if setting.correction is not None:
            corrected = compute_off_policy_correction(
                setting.correction, flat(old), flat(engine), flat(mask)
            ).tensors
        output = compute_policy_loss(
            setting.loss,
            flat(log_probs),
            flat(mask),
            flat((1 / mask.sum((1, 2), keepdim=True)).expand_as(log_probs)),  # token_mean
            config=config,
            terms=terms,
            advantages=flat(advantages[..., None].expand_as(log_probs)),
            old_log_probs=flat(old),
            rollout_log_probs=flat(engine),
            entropy=flat(entropy),
            **corrected,
        )
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        if (step + 1) % INTERVAL == 0:
            curve.append(evaluate(weights))
    scores = [round(statistics.fmean(of_seed), 4) for of_seed in zip(*curve, strict=True)]
    return Result(setting.label, staleness, scores, curve[-1], ratio_max)


def score(weights: Weights, prompts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [seeds, N, LENGTH] of these tokens."""
    log_probs = []
    entropies = []
    before = torch.full_like(prompts, START)
    for place in range(LENGTH):
        scores = logits(weights, prompts, torch.full_like(prompts, place), before)
        log_p = scores.log_softmax(-1)
        before = tokens[..., place]
        log_probs.append(log_p.gather(-1, before[..., None])[..., 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.stack(log_probs, -1), torch.stack(entropies, -1)


def flat(x: Tensor) -> Tensor:
    """[seeds * N, LENGTH]."""
    return x.reshape(-1, LENGTH)


def evaluate(weights: Weights) -> list[float]:
    """Mean score of each seed over all prompts, with the same random numbers in every call."""
    generators = [torch.Generator().manual_seed(1000 + seed) for seed in SEEDS]
    prompts = torch.arange(VERBS * LETTERS).repeat(EVALUATED).expand(len(SEEDS), -1)
    tokens, _, _ = sample(weights, prompts, generators)
    return [round(float(mean), 4) for mean in grade(tokens, prompts).mean(1)]


HEADINGS = {
    "en": ("loss", "staleness {}", "largest ratio at 8"),
    "zh": ("损失", "旧 {} 步", "旧 8 步时最大的 ratio"),
}


def table(results: Sequence[Result], language: str) -> str:
    """In Markdown: mean score of the run, and the half-width of its interval."""
    first, of_staleness, ratio = HEADINGS[language]
    heads = [first, *(of_staleness.format(k) for k in STALENESS), ratio]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for setting in SETTINGS:
        row = [r for r in results if r.label == setting.label]
        cells = [f"{r.mean:.2f} ± {r.half_width:.2f}" for r in row]
        largest = f"{row[-1].ratio_max:.3g}" if row else ""
        lines.append(f"| {' | '.join([setting.label, *cells, largest])} |")
    return "\n".join(lines)


def draw(results: Sequence[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8.5, 4.6), layout="constrained")
    for i, setting in enumerate(SETTINGS):
        row = [r for r in results if r.label == setting.label]
        shift = 0.05 * (i - len(SETTINGS) / 2)
        axis.errorbar(
            [STALENESS.index(r.staleness) + shift for r in row],
            [r.mean for r in row],
            yerr=[r.half_width for r in row],
            marker="o",
            markersize=4,
            capsize=2,
            linewidth=1.2,
            label=setting.label,
        )
    axis.set_xticks(range(len(STALENESS)), [str(k) for k in STALENESS])
    axis.set_xlabel("optimizer steps between sampling and training")
    axis.set_ylabel("mean score over the run, 95 % interval")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_docs(results: Sequence[Result], steps: int, date: str) -> None:
    """Write the table between its marks, in both languages, and the picture."""
    begin = "<!-- observatory: made by benchmarks/observatory.py -->\n"
    end = "<!-- observatory: end -->"
    captions = {
        "en": f"{steps} optimizer steps, {len(SEEDS)} seeds, {date}.",
        "zh": f"{steps} 个优化器步，{len(SEEDS)} 个种子，{date}。",
    }
    for language, caption in captions.items():
        page = ROOT / "docs" / language / "observatory.md"
        head, rest = page.read_text(encoding="utf-8").split(begin)
        _, tail = rest.split(end)
        made = f"{begin}{caption}\n\n{table(results, language)}\n{end}"
        page.write_text(f"{head}{made}{tail}", encoding="utf-8")
    draw(results, ROOT / "docs" / "images" / "observatory.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs" / "observatory")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", nargs="+", help="lines with one of these words")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [s for s in SETTINGS if not options.only or any(w in s.label for w in options.only)]
    if options.write_docs and len(chosen) < len(SETTINGS):
        parser.error("--write-docs needs all lines; remove --only")
    results = []
    for setting in chosen:
        for staleness in STALENESS:
            began = time.process_time()
            results.append(train(setting, staleness, options.steps))
            last = results[-1]
            print(
                f"{last.label}, {staleness}: {last.mean:.3f} ± {last.half_width:.3f}, at the end "
                f"{statistics.fmean(last.at_end):.3f}, largest ratio {last.ratio_max:.3g} "
                f"({time.process_time() - began:.1f} s)",
                flush=True,
            )
    options.output_dir.mkdir(parents=True, exist_ok=True)
    rows = [{**vars(r), "mean": r.mean, "half_width": r.half_width} for r in results]
    (options.output_dir / "results.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if options.write_docs:
        write_docs(results, options.steps, time.strftime("%Y-%m-%d"))


if __name__ == "__main__":
    main()
