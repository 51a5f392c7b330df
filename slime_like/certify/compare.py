"""Compares one implementation with the reference, layer by layer on the same inputs, and names the
first differing layer, position and expert with the cause."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_like.certify.causes import Cause, LayerCauses, SearchTime, router_cause
from slime_like.certify.layered import FINAL_NORMS, LayeredModel, States
from slime_like.certify.weights import Difference, Fingerprints, WeightComparison, Weights

LAYER_PARTS = (
    *("memory", "streams", "norm", "attention"),
    *("mlp_streams", "mlp_norm", "router", "mlp"),
)
TIMES_ROUNDING = 12.0  # a difference above this many times the rounding is none
TIMES_EPSILON = 6.0  # and above this many times the dtype's epsilon, where rounding is 0
# and above this many times what inputs that are off by an epsilon change: where streams or norms
# cancel, one order of sums may be lucky at a token, and another not
TIMES_INPUTS = 6.0
# share of tokens that may choose other experts because two scores are equal up to rounding
TIES = {torch.bfloat16: 0.15, torch.float16: 0.05}
FEW_TIES = 0.01


@dataclass(frozen=True, slots=True)
class Finding:
    """Where and why an implementation differs from the reference."""

    subject: str  # "trainer" or "engine"
    site: str  # the first that differs, such as "layers.3.attention"
    layer: int | None
    part: str
    position: int | None  # the first differing one in a sequence
    expert: int | None
    cause: str
    evidence: str
    gap: float | None  # largest relative difference of a token's values
    limit: float | None  # what rounding explains
    others: tuple[str, ...] = ()  # further sites that differ, each alone

    @property
    def text(self) -> str:
        where = [self.site]
        if self.position is not None:
            where.append(f"from position {self.position}")
        if self.expert is not None:
            where.append(f"expert {self.expert}")
        size = (
            "" if self.gap is None else f" (difference {self.gap:.3g}, rounding {self.limit:.3g})"
        )
        return f"{self.subject}: {', '.join(where)}: {self.cause}: {self.evidence}{size}"


@dataclass(frozen=True, slots=True)
class Gaps:
    """Relative differences of a site, by token."""

    values: Tensor  # [N]
    limit: float

    @property
    def largest(self) -> float:
        return float(self.values.max())

    @property
    def differs(self) -> bool:
        return not self.largest <= self.limit or not math.isfinite(self.largest)


@dataclass(frozen=True, slots=True)
class Examination:
    """Result of one implementation."""

    findings: tuple[Finding, ...]
    gaps: Mapping[str, Gaps]  # by site
    skipped: Mapping[str, str]  # by site: why it is not compared


def relative_gap(values: Tensor, expected: Tensor) -> Tensor:
    """Norm of the difference of each row over the norm of the expected row, [N]."""
    right = expected.double()
    norm = right.norm(dim=1)
    smallest = 1e-3 * norm.mean().clamp(min=1e-30)  # a row near 0 is no measure
    return (values.double() - right).norm(dim=1) / norm.clamp(min=smallest)


def site_order(layers: int) -> list[str]:
    """The sites in the order of computation."""
    sites = ["embedding"]
    for layer in range(layers):
        sites += [f"layers.{layer}.{part}" for part in LAYER_PARTS]
        sites.append(f"layers.{layer}")
    return [*sites, "norm", "logits"]


class Reference:
    """transformers in float64, and in the dtype of the run for its rounding.

    Args:
        exact: In float64.
        rounded: The same model in the dtype of the run.
        sequences: Of tokens.
        inputs: The trainer's states.
        earlier: Fingerprints of earlier weights, by what they are.
        base: The weights of --hf-checkpoint, if the run has trained since.
        search_time: For the causes of all layers.
    """

    def __init__(
        self,
        exact: LayeredModel,
        rounded: LayeredModel,
        sequences: Sequence[Tensor],
        inputs: States,
        earlier: Mapping[str, Fingerprints] | None = None,
        base: Weights | None = None,
        search_time: SearchTime | None = None,
    ) -> None:
        self._search_time = search_time or SearchTime(math.inf)
        self.exact = exact
        self.sequences = sequences
        self.inputs = inputs
        self.dtype = rounded.dtype
        self.states = exact.run(sequences, inputs)
        own = rounded.run(sequences, inputs)
        smallest = TIMES_EPSILON * torch.finfo(rounded.dtype).eps
        # by router, the share of tokens that may be tied: at least twice the rounding's own
        self._tie_shares = {
            site: max(TIES.get(self.dtype, FEW_TIES), 2 * float(self._others(site, own).mean()))
            for site in self.states
            if site.endswith(".router")
        }
        self._condition_is_known = False
        self.limits = {
            # without tokens that overflow in the dtype of the run: an infinite limit allows all
            site: max([smallest, *(TIMES_ROUNDING * gap[gap.isfinite()]).tolist()])
            for site, gap in self._untied_gaps(own)
        }
        self.weights = rounded.weights()
        self._comparison = WeightComparison(self.weights, self.dtype, earlier, base)

    def _others(self, site: str, states: States) -> Tensor:
        """Of every token, 1.0 if this router chooses other experts for it, [N] float64."""
        return ((states[site] != 0) != (self.states[site] != 0)).any(dim=1).double()

    def _untied_gaps(
        self, states: States, *, all_tied: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """The sites that both have in the order of computation, with the differences by token [N].
        Tokens that are tied have none from the router to the end of the layer. They are those that
        choose other experts, if they are so few that it can be rounding, or with `all_tied`."""
        tied: Tensor | None = None
        for site in site_order(len(self.exact.layers)):
            if site not in self.states or site not in states:
                continue
            expected = self.states[site]
            values = states[site]
            if values.shape != expected.shape:
                continue  # e.g. several residual streams
            if site.endswith(".router"):
                others = self._others(site, states)
                few = float(others.mean()) <= self._tie_shares[site]
                tied = others.bool() if few or all_tied else None
            gap = relative_gap(values, expected)
            yield site, gap if tied is None else gap.masked_fill(tied, 0.0)
            if site.count(".") == 1:
                tied = None

    def gaps(self, states: States) -> dict[str, Gaps]:
        """The differences of all sites that both have, in the order of computation."""
        found = dict(self._untied_gaps(states))
        gaps = {site: Gaps(gap, self.limits[site]) for site, gap in found.items()}
        if not self._condition_is_known and any(gap.differs for gap in gaps.values()):
            self._widen_by_condition()
            gaps = {site: Gaps(gap, self.limits[site]) for site, gap in found.items()}
        return gaps

    def _widen_by_condition(self) -> None:
        """Raise each limit to what inputs change that are off by an epsilon. It takes one more pass
        in float64, so it is done when something differs. What other experts make of a token is no
        measure of that."""
        self._condition_is_known = True
        epsilon = torch.finfo(self.dtype).eps
        generator = torch.Generator().manual_seed(0)
        inputs = {}
        for site, values in self.inputs.items():
            noise = torch.rand(values.shape, generator=generator, dtype=torch.float64)
            inputs[site] = values.double().cpu() * (1 + epsilon * (2 * noise - 1))
        for site, gap in self._untied_gaps(self.exact.run(self.sequences, inputs), all_tied=True):
            by_inputs = TIMES_INPUTS * gap[gap.isfinite()]
            self.limits[site] = max([self.limits[site], *by_inputs.tolist()])

    def skipped(self, states: States) -> dict[str, str]:
        """Sites of an implementation that cannot be compared, with the reason."""
        reasons = {}
        for site, values in states.items():
            if site not in self.states:
                reasons[site] = "the reference has no such state"
            elif values.shape != self.states[site].shape:
                shape = list(self.states[site].shape)
                reasons[site] = f"it is {list(values.shape)}, the reference's {shape}"
        return reasons

    def positions(self) -> Tensor:
        """Of every token in its sequence, [N]."""
        return torch.cat([torch.arange(tokens.numel()) for tokens in self.sequences])

    def examine(self, subject: str, states: States, weights: Weights) -> Examination:
        """Compare an implementation. Its findings are one for every layer with a cause of its own:
        several layers with the same cause are one finding.

        Args:
            states: Of the same tokens on the same inputs.
            weights: By the names of files.
        """
        gaps = self.gaps(states)
        differences = self._comparison.differences(weights)
        by_layer: dict[int | None, list[Difference]] = {}
        for difference in differences:
            by_layer.setdefault(difference.layer, []).append(difference)
        findings: list[Finding] = []
        if gaps.get("embedding") is not None and gaps["embedding"].differs:
            findings.append(self._outside(subject, "embedding", gaps, states, by_layer))
        for layer in range(len(self.exact.layers)):
            finding = self._layer(subject, layer, gaps, states, by_layer.get(layer, []))
            if finding is not None:
                findings.append(finding)
        for site in ("norm", "logits"):
            if site in gaps and gaps[site].differs:
                findings.append(self._outside(subject, site, gaps, states, by_layer))
        silent = by_layer.get(None)
        if silent and not any(finding.layer is None for finding in findings):
            findings.append(self._of_weights(subject, "weights", None, "", silent, None, None))
        skipped = self.skipped(states)
        if states and not gaps:
            site, reason = next(iter(skipped.items()))
            findings.append(
                Finding(
                    subject,
                    site,
                    None,
                    site,
                    None,
                    None,
                    "not compared",
                    f"none of its states can be compared: {reason}",
                    None,
                    None,
                )
            )
        return Examination(tuple(merged(findings)), gaps, skipped)

    def _layer(
        self,
        subject: str,
        layer: int,
        gaps: Mapping[str, Gaps],
        states: States,
        differences: Sequence[Difference],
    ) -> Finding | None:
        site = f"layers.{layer}"
        sites = [*(f"{site}.{part}" for part in LAYER_PARTS), site]
        first = next((s for s in sites if s in gaps and gaps[s].differs), None)
        if first is None and not differences:
            return None
        part = "" if first is None else first.removeprefix(site).removeprefix(".")
        position = None if first is None else self._first_position(gaps[first])
        expert = self._expert(layer, first, gaps) if first is not None else None
        if differences:
            where = first or site
            gap = None if first is None else gaps[first]
            return self._of_weights(
                subject, where, layer, part, differences, gap, position, layer_wide=True
            )
        assert first is not None
        cause = self._cause(layer, site, first, part, states, gaps)
        return Finding(
            subject,
            first,
            layer,
            part,
            position,
            expert,
            cause.cause,
            cause.evidence,
            gaps[first].largest,
            gaps[first].limit,
        )

    def _cause(
        self,
        layer: int,
        site: str,
        first: str,
        part: str,
        states: States,
        gaps: Mapping[str, Gaps],
    ) -> Cause:
        if part == "router":
            limit = gaps[first].limit
            if (known := router_cause(states[first], self.states[first], limit)) is not None:
                return known
        calls = self.exact.calls(self.sequences, self.inputs, layer)
        own = {name: states[name] for name in gaps if f"{name}.".startswith(f"{site}.")}
        limits = {name: gaps[name].limit for name in own}
        try:
            search = LayerCauses(
                self.exact.layers[layer], calls, site, own, limits, part, relative_gap,
                self._search_time,
            )  # fmt: skip
            found = search.find()
        except TimeoutError:
            text = f"the search for a cause was ended after {self._search_time.text}"
            return Cause("unknown", f"{self._profile(gaps[first])}; {text}")
        if found is not None:
            return found
        return Cause("unknown", self._profile(gaps[first]))

    def _outside(
        self,
        subject: str,
        site: str,
        gaps: Mapping[str, Gaps],
        states: States,
        by_layer: Mapping[int | None, Sequence[Difference]],
    ) -> Finding:
        """A finding at the embedding, the final norm or the head."""
        gap = gaps[site]
        position = self._first_position(gap)
        words = {"embedding": ("embed",), "norm": FINAL_NORMS, "logits": ("lm_head", "embed")}[site]
        own = [d for d in by_layer.get(None, ()) if any(word in d.name for word in words)]
        if own:
            return self._of_weights(subject, site, None, site, own, gap, position)
        cause = self._scale(site, states[site], gap)
        if cause is None and site == "norm":
            cause = self._final_epsilon(states[site], gap)
        if cause is None:
            cause = Cause("unknown", self._profile(gap))
        return Finding(
            subject, site, None, site, position, None, cause.cause, cause.evidence, gap.largest,
            gap.limit,
        )  # fmt: skip

    def _scale(self, site: str, values: Tensor, gap: Gaps) -> Cause | None:
        found = values.double()
        expected = self.states[site].double()
        factor = float((found * expected).sum() / expected.square().sum().clamp(min=1e-60))
        if factor and float(relative_gap(found, factor * expected).max()) <= 3 * gap.limit:
            text = f"it is {factor:.6g} times the reference's"
            return Cause("temperature" if site == "logits" else "wrong scale", text)
        return self._cap(found, expected, gap) if site == "logits" else None

    def _cap(self, found: Tensor, expected: Tensor, gap: Gaps) -> Cause | None:
        """The cap c of logits, c tanh(logit / c), that gives what was found; or none."""
        config = self.exact.model.config.get_text_config()
        own = getattr(config, "final_logit_softcapping", None)
        free = expected if own is None else own * torch.atanh(expected / own)
        if not bool(free.isfinite().all()):
            return None
        has = "none" if own is None else f"{own:.6g}"
        if own is not None and float(relative_gap(found, free).max()) <= 3 * gap.limit:
            return Cause("logit cap", f"logits have no cap, the reference's is {has}")
        largest = float(found.abs().max())
        if not largest < float(free.abs().max()):
            return None
        # by the largest logit: c tanh(l / c) grows with c
        top = free.flatten()[int(found.abs().argmax())].abs()
        low = largest
        high = 64 * float(top)
        for _ in range(100):
            middle = (low + high) / 2
            if float(middle * (top / middle).tanh()) < largest:
                low = middle
            else:
                high = middle
        again = high * (free / high).tanh()
        if float(relative_gap(found, again).max()) > 3 * gap.limit:
            return None
        return Cause("logit cap", f"the cap of the logits is {high:.6g}, the reference's {has}")

    def _final_epsilon(self, values: Tensor, gap: Gaps) -> Cause | None:
        """Solve for the epsilon of an RMS norm: row = weight * x / sqrt(mean(x^2) + epsilon)."""
        last = self.inputs.get(f"layers.{len(self.exact.layers) - 1}")
        if last is None:  # an engine that shows only some sites
            return None
        before = last.double()
        expected = self.states["norm"].double()
        ratio = (values.double() * expected).sum(1) / expected.square().sum(1).clamp(min=1e-60)
        norm = self.exact.final_norm
        own = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))
        squares = before.square().mean(dim=1)
        epsilons = (squares + own) / ratio.square() - squares
        epsilon = float(epsilons.median())
        again = expected * ((squares + own) / (squares + epsilon)).clamp(min=0).sqrt()[:, None]
        if float(relative_gap(values, again).max()) > 3 * gap.limit:
            return None
        text = f"the epsilon of the final norm is {epsilon:.3g}, the reference's {own:.3g}"
        return Cause("norm epsilon", text)

    def _of_weights(
        self,
        subject: str,
        site: str,
        layer: int | None,
        part: str,
        differences: Sequence[Difference],
        gap: Gaps | None,
        position: int | None,
        *,
        layer_wide: bool = False,
    ) -> Finding:
        worst = max(differences, key=lambda d: d.size)
        named = next((d for d in differences if d.cause != "different weights"), worst)
        causes = {d.cause for d in differences}
        count = sum(1 for name in self.weights if f"layers.{layer}." in name)
        cause = named.cause
        texts = [d.text for d in differences[:2]]
        if len(differences) > 2:
            texts.append(f"{len(differences)} weights in all")
        matrices = sum(
            1 for name, w in self.weights.items() if f"layers.{layer}." in name and w.dim() > 1
        )
        if layer_wide and len(differences) >= max(2, matrices) and count:
            if causes <= {"different weights", "adapter", "stale weights", "wrong scale"} and (
                len(causes - {"stale weights"}) > 1 or "different weights" in causes
            ):
                cause = "stale layer"
                texts = [f"all {len(differences)} weights of the layer are others", texts[0]]
            elif causes == {"stale weights"}:
                cause = "stale layer"
        experts = {d.expert for d in differences if d.expert is not None}
        only = all(d.expert is not None for d in differences)
        text = "; ".join(texts)
        if gap is None or not gap.differs:
            text += "; without an effect on these tokens"
        return Finding(
            subject,
            site,
            layer,
            part,
            position,
            min(experts) if experts and only else None,
            cause,
            text,
            None if gap is None else gap.largest,
            None if gap is None else gap.limit,
        )

    def _first_position(self, gap: Gaps) -> int:
        over = ~(gap.values <= gap.limit)
        return int(self.positions()[over].min())

    def _expert(self, layer: int, first: str, gaps: Mapping[str, Gaps]) -> int | None:
        """The one expert whose tokens differ, and no others, if the first difference is behind a
        router that agrees."""
        router = f"layers.{layer}.router"
        if router not in self.states or not first.endswith(".mlp"):
            return None
        routed = self.states[router] != 0  # [N, E]
        over = ~(gaps[first].values <= gaps[first].limit)
        if bool(over.all()):
            return None
        guilty = [
            expert
            for expert in range(routed.size(1))
            if bool(routed[:, expert].any()) and torch.equal(routed[:, expert], over)
        ]
        return guilty[0] if len(guilty) == 1 else None

    def _profile(self, gap: Gaps) -> str:
        """How the difference is spread, for a cause that no change of the reference reproduces."""
        positions = self.positions()
        last = int(positions.max())
        parts = [gap.values[(positions >= a) & (positions <= b)] for a, b in _spans(last)]
        sizes = [float(part.mean()) for part in parts if part.numel()]
        first = self._first_position(gap)
        over = float((~(gap.values <= gap.limit)).double().mean())
        text = f"{over:.0%} of the tokens differ, from position {first} on"
        if first > 0 or (len(sizes) > 2 and sizes[-1] > 2 * sizes[0]):
            return f"{text}, growing with the position: rope, mask or cache"
        return f"{text}, alike at all positions: neither rope nor mask"


def _spans(last: int) -> list[tuple[int, int]]:
    return [(last * k // 4, last * (k + 1) // 4) for k in range(4)]


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for layers with the same cause and the same part; it is the first one's."""
    found: dict[tuple[str, str, str, str], Finding] = {}
    for finding in findings:
        text = finding.evidence if finding.layer is None else _what_is_shared(finding)
        key = (finding.subject, finding.part, finding.cause, text)
        if key in found:
            first = found[key]
            found[key] = replace(first, others=(*first.others, finding.site))
        else:
            found[key] = finding
    return list(found.values())


def _what_is_shared(finding: Finding) -> str:
    """The part of the evidence that layers with one cause must share."""
    return finding.evidence if finding.cause in ("swapped weights", "setting") else ""
