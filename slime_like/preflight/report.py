"""The result of a preflight, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from arguments.run_config import RunConfig
from slime_like.engines.registry import engine_traits
from slime_like.preflight.batches import PlannedBatches
from slime_like.preflight.communication import Collective, Planes
from slime_like.preflight.flops import PEAK_TFLOPS, TERA
from slime_like.preflight.memory import TRAINING, RankReport
from slime_like.preflight.shape import ModelShape

GB = 10**9
HOUR_S = 3600
REACHED = 0.4  # share of peak FLOP/s that a well-configured training step reaches


@dataclass(frozen=True, slots=True)
class Preflight:
    """Result of the preflight."""

    config: RunConfig
    shape: ModelShape
    ranks: Sequence[RankReport]
    batches: PlannedBatches
    collectives: Sequence[Collective]  # of the first rank
    bubble: float
    flops: float  # of an optimizer step, over all devices
    planes: Planes
    advice: Sequence[str]  # flags, if a rank does not fit
    seconds: float  # cost of the preflight itself
    cpu_s: float  # cost of the preflight itself
    host_bytes: int  # cost of the preflight itself

    @property
    def heaviest(self) -> RankReport:
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def limit(self) -> int:
        return round(self.config.preflight.preflight_memory_gb * GB)

    @property
    def fits(self) -> bool:
        return self.heaviest.peak <= self.limit

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step on H100s that reach a share of their peak."""
        return self.flops / self.config.world_size / (REACHED * PEAK_TFLOPS["H100"] * TERA)

    @property
    def optimizer_steps(self) -> int | None:
        """Of the policy in the whole run; None with --num-epoch, which depends on the number of
        prompts."""
        batches = self._train_batches
        if batches is None:
            return None
        return self.config.critic.policy_steps(batches, self.batches.steps)

    @property
    def training_s(self) -> float | None:
        """Seconds of all optimizer steps, without sampling, evaluation and checkpoints."""
        return None if self._train_batches is None else self._train_batches * self.step_s

    @property
    def _train_batches(self) -> int | None:
        """In the whole run; the critic trains on all of them, the policy on `optimizer_steps`."""
        rollouts = self.config.rollout.num_rollout
        return None if rollouts is None else rollouts * self.batches.steps

    @property
    def gpus(self) -> int:
        """Of the trainer, and of the servers that the run starts on others."""
        servers = self.config.sglang.rollout_num_gpus or 0
        return self.config.world_size + (0 if self.config.sglang.colocate else servers)

    def cost_of(self, seconds: float) -> float | None:
        """What all GPUs cost for this long; None without a price."""
        price = self.config.preflight.preflight_gpu_hour_price
        return None if price is None else price * self.gpus * seconds / HOUR_S

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


def text_of(result: Preflight) -> str:
    return "\n".join(_lines(result))


def _lines(result: Preflight) -> Iterator[str]:
    config = result.config
    batches = result.batches
    shape = result.shape
    yield (
        f"preflight of {config.world_size} ranks, {result.ranks[0].layout}; "
        f"{shape.total / 1e9:.2f} billion parameters, {shape.active / 1e9:.2f} active"
    )
    if (servers := _servers(config)) is not None:
        yield servers
    yield from _ranks(result)
    used = ""
    if batches.used is not None:
        used = f", {batches.used:.0%} of the token budget used"
        if batches.budget is not None and batches.tokens > batches.budget:
            per_gpu = math.ceil(
                (config.algorithm.max_tokens_per_gpu or 0) * batches.tokens / batches.budget
            )
            used += f" (the longest samples exceed it: --max-tokens-per-gpu {per_gpu} holds them)"
    yield (
        f"optimizer step: {batches.samples} samples of {batches.mean:.0f} tokens (prompts: "
        f"{batches.prompts}), {batches.number} micro-batches of up to {batches.tokens} tokens a "
        f"rank{used}; busiest data-parallel rank {batches.imbalance:.2f} of the mean; pipeline "
        f"bubble {result.bubble:.1%}"
    )
    yield (
        f"model: {result.flops / 1e15:.4g} PFLOP an optimizer step, {result.step_s:.3g} s on H100s "
        f"that reach {REACHED:.0%} of their peak"
    )
    yield from _time_and_cost(result)
    yield "collectives of an optimizer step, rank 0:"
    for each in result.collectives:
        yield (
            f"  {each.name:<22} {each.dimension:<14} {each.ranks:>5} ranks {each.calls:>8} calls "
            f"{gb(each.bytes):>12}"
        )
    planes = result.planes
    yield (
        f"a rollout's samples: {gb(planes.samples)}, {gb(planes.share)} per data-parallel rank, "
        f"index {gb(planes.index)}; a weight update: {gb(planes.weights)} in {planes.messages} "
        f"messages; a checkpoint: {gb(planes.checkpoint)}"
    )
    yield (
        f"took {result.seconds:.1f} s ({result.cpu_s:.1f} s of processor time), "
        f"{gb(result.host_bytes)} of host memory at most"
    )
    yield result.verdict
    if result.advice:
        yield "flags that help:"
        yield from (f"  {flags}" for flags in result.advice)


