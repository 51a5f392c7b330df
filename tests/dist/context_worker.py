"""Workers of tests/dist/test_context_parallel.py: attention, losses and complete optimizer steps
under context parallelism."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parity.steps import (
    differences,
    parallel,
    train,
)  # applies the patches, before megatron-core is imported
from slime_like.losses import LossInputs, LossOutput, LossTerms, policy_losses, total_loss
from slime_like.losses.turns import turns_of
from slime_like.megatron.ops.context_parallel import rows_of_rank
from slime_like.metrics.typed import MetricAccumulator

from megatron.core.process_groups_config import ProcessGroupCollection  # isort: skip
from megatron.core.transformer.enums import AttnMaskType  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip
from slime_like.megatron.parallel_layout import ParallelLayout  # isort: skip
from slime_like.megatron.ops.attention import PackedAttention, packed_rows  # isort: skip
from slime_like.megatron.ops.window_attention import WindowAttention  # isort: skip
from tests.dist.float64 import WithoutFloat32
from tests.unit.losses.loss_cases import OF_SINGLE_RESPONSES, with_needed

# --- attention ---------------------------------------------------------------------------------------------------------

# lengths in chunks: padded into one batch, too uneven for that, one sequence
ATTENTION_CASES = {"alike": (3, 2, 3), "uneven": (1, 12, 1, 1), "one": (5,)}


def attention_differences(
    layout: ParallelLayout, case: str, groups: int, windows: bool
) -> dict[str, Any]:
    """Largest differences of outputs and gradients from the whole rows on one process, relative to
    the largest value. windows: with one of 7 tokens, and sinks."""
    cp = layout.cp_size
    lengths = torch.tensor(ATTENTION_CASES[case]) * 2 * cp
    cu_seqlens = torch.zeros(lengths.numel() + 1, dtype=torch.int32)
    cu_seqlens[1:] = lengths.cumsum(0)
    torch.manual_seed(3)
    total = int(lengths.sum())
    tensors = [torch.randn(total, n, 8).double() for n in (4, groups, groups)]
    grad = torch.randn(total, 32).double()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=groups,
        attention_dropout=0.0,
        window_size=(6, 0) if windows else None,
        softmax_type="learnable" if windows else "vanilla",
    )
    module = (WindowAttention if windows else PackedAttention)(
        config,
        1,
        AttnMaskType.causal,
        "self",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"]),
    )
    if isinstance(module, WindowAttention):
        module.softmax_offset = torch.nn.Parameter(torch.randn(4).double())
    local = rows_of_rank(cu_seqlens, cp, layout.cp_rank)
    shared = packed_rows(cu_seqlens, cp, layout.cp_rank)
    assert shared.context is not None
    results = []
    for rows, select in ((packed_rows(cu_seqlens), slice(None)), (shared, local)):
        leaves = [t[select].clone().requires_grad_() for t in tensors]
        out = module(*leaves, None, packed_seq_params=rows)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad[select])])
    pairs = [(part, full[local]) for full, part in zip(*results, strict=True)]
    return dict(
        padded=bool(shared.context.padded), keys=max(d - c for _, _, c, d in shared.context.spans), longest=int(lengths.max()),
        apart=[float((a - b).abs().max() / b.abs().max()) for a, b in pairs],
    )  # fmt: skip


# --- losses ------------------------------------------------------------------------------------------------------------


def packed_inputs(cp: int, active: str) -> tuple[LossInputs, Tensor]:
    """Float64 inputs of whole rows, six sequences, and their cu_seqlens. active: "many" tokens,
    "one", or "none"."""
    lengths = torch.tensor([1, 3, 1, 2, 1, 1]) * 2 * cp
    cu_seqlens = torch.zeros(7, dtype=torch.int32)
    cu_seqlens[1:] = lengths.cumsum(0)
    total = int(lengths.sum())
    g = torch.Generator().manual_seed(11)
    seq_ids = torch.repeat_interleave(torch.arange(6), lengths)
    mask = torch.rand(total, generator=g) > 0.4
    mask[seq_ids == 4] = False  # a sequence that trains nothing
    mask[seq_ids == 5] = torch.arange(2 * cp) == 0  # all of whose tokens are the first rank's
    if active != "many":
        mask[:] = False
        mask[5] = active == "one"
    old = -3 * torch.rand(total, generator=g, dtype=torch.float64)

    def noise(size: float) -> Tensor:
        return size * torch.randn(total, generator=g, dtype=torch.float64)

    rewards = torch.randn(6, generator=g, dtype=torch.float64)[seq_ids]
    turn_ids = turns_of(mask, seq_ids)
    log_probs = old + noise(0.3)
    loss_weights = torch.rand(6, generator=g, dtype=torch.float64)[seq_ids]
    columns = {
        "advantages": torch.where(torch.rand(total, generator=g) > 0.1, rewards, -rewards),
        "old_log_probs": old,
        "rollout_log_probs": old + noise(0.1),
        "ref_log_probs": old + noise(0.2),
        "entropy": noise(1.0),
        "keep_mask": torch.rand(total, generator=g) > 0.2,
        "rewards": rewards,
        "nll_weights": torch.rand(total, generator=g, dtype=torch.float64),
    }
    inputs = LossInputs(
        log_probs=log_probs,
        loss_mask=mask,
        loss_weights=loss_weights,
        seq_ids=seq_ids,
        num_seqs=6,
        **with_needed(columns, old),
        selection_seed=5,
        turn_ids=turn_ids,
        num_turns=int(turn_ids[-1]) + 1,
    )
    return inputs, cu_seqlens


LOSS_CASES: dict[str, tuple[str, dict[str, Any], LossTerms]] = {
    **{
        name: (name, {}, LossTerms())
        for name in OF_SINGLE_RESPONSES
        if name not in ("cross_entropy", "dro")
    },
    "cross_entropy": ("cross_entropy", {"keep_mask": None}, LossTerms()),
    "dpo": ("dpo", {"keep_mask": None}, LossTerms()),
    "dro": ("dro", {}, LossTerms()),
    "sapo of sequences": ("sapo", {}, LossTerms()),
    "sapo of turns": ("sapo", {}, LossTerms()),
    "gspo of turns": ("gspo", {}, LossTerms()),
    "ppo with opsm": ("ppo", {}, LossTerms(opsm_delta=0.01)),
    "ppo with all terms": ("ppo", {}, LossTerms(0.3, "k3", True, 0.1, 0.2)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "dro": {"dro_beta": 0.3},
    "gspo": {"eps_clip": 0.05},
    "luspo": {"eps_clip": 0.05},
    "gmpo": {"gmpo_eps_low": 0.2, "gmpo_eps_high": 0.2},
    "sapo of sequences": {"sapo_ratio_level": "sequence"},
    "sapo of turns": {"sapo_ratio_level": "turn"},
    "gspo of turns": {"eps_clip": 0.05, "gspo_ratio_level": "turn"},
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0},
}


def with_weights(inputs: LossInputs, level: str) -> LossInputs:
    """With importance weights, of tokens or of whole sequences."""
    g = torch.Generator().manual_seed(12)
    weights = 0.5 + torch.rand(inputs.log_probs.numel(), generator=g, dtype=torch.float64)
    if level == "sequence":
        weights = weights[:6][inputs.seq_ids]
    return dataclasses.replace(inputs, importance_weights=weights, importance_level=level)


def evaluate(
    inputs: LossInputs, name: str, settings: dict[str, Any], terms: LossTerms
) -> tuple[LossOutput, list[Tensor]]:
    leaves = [inputs.log_probs.clone().requires_grad_(), inputs.entropy.clone().requires_grad_()]  # type: ignore[union-attr]
    inputs = dataclasses.replace(inputs, log_probs=leaves[0], entropy=leaves[1])
    loss = policy_losses.get(name)
    output = total_loss(inputs, loss, loss.config_type(**settings), terms)
    (output.loss + 0 * leaves[0].sum() + 0 * leaves[1].sum()).backward()
    return output, [leaf.grad for leaf in leaves]  # type: ignore[misc]


def rows_of(inputs: LossInputs, rows: Tensor, group: dist.ProcessGroup) -> LossInputs:
    held = {
        f.name: getattr(inputs, f.name)[rows]
        for f in dataclasses.fields(inputs)
        if isinstance(getattr(inputs, f.name), Tensor)
    }
    return dataclasses.replace(inputs, **held, places=rows, cp_group=group)


def loss_differences(layout: ParallelLayout, case: str, active: str) -> dict[str, Any]:
    """Differences from one process that holds all rows: the summed loss, this rank's gradients,
    reduced metrics."""
    full, cu_seqlens = packed_inputs(layout.cp_size, active)
    name, changes, terms = LOSS_CASES[case]
    full = dataclasses.replace(full, **changes)
    if case in ("gmpo", "vespo", "gspo"):
        full = with_weights(full, "sequence" if case == "vespo" else "token")
    rows = rows_of_rank(cu_seqlens, layout.cp_size, layout.cp_rank)
    (expected, gradients), (output, own) = (
        evaluate(inputs, name, SETTINGS.get(case, {}), terms)
        for inputs in (full, rows_of(full, rows, layout.cp_group))
    )
    total = output.loss.detach().clone()
    dist.all_reduce(total, group=layout.cp_group)
    metrics = []
    for result, group in ((expected, None), (output, layout.cp_group)):
        accumulator = MetricAccumulator()
        accumulator.add(result.metrics)
        metrics.append(accumulator.reduce(group))
    return dict(
        loss=float((total - expected.loss).abs() / expected.loss.abs().clamp(min=1e-3)),
        gradients=max(float((a - b[rows]).abs().max()) for a, b in zip(own, gradients, strict=True)),
        size=float(gradients[0].abs().max()),
        metrics={key: abs(value - metrics[0][key]) for key, value in metrics[1].items()},
        same_names=metrics[0].keys() == metrics[1].keys(),
    )  # fmt: skip


# --- whole steps -------------------------------------------------------------------------------------------------------


def save_runs(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """Train on one process for every set of flags, into arguments["base"]."""
    with WithoutFloat32(), parallel() as layout:
        runs = {
            name: train(arguments["models"].get(name, arguments["model"]), layout, flags, "float64")
            for name, flags in arguments["losses"].items()
        }
    torch.save(runs, arguments["base"])


def several_ranks(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """One launch for everything on this many processes."""
    result: dict[str, Any] = {"attention": {}, "losses": {}, "steps": {}}
    with WithoutFloat32(), parallel(cp=world_size) as layout:
        for case in ATTENTION_CASES:
            for groups, windows in ((4, False), (2, False), (1, False), (2, True)):
                name = f"{case} {groups}{' windows' * windows}"
                result["attention"][name] = attention_differences(layout, case, groups, windows)
        for case in LOSS_CASES:
            for active in ("many", "one", "none"):
                result["losses"][f"{case}, {active} active"] = loss_differences(
                    layout, case, active
                )
    base = torch.load(arguments["base"])
    for name, (sizes, flags, losses) in arguments["layouts"].items():
        with WithoutFloat32(), parallel(**sizes) as layout:
            for loss in losses:
                model = arguments["models"].get(loss, arguments["model"])
                found = train(model, layout, f"{arguments['losses'][loss]} {flags}", "float64")
                result["steps"][f"{name}, {loss}"] = differences(found, base[loss])
    return result
