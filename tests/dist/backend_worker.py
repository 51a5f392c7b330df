"""Workers of tests/dist/test_backend.py and test_vocab_parallel.py: a `MegatronBackend` or a
`Trainer` on random samples."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_patches

megatron_patches.apply()

from benchmarks.parity.steps import SAMPLES as SAMPLES  # noqa: E402
from benchmarks.parity.steps import VOCAB as VOCAB  # noqa: E402
from benchmarks.parity.steps import parallel, random_samples, settings, share, weights  # noqa: E402
from benchmarks.vocab_parallel import vocab_parallel_log_probs  # noqa: E402
from slime_like.guards.finite import GuardError  # noqa: E402
from slime_like.guards.update import SkippedStepGuard  # noqa: E402
from slime_like.megatron.backend import MegatronBackend  # noqa: E402
from slime_like.megatron.network import Network  # noqa: E402
from slime_like.megatron.parallel_layout import ParallelLayout  # noqa: E402
from slime_like.trainer.trainer import Trainer  # noqa: E402
from tests.dist.float64 import WithoutFloat32  # noqa: E402


def optimizer_state(backend: MegatronBackend) -> list[torch.Tensor]:
    """Adam's tensors, the fp32 parameters and the model's on this rank."""
    network = backend.trained
    network.finish_updates()  # what --overlap-param-gather has not brought yet is not a change
    tensors = []
    for part in getattr(network.optimizer, "chained_optimizers", [network.optimizer]):
        for state in part.optimizer.state.values():
            tensors += [
                value.clone() for value in state.values() if isinstance(value, torch.Tensor)
            ]
        tensors += [
            p.detach().clone() for group in part.optimizer.param_groups for p in group["params"]
        ]
    return tensors + [p.detach().clone() for chunk in network.chunks for p in chunk.parameters()]


def poison_one_rank(network: Network, rank: int, value: float) -> Any:
    """From now on, one gradient of rank `rank` holds `value`. Returns a handle with remove()."""
    parameter = next(p for p in network.chunks[0].parameters() if p.requires_grad)

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[3] = value
        return gradient

    return parameter.register_hook(poison) if dist.get_rank() == rank else None


def check_poison(folder: str, layout: ParallelLayout, flags: str, value: float) -> dict[str, Any]:
    """Two good steps, three poisoned on the last rank, one good: what happened on this rank."""
    backend = MegatronBackend(settings(folder, flags), layout, total_steps=8)
    gate = SkippedStepGuard(patience=3)
    warnings = []
    for seed in (1, 2):
        result = backend.update(share(random_samples(seed), layout))
        warnings.append(gate.check(result.skipped, result.grad_norm))
    before = optimizer_state(backend)
    handle = poison_one_rank(backend.policy, layout.world_size - 1, value)
    skipped, same, stopped = [], [], None
    for seed in (3, 4, 5):
        result = backend.update(share(random_samples(seed), layout))
        skipped.append(result.skipped)
        same.append(
            all(torch.equal(a, b) for a, b in zip(before, optimizer_state(backend), strict=True))
        )
        try:
            warnings.append(gate.check(result.skipped, result.grad_norm))
        except GuardError as error:
            stopped = str(error)
    if handle is not None:
        handle.remove()
    result = backend.update(share(random_samples(6), layout))
    moved = not all(
        torch.equal(a, b) for a, b in zip(before, optimizer_state(backend), strict=True)
    )
    finite = all(bool(tensor.isfinite().all()) for tensor in optimizer_state(backend))
    return dict(
        skipped=skipped, same=same, warnings=warnings, stopped=stopped, total=gate.total,
        after=[result.skipped, moved, finite], lr=result.learning_rate,
    )  # fmt: skip


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)


def check_bf16(folder: str, layout: ParallelLayout) -> dict[str, Any]:
    """Losses and weights of two steps in bf16 and in fp32."""
    results = {}
    for name, flags in (
        ("fp32", ""),
        ("bf16", "--bf16"),
        ("bf16 dist", "--bf16 --use-distributed-optimizer --accumulate-allreduce-grads-in-fp32"),
    ):
        backend = MegatronBackend(settings(folder, flags + " --lr 1e-3"), layout, total_steps=8)
        steps = [backend.update(share(random_samples(seed), layout)) for seed in (1, 2)]
        results[name] = (
            [s.metrics["loss"] for s in steps],
            [s.grad_norm for s in steps],
            weights(backend),
        )
    return {
        name: dict(losses=losses, grad_norms=norms, distance=distance(after, results["fp32"][2]))
        for name, (losses, norms, after) in results.items()
    }


@contextmanager
def make_trainer(folder: str, layout: ParallelLayout, out: str, flags: str) -> Iterator[Trainer]:
    trainer = Trainer(settings(folder, flags), layout, Path(out))
    yield trainer
    trainer.close()


def check_gate(folder: str, layout: ParallelLayout, out: str) -> dict[str, Any]:
    """A log-prob pass that computes another model than the update: the run stops before any
    step."""
    flags = "--micro-batch-size 1 --num-steps-per-rollout 2"
    with make_trainer(folder, layout, out, flags) as trainer:
        before = optimizer_state(trainer.backend)
        real = trainer.backend.forward

        def wrong(*call: Any, **named: Any) -> Any:
            return [
                dataclasses.replace(s, log_probs=s.log_probs + 1e-6) for s in real(*call, **named)
            ]

        trainer.backend.forward = wrong  # type: ignore[method-assign]
        try:
            trainer.step(0)
        except GuardError as error:
            same = all(
                torch.equal(a, b)
                for a, b in zip(before, optimizer_state(trainer.backend), strict=True)
            )
            return dict(error=str(error), same=same)
    return dict(error=None)


def spoiled(
    samples: list[Any], tensors: list[torch.Tensor], value: float
) -> tuple[int, torch.Tensor]:
    """(place of the first sample with an active token, its tensor [R] with `value` there)."""
    place = next(i for i, sample in enumerate(samples) if sample.loss_mask.any())
    tensor = tensors[place].clone()
    tensor[int(samples[place].loss_mask.nonzero()[0])] = value
    return place, tensor


def check_non_finite(folder: str, ref: str, layout: ParallelLayout, out: str) -> dict[str, Any]:
    """One number of the last rank's reference is not finite: in the log-prob pass, or not before
    the loss. The gradient would not show it."""
    flags = f"--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3 --ref-load {ref}"
    spoilt_rank = layout.rank == layout.world_size - 1
    found = {}
    with make_trainer(folder, layout, out, flags) as trainer:
        backend, before = trainer.backend, optimizer_state(trainer.backend)
        groups = trainer.sampling.rollout_manager.generate(0).groups
        samples = [sample for group in groups for sample in group.samples]
        batches, _ = trainer.batch_builder.build(samples, weight_version=1)
        policy = batches.policy
        if spoilt_rank:
            local = list(policy[0].samples)
            i, broken = spoiled(local, [s.ref_log_probs for s in local], float("nan"))
            local[i] = dataclasses.replace(local[i], ref_log_probs=broken)
            policy = [dataclasses.replace(policy[0], samples=tuple(local)), *policy[1:]]
        real = backend.forward

        def broken_reference(local: Any, network: Any = None) -> Any:
            results = real(local, network)
            if network is backend.reference and spoilt_rank:
                i, log_probs = spoiled(local, [r.log_probs for r in results], float("-inf"))
                results[i] = dataclasses.replace(results[i], log_probs=log_probs)
            return results

        for name, attempt in {
            "loss": lambda: trainer.train_step.train_policy(
                0,
                dataclasses.replace(batches, policy=policy),
                weight_version=1,
                on_policy=True,
            ),
            "reference": lambda: trainer.batch_builder.build(samples, weight_version=1),
        }.items():
            backend.forward = real if name == "loss" else broken_reference  # type: ignore[method-assign]
            try:
                attempt()
                found[name] = ""
            except GuardError as error:
                found[name] = str(error)
        same = all(torch.equal(a, b) for a, b in zip(before, optimizer_state(backend), strict=True))
    return {**found, "same": same}


def check_adaptive_entropy(folder: str, layout: ParallelLayout, out: str) -> dict[str, Any]:
    """Two optimizer steps with a bonus that has to rise, and a second trainer that continues from the
    first one's state."""
    flags = (
        "--entropy-ctrl-type adaptive --entropy-target 100 --entropy-coef 0.001 "
        "--entropy-coef-delta 0.0005"
    )
    with make_trainer(folder, layout, out, flags) as trainer:
        groups = trainer.sampling.rollout_manager.generate(0).groups
        samples = [sample for group in groups for sample in group.samples]
        batches, _ = trainer.batch_builder.build(samples, weight_version=1)
        twice = dataclasses.replace(batches, policy=[batches.policy[0], batches.policy[0]])
        metrics = trainer.train_step.train_policy(0, twice, weight_version=1, on_policy=True)
        applied = trainer.backend.objective.terms.entropy_coef
        state = json.loads(json.dumps(trainer._state({})))
    with make_trainer(folder, layout, out, flags) as trainer:
        trainer.train_step.load_state_dict(state)
        resumed = trainer.train_step.entropy.coef
        older: Any = {name: value for name, value in state.items() if name != "entropy_controller"}
        trainer.train_step.load_state_dict(older)
    return dict(mean=metrics["train/entropy_coef"], applied=applied, resumed=resumed)


