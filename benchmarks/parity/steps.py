"""Run three optimizer steps in one layout, on existing process groups, and compare them with those
of one process.

Used by the parity matrix and by tests/dist.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_patches

megatron_patches.apply()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402

from arguments.parse import parse_args  # noqa: E402
from arguments.run_config import CriticModel, RunConfig  # noqa: E402
from slime_like.megatron.backend import MegatronBackend  # noqa: E402
from slime_like.megatron.parallel_layout import ParallelLayout, read_layout  # noqa: E402
from slime_like.types import TrainBatch, TrainSample  # noqa: E402
from slime_like.weights.hf_export import HfExport  # noqa: E402

VOCAB = 61
SAMPLES = 8  # samples per optimizer step, over all ranks
STEPS = 3


@contextmanager
def parallel(
    tp: int = 1, pp: int = 1, vp: int = 1, ep: int = 1, etp: int | None = None, cp: int = 1
) -> Iterator[ParallelLayout]:
    """Create model-parallel groups of these sizes over all ranks, and destroy them at the end."""
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield read_layout()
    groups = [
        group
        for group in parallel_state._global_process_group_list or ()
        if isinstance(group, dist.ProcessGroup)
    ]
    parallel_state.destroy_model_parallel()
    gc.collect()  # free models that use these groups
    dist.barrier()  # no rank destroys a group that another still uses
    # megatron-core only drops its references: the threads of the groups would remain, and hundreds
    # of them slow down every later layout
    for group in groups:
        with contextlib.suppress(ValueError):  # gloo groups are destroyed by megatron-core
            dist.destroy_process_group(group)


def settings(folder: str, flags: str = "") -> RunConfig:
    """Settings of a run on the model in `folder`, with `SAMPLES` samples per step. flags:
    additional flags."""
    words = (
        f"--hf-checkpoint {folder} --debug-train-only --load-debug-rollout-data "
        f"{folder}/rollout_{{rollout_id}} --lr 1e-2 --num-rollout 4 "
        f"--rollout-batch-size 2 --n-samples-per-prompt 4 --no-tensorboard --no-progress {flags}"
    )
    return parse_args(words.split(), dist.get_world_size())


def random_samples(seed: int, count: int = SAMPLES) -> list[TrainSample]:
    """Samples of uneven lengths with holes in their masks; old log-probs near those of a random
    model."""
    g = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        prompt, response = (int(torch.randint(1, 12, (), generator=g)) for _ in range(2))
        samples.append(
            TrainSample(
                tokens=torch.randint(VOCAB, (prompt + response,), generator=g),
                response_length=response,
                loss_mask=torch.rand(response, generator=g) > 0.2,
                loss_weights=torch.full((response,), 1 / 32),
                advantages=torch.randn(response, generator=g),
                old_log_probs=-4.1 + 0.2 * torch.randn(response, generator=g),
            )
        )
    return samples


def share(samples: Sequence[TrainSample], layout: ParallelLayout) -> TrainBatch:
    """This data-parallel rank's samples."""
    size = len(samples) // layout.dp_size
    return TrainBatch(tuple(samples[layout.dp_rank * size : (layout.dp_rank + 1) * size]))


def weights(backend: MegatronBackend) -> dict[str, Tensor]:
    """Full weights of the policy, by Hugging Face name."""
    return {name: _wide(tensor) for name, tensor in backend.export_weights()}


def _wide(tensor: Tensor) -> Tensor:
    """A copy on the host in float32; float64 tensors stay float64."""
    return tensor.to("cpu", torch.promote_types(torch.float32, tensor.dtype), copy=True)


def train_samples(seed: int) -> list[TrainSample]:
    """Samples of various lengths, some shorter than two chunks for four ranks, with keep masks,
    reference log-probs, and weights that differ by sample."""
    g = torch.Generator().manual_seed(1000 + seed)
    samples = []
    for i, s in enumerate(random_samples(seed)):
        size = (s.response_length,)
        samples.append(
            dataclasses.replace(
                s,
                loss_weights=torch.full(size, (1 + i) / 100),
                advantages=torch.full(size, float(torch.randn((), generator=g))),
                ref_log_probs=-4.1 + 0.2 * torch.randn(size, generator=g),
                rollout_log_probs=-4.1 + 0.2 * torch.randn(size, generator=g),
                keep_mask=torch.rand(size, generator=g) > 0.1,
                importance_weights=0.5 + torch.rand(size, generator=g),
            )
        )
    return samples


def gradients(built: MegatronBackend) -> dict[str, Tensor]:
    """Full reduced gradients of all parameters, by Hugging Face name, obtained by exporting them in
    place of the weights."""
    built.trained.reduce_gradients()
    for module in built.trained.modules:
        whole_gradients(module)
    # not `export_weights`: it would mark the next step's parameters as gathered already
    # (--overlap-param-gather)
    assert built.hf is not None
    with gradients_as_parameters(built.policy.chunks):
        exported = HfExport(
            built.policy.chunks, hf=built.hf, gpt=built.gpt, layout=built.layout
        ).stream()
        return {name: _wide(tensor) for name, tensor in exported}


