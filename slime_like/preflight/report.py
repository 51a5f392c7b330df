"""What a preflight found, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from arguments.run_config import RunConfig
from slime_like.preflight.batches import Batches
from slime_like.preflight.communication import Collective, Planes
from slime_like.preflight.flops import PEAK_TFLOPS, TERA
from slime_like.preflight.memory import TRAINING, RankReport
from slime_like.preflight.shape import Shape

GB = 10**9
REACHED = 0.4  # share of peak FLOP/s that a well-configured training step reaches


@dataclass(frozen=True, slots=True)
class Preflight:
    """Result of the preflight. collectives: of the first rank. flops: of an optimizer step, over
    all devices. advice: flags, if a rank does not fit. seconds, cpu_s, host_bytes: cost of the
    preflight itself."""

    run: RunConfig
    shape: Shape
    ranks: Sequence[RankReport]
    batches: Batches
    collectives: Sequence[Collective]
    bubble: float
    flops: float
    planes: Planes
    advice: Sequence[str]
    seconds: float
    cpu_s: float
    host_bytes: int

    @property
    def heaviest(self) -> RankReport:
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def limit(self) -> int:
        return round(self.run.preflight.preflight_memory_gb * GB)

    @property
    def fits(self) -> bool:
        return self.heaviest.peak <= self.limit

    @property
    def verdict(self) -> str:
        worst = self.heaviest
        if self.fits:
            return f"fits: rank {worst.rank} needs {gb(worst.peak)} of {gb(self.limit)}"
        term = worst.phases[worst.peak_phase][worst.largest]
        return (
            f"does not fit: rank {worst.rank} (stage {worst.stage}) needs {gb(worst.peak)} of "
            f"{gb(self.limit)} during {worst.peak_phase}; its largest term is {worst.largest}, "
            f"{gb(term)}"
        )


def gb(size: float) -> str:
    return f"{size / GB:.2f} GB"


def text_of(found: Preflight) -> str:
    return "\n".join(_lines(found))


def _lines(found: Preflight) -> Iterator[str]:
    run, batches, shape = found.run, found.batches, found.shape
    yield (
        f"preflight of {run.world_size} ranks, {found.ranks[0].layout}; "
        f"{shape.total / 1e9:.2f} billion parameters, {shape.active / 1e9:.2f} active"
    )
    yield from _ranks(found)
    used = "" if batches.used is None else f", {batches.used:.0%} of the token budget used"
    yield (
        f"optimizer step: {batches.samples} samples of {batches.mean:.0f} tokens (prompts: "
        f"{batches.prompts}), {batches.number} micro-batches of up to {batches.tokens} tokens a "
        f"rank{used}; busiest data-parallel rank {batches.imbalance:.2f} of the mean; pipeline "
        f"bubble {found.bubble:.1%}"
    )
    seconds = found.flops / run.world_size / (REACHED * PEAK_TFLOPS["H100"] * TERA)
    yield (
        f"model: {found.flops / 1e15:.4g} PFLOP an optimizer step, {seconds:.3g} s on H100s that "
        f"reach {REACHED:.0%} of their peak"
    )
    yield "collectives of an optimizer step, rank 0:"
    for each in found.collectives:
        yield (
            f"  {each.name:<22} {each.dimension:<14} {each.ranks:>5} ranks {each.calls:>8} calls "
            f"{gb(each.bytes):>12}"
        )
    planes = found.planes
    yield (
        f"a rollout's samples: {gb(planes.samples)}, {gb(planes.share)} a data-parallel rank, index "
        f"{gb(planes.index)}; a weight update: {gb(planes.weights)} in {planes.messages} messages; "
        f"a checkpoint: {gb(planes.checkpoint)}"
    )
    yield (
        f"took {found.seconds:.1f} s ({found.cpu_s:.1f} s of processor time), "
        f"{gb(found.host_bytes)} of host memory at most"
    )
    yield found.verdict
    if found.advice:
        yield "flags that help:"
        yield from (f"  {flags}" for flags in found.advice)


def _ranks(found: Preflight) -> Iterator[str]:
    for rank in found.ranks:
        mark = "  <- heaviest" if rank is found.heaviest else ""
        yield (
            f"rank {rank.rank}: stage {rank.stage}, {rank.layers} layers, "
            f"{rank.parameters / 1e9:.3f} billion parameters; peak {gb(rank.peak)} "
            f"({rank.peak_phase}), {rank.in_flight:g} micro-batches in flight{mark}"
        )
        training = rank.phases[TRAINING]
        for name, size in sorted(training.items(), key=lambda item: -item[1]):
            if size:
                yield f"  {name:<28} {gb(size):>12}"
        for name, size in rank.host.items():
            yield f"  {name + ' (host memory)':<28} {gb(size):>12}"
        for phase, terms in rank.phases.items():
            own = ", ".join(f"{n} {gb(size)}" for n, size in terms.items() if n not in training)
            note = f"  (without activations; {own})" if own else ""
            yield f"  {'in ' + phase + ':':<28} {gb(sum(terms.values())):>12}{note}"


def json_of(found: Preflight) -> dict[str, object]:
    """The result as plain values, with sizes in bytes."""
    return {
        "fits": found.fits,
        "verdict": found.verdict,
        "world_size": found.run.world_size,
        "layout": found.ranks[0].layout,
        "parameters": found.shape.total,
        "limit": found.limit,
        "advice": list(found.advice),
        "ranks": [
            {
                "rank": rank.rank,
                "stage": rank.stage,
                "layers": rank.layers,
                "parameters": rank.parameters,
                "phases": {name: dict(terms) for name, terms in rank.phases.items()},
                "host": dict(rank.host),
                "peak": rank.peak,
                "peak_phase": rank.peak_phase,
                "micro_batches_in_flight": rank.in_flight,
            }
            for rank in found.ranks
        ],
        "batches": asdict(found.batches),
        "bubble": found.bubble,
        "flops": found.flops,
        "collectives": [asdict(each) for each in found.collectives],
        "planes": asdict(found.planes),
        "seconds": found.seconds,
        "cpu_s": found.cpu_s,
        "host_bytes": found.host_bytes,
    }