def check_kl_in_reward(folder: str, ref: str, layout: ParallelLayout, out: str) -> dict[str, Any]:
    """Advantages of this rank's samples with a KL penalty, and what a hand computation needs:
    log-probs of policy and reference."""
    with make_trainer(
        folder, layout, out, f"--kl-coef 0.5 --ref-load {ref} --advantage-estimator grpo"
    ) as trainer:
        groups = trainer.sampling.rollout_manager.generate(0).groups
        samples = [sample for group in groups for sample in group.samples]
        batches, metrics = trainer.batch_builder.build(samples, weight_version=0)
        local = [sample for batch in batches.policy for sample in batch.samples]
        return dict(
            advantages=[
                [float(v) for v in s.advantages if v != 0][:1]
                for s in local
                if s.advantages is not None
            ],
            penalties=[
                float(((s.old_log_probs - s.ref_log_probs) * s.loss_mask).sum()) for s in local
            ],  # type: ignore[operator]
            rewards=[sample.reward for sample in samples],
            indices=trainer.batch_builder.plan.assign(samples).local_indices,
            reported=metrics["rollout/kl_in_reward"],
            active=sum(s.active_tokens for s in samples),
        )


ONE_PASS = {
    "DP2": "--policy-loss-type gspo",
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel --entropy-coef 0.1",
    "PP2": "--pipeline-model-parallel-size 2 --policy-loss-type sapo",
    "CP2": "--context-parallel-size 2",
}