@contextmanager
def gradients_as_parameters(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Replace the parameters by parameters with the gradients as data. Writing the gradients into
    the existing ones only works in float32: when the dtype of a parameter's data changes, torch
    drops its gradient hooks, including Megatron's."""
    places = [
        (m, name, p)
        for chunk in chunks
        for m in chunk.modules()
        for name, p in m._parameters.items()
        if p is not None and p.requires_grad
    ]
    of_parameter = {
        p: torch.nn.Parameter(p.main_grad.detach(), requires_grad=False)  # type: ignore[attr-defined]
        for _, _, p in places
    }
    for module, name, p in places:
        module._parameters[name] = of_parameter[p]
    try:
        yield
    finally:
        for module, name, p in places:
            module._parameters[name] = p


def whole_gradients(module: Any) -> None:
    """With the distributed optimizer a rank has the reduced gradients of its shard of each buffer;
    all-gather the other shards."""
    if not module.ddp_config.use_distributed_optimizer:
        return
    for buffer in (*module.buffers, *module.expert_parallel_buffers):
        for bucket in buffer.buckets:
            group = buffer.data_parallel_group
            shards = list(bucket.grad_data.chunk(dist.get_world_size(group)))
            dist.all_gather(shards, shards[dist.get_rank(group)].clone(), group=group)


def in_float64(config: RunConfig | CriticModel) -> None:
    """Make the networks of this run compute in float64. There is no flag for it, since it is of no
    use in training."""
    transformer = config.megatron.transformer
    transformer.params_dtype = transformer.pipeline_dtype = torch.float64
    if transformer.num_moe_experts is not None:
        transformer.moe_router_dtype = "fp64"


def train(
    folder: str,
    layout: ParallelLayout,
    flags: str,
    precision: str = "float32",
    samples_of: Callable[[int], list[TrainSample]] = train_samples,
    change: Callable[[RunConfig], RunConfig] = lambda config: config,
) -> dict[str, Any]:
    """Train; returns losses, gradients and gradient norms of every step, log-probs before the first
    and weights after the last step.

    Args:
        samples_of: The samples of a step, over all ranks.
        change: What is changed in the settings.
    """
    common = (
        "--lr 3e-4 --adam-eps 1e-6 --weight-decay 0.1 --clip-grad 1.0 --entropy-coef 0.01 "
        "--use-kl-loss --kl-loss-coef 0.3"
    )
    config = change(settings(folder, f"{common} --ref-load {folder} {flags}"))
    if precision == "float64":
        in_float64(config)
    built = MegatronBackend(config, layout, total_steps=STEPS)
    first = share(samples_of(1), layout)
    log_probs = [s.log_probs.cpu() for s in built.forward(first.samples)]
    losses = []
    metrics = []
    norms = []
    found: dict[str, Tensor] = {}
    for step in range(1, STEPS + 1):
        pending = built.forward_backward(TrainBatch(share(samples_of(step), layout).samples))
        found |= {f"step {step} {name}": g for name, g in gradients(built).items()}
        losses.append(pending.metrics["loss"])
        metrics.append(pending.metrics)
        result = built.optim_step(pending)
        assert not result.skipped
        norms.append(result.grad_norm)
    return dict(
        losses=losses, gradients=found, weights=weights(built), metrics=metrics,
        log_probs=log_probs, grad_norms=norms, dp=(layout.dp_rank, layout.dp_size)
    )  # fmt: skip


def largest(values: Iterable[float]) -> float:
    """The maximum; infinity if there is a NaN, which `max` could ignore."""
    return max(float("inf") if math.isnan(value) else value for value in values)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def overall(found: dict[str, Tensor], base: dict[str, Tensor]) -> float:
    """Like `relative`, with all tensors taken as one."""
    return float(
        sum((found[n] - b).norm() ** 2 for n, b in base.items()) ** 0.5
        / sum(b.norm() ** 2 for b in base.values()) ** 0.5
    )


def differences(found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Differences from one process, maximised over tensors and steps. Losses are divided by their
    largest value, since in some steps their terms nearly cancel."""
    rank, ranks = found["dp"]
    share = len(base["log_probs"]) // ranks
    local = base["log_probs"][rank * share : (rank + 1) * share]
    gradient = {n: relative(found["gradients"][n], g) for n, g in base["gradients"].items()}
    for kind in ("gradients", "weights"):
        assert found[kind].keys() == base[kind].keys()

    def pairs(name: str, distance: Callable[[float, float], float]) -> list[float]:
        return [distance(a, b) for a, b in zip(found[name], base[name], strict=True)]

    metrics = {}
    for step, expected in zip(found["metrics"], base["metrics"], strict=True):
        for name, value in expected.items():
            if not name.startswith("perf/"):
                metrics[name] = abs(step[name] - value)
    return dict(
        loss=largest(pairs("losses", lambda a, b: abs(a - b))) / max(map(abs, base["losses"])),
        gradients=largest(gradient.values()),
        worst_gradient=max(gradient, key=lambda n: gradient[n]),
        all_gradients=overall(found["gradients"], base["gradients"]),
        weights=largest(relative(found["weights"][n], w) for n, w in base["weights"].items()),
        all_weights=overall(found["weights"], base["weights"]),
        grad_norm=largest(pairs("grad_norms", lambda a, b: abs(a / b - 1))),
        log_probs=largest(
            float((a - b).abs().max()) for a, b in zip(found["log_probs"], local, strict=True)
        ),
        metrics=metrics,
    )