def _time_and_cost(result: Preflight) -> Iterator[str]:
    gpus = result.gpus
    if result.optimizer_steps is not None and result.training_s is not None:
        hours = result.training_s * gpus / HOUR_S
        yield (
            f"training: {result.optimizer_steps} optimizer steps in "
            f"{duration(result.training_s)}, {amount(hours)} GPU hours; sampling, evaluation and "
            "checkpoints come on top"
        )
    costs = [
        f"{amount(cost)} {name}"
        for name, seconds in (
            ("an optimizer step", result.step_s),
            ("for the training", result.training_s),
            ("for each hour of the job", HOUR_S),
        )
        if seconds is not None and (cost := result.cost_of(seconds)) is not None
    ]
    if costs:
        price = result.config.preflight.preflight_gpu_hour_price
        yield f"cost at {price:g} a GPU hour, {gpus} GPUs: {', '.join(costs)}"


def amount(value: float) -> str:
    """Three digits, and all of a large number: "0.0123", "4.57", "12,346"; "less than 0.01"."""
    if 0 < value < 0.01:
        return "less than 0.01"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """As people say it: "42 s", "1 min 30 s", "3 h 5 min", "2 d 4 h"."""
    units = (("d", 86400), ("h", HOUR_S), ("min", 60), ("s", 1))
    left = max(round(seconds), 0)
    parts = []
    for name, size in units:
        count, left = divmod(left, size)
        parts.append((count, name))
    first = next((i for i, (count, _) in enumerate(parts) if count), len(parts) - 1)
    said = [f"{count} {name}" for count, name in parts[first : first + 2] if count]
    return " ".join(said) or "less than 1 s"


def _servers(config: RunConfig) -> str | None:
    """Where the servers are that the run starts, and the GPUs of the whole job."""
    gpus = config.sglang.rollout_num_gpus
    if gpus is None or not engine_traits(config.rollout.rollout_engine).has_servers:
        return None
    each = config.sglang.rollout_num_gpus_per_engine
    number = f"servers: {gpus // each} of {each} GPUs"
    if not config.sglang.colocate:
        return f"{number}, on {gpus} further GPUs: {config.world_size + gpus} in all"
    shared = "all" if gpus == config.world_size else f"{gpus} of the"
    return f"{number}, on {shared} {config.world_size} GPUs of the trainer (--colocate)"


def _ranks(result: Preflight) -> Iterator[str]:
    for rank in result.ranks:
        mark = "  <- heaviest" if rank is result.heaviest else ""
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


def json_of(result: Preflight) -> dict[str, object]:
    """The result as plain values, with sizes in bytes."""
    return {
        "fits": result.fits,
        "verdict": result.verdict,
        "world_size": result.config.world_size,
        "layout": result.ranks[0].layout,
        "parameters": result.shape.total,
        "limit": result.limit,
        "advice": list(result.advice),
        "ranks": [_rank_json(rank) for rank in result.ranks],
        "batches": asdict(result.batches),
        "bubble": result.bubble,
        "flops": result.flops,
        "step_s": result.step_s,
        "optimizer_steps": result.optimizer_steps,
        "training_s": result.training_s,
        "training_cost": None if result.training_s is None else result.cost_of(result.training_s),
        "collectives": [asdict(each) for each in result.collectives],
        "planes": asdict(result.planes),
        "seconds": result.seconds,
        "cpu_s": result.cpu_s,
        "host_bytes": result.host_bytes,
    }


def _rank_json(rank: RankReport) -> dict[str, object]:
    return {
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