def check_one_pass(folder: str, layout: ParallelLayout, out: str, flags: str) -> dict[str, Any]:
    """A rollout whose old log-probs are those of its training pass, and of a separate pass:
    (metrics, weights and optimizer state) of each."""
    found = []
    for old_is_current in (True, False):
        with make_trainer(folder, layout, out, flags + " --micro-batch-size 1") as trainer:
            batches = trainer.batch_builder
            settings = dataclasses.replace(batches.settings, old_is_current=old_is_current)
            default = batches.settings.old_is_current
            batches.settings = settings
            metrics = trainer.step(0)
            kept = {name: v for name, v in metrics.items() if not name.startswith("perf/")}
            found.append((kept, optimizer_state(trainer.backend), default))
    (own, weights, default), (apart, others, _) = found
    same = all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    return dict(default=default, own=own, apart=apart, same=same)


# layout: (tensor and pipeline parallel size, flags, what stands in the gradient)
POISONED: dict[str, tuple[tuple[int, int], str, float]] = {
    "DP2": ((1, 1), "", math.nan),
    "DP2 distributed optimizer": ((1, 1), "--use-distributed-optimizer", math.nan),
    "DP2 overlap": (
        (1, 1),
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        math.inf,
    ),
    "TP2": ((2, 1), "--tensor-model-parallel-size 2 --sequence-parallel", math.nan),
    "PP2": ((1, 2), "--pipeline-model-parallel-size 2", math.inf),
    "PP2 distributed optimizer": (
        (1, 2),
        "--pipeline-model-parallel-size 2 --use-distributed-optimizer",
        math.nan,
    ),
    "DP2 bf16": ((1, 1), "--bf16 --use-distributed-optimizer", math.nan),
}


def poisoned(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """What `check_poison` finds under each of arguments["layouts"]."""
    result = {}
    for name in arguments["layouts"]:
        (tp, pp), flags, value = POISONED[name]
        with parallel(tp, pp) as layout:
            result[name] = check_poison(arguments["model"], layout, flags, value)
    return result


def one_pass(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """What `check_one_pass` finds under each of arguments["layouts"]."""
    result = {}
    for name in arguments["layouts"]:
        with parallel(**{name[:2].lower(): 2} if name != "DP2" else {}) as layout:
            result[name] = check_one_pass(
                arguments["model"], layout, arguments["out"], ONE_PASS[name]
            )
    return result


def two_ranks(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """What two data-parallel processes find."""
    folder, ref, out = arguments["model"], arguments["ref"], arguments["out"]
    with parallel() as layout:
        return {
            "bf16": check_bf16(folder, layout),
            "gate": check_gate(folder, layout, out),
            "non finite": check_non_finite(folder, ref, layout, out),
            "entropy": check_adaptive_entropy(folder, layout, out),
            "kl": check_kl_in_reward(folder, ref, layout, out),
        }


def vocab_differences(layout: ParallelLayout) -> list[float]:
    """Largest differences from one rank of log-probs, entropies and gradients, relative to the
    largest value."""
    worst = [0.0, 0.0, 0.0]
    for vocab_size, temperature in ((61, 1.0), (61, 0.7), (33, 1.0), (64, 1.3)):
        torch.manual_seed(5)
        logits, labels, weight = (
            4 * torch.randn(23, 64).double(),
            torch.randint(vocab_size, (23,)),
            torch.randn(2, 23).double(),
        )
        logits[:, 50:52] = float("-inf")
        labels = torch.where((labels >= 50) & (labels < 52), 1, labels)

        def both(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
            x = x.clone().requires_grad_()
            with WithoutFloat32():
                log_probs, entropy = vocab_parallel_log_probs(
                    x,
                    labels,  # noqa: B023
                    vocab_size=vocab_size,  # noqa: B023
                    temperature=temperature,  # noqa: B023
                    tp_group=group,
                )
            (weight[0] * log_probs + weight[1] * entropy).sum().backward()  # noqa: B023
            assert x.grad is not None
            return [log_probs.detach(), entropy.detach(), x.grad]

        width = 64 // layout.tp_size
        local = slice(layout.tp_rank * width, (layout.tp_rank + 1) * width)
        full, part = both(logits, None), both(logits[:, local], layout.tp_group)
        full[2] = full[2][:, local]
        for i, (a, b) in enumerate(zip(part, full, strict=True)):
            assert a.isfinite().all()
            worst[i] = max(worst[i], float((a - b).abs().max() / max(float(b.abs().max()), 1e-3)))
    return worst


def vocab_differences_on_all(rank: int, world_size: int, arguments: dict[str, Any]) -> list[float]:
    """Of four ranks the last has nothing but padding where the vocabulary has 33 tokens."""
    with parallel(world_size) as layout:
        return vocab_differences(layout)
