"""Workers of tests/dist/test_critic_layouts.py: policy and critic of a `MegatronBackend` in
different layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import parallel
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.parallel_layout import ParallelLayout
from tests.dist.backend_worker import random_samples, share
from tests.dist.critic_worker import FLAGS, STEPS, critic_samples, critic_weights
from tests.dist.float64 import WithoutFloat32, settings

TP2, PP2, CP2 = (
    "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 2",
    "--context-parallel-size 2",
)
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


def critics(flags: str) -> str:
    return flags.replace("--", "--critic-")


# name -> flags, of two processes
PAIRS = {
    "TP2, critic PP2": f"{TP2} {critics('--tensor-model-parallel-size 1 ' + PP2)}",
    "TP2 SP, critic DP2": f"{TP2} --sequence-parallel {critics('--tensor-model-parallel-size 1')} "
    f"{DISTRIBUTED}",
    "PP2, critic TP2 SP": f"{PP2} "
    f"{critics('--pipeline-model-parallel-size 1 ' + TP2 + ' --sequence-parallel')}",
    "PP2 VP2, critic CP2": f"{PP2} --num-virtual-stages-per-pipeline-rank 2 "
    f"{critics('--pipeline-model-parallel-size 1 ' + CP2)}",
    "DP2, critic TP2": f"{critics(TP2)} {DISTRIBUTED}",
    "DP2, critic PP2 VP2": critics(f"{PP2} --num-virtual-stages-per-pipeline-rank 2"),
    "CP2, critic TP2": f"{CP2} {critics('--context-parallel-size 1 ' + TP2)}",
}
SP = "--sequence-parallel"
EXPERTS = {
    "EP2, critic ETP2": "--expert-model-parallel-size 2 "
    f"{critics('--expert-model-parallel-size 1 ' + TP2 + ' ' + SP)}",
    "TP2 EP2, critic EP2": f"{TP2} {SP} --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 "
    f"{critics('--tensor-model-parallel-size 1')}",
}
# of four
QUADS = {
    "TP2 PP2, critic DP4": f"{TP2} {PP2} "
    f"{critics('--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1')} {DISTRIBUTED}",
    "DP4, critic TP2 PP2": f"{critics(TP2 + ' --sequence-parallel ' + PP2)}",
    "TP2 DP2, critic PP2 DP2": f"{TP2} {critics('--tensor-model-parallel-size 1 ' + PP2)} "
    "--use-distributed-optimizer",
    "PP4, critic TP2 CP2": "--pipeline-model-parallel-size 4 "
    f"{critics('--pipeline-model-parallel-size 1 ' + TP2 + ' ' + CP2)}",
    "CP2 DP2, critic PP4": f"{CP2} "
    f"{critics('--context-parallel-size 1 --pipeline-model-parallel-size 4')}",
}


def policy_weights(backend: MegatronBackend) -> dict[str, Tensor]:
    return {name: tensor.float().clone() for name, tensor in backend.export_weights()}


def starts_alike(backend: MegatronBackend) -> bool:
    """Whether the fresh critic has the policy's bits, and a head of zeros."""
    policy, critic = policy_weights(backend), critic_weights(backend)
    heads = [critic.pop("score.weight"), critic.pop("score.bias")]
    policy.pop("lm_head.weight", None)
    same = policy.keys() == critic.keys() and all(
        torch.equal(policy[name], critic[name]) for name in policy
    )
    return same and not any(head.any() for head in heads)


def train(folder: str, layout: ParallelLayout, flags: str, out: str) -> dict[str, Any]:
    """Values of this rank's samples, then STEPS times an optimizer step of the critic and one of
    the policy; rank 0 writes both networks' weights to `out`."""
    backend = MegatronBackend(settings(folder, FLAGS + flags), layout, total_steps=8)
    assert backend.critic is not None
    alike = starts_alike(backend)
    if (
        Path(f"{folder}/critic").is_dir()
    ):  # else it starts from a head of zeros, and the second step is the first of the whole network
        backend.critic.load_hf(f"{folder}/critic")
    own = backend.critic.layout
    values = backend.forward_critic(share(critic_samples(0), own).samples)
    critic, policy = [], []
    for seed in range(STEPS):
        critic.append(backend.update_critic(share(critic_samples(seed), own)))
        policy.append(backend.update(share(random_samples(seed), layout)))
    found = {"critic": critic_weights(backend), "policy": policy_weights(backend)}
    if layout.rank == 0:
        torch.save(found, out)
    return dict(
        values=[v.tolist() for v in values], dp_rank=own.dp_rank, dp_size=own.dp_size,
        layouts=[layout.describe(), own.describe()],
        alike=alike, shared=own is layout,
        critic_norms=[r.grad_norm for r in critic], policy_norms=[r.grad_norm for r in policy],
        losses=[r.metrics["value_loss"] for r in critic],
        policy_losses=[r.metrics["loss"] for r in policy],
    )  # fmt: skip


def replicas_apart(folder: str, layout: ParallelLayout, flags: str) -> float:
    """With dropout: how far parameters that tensor-parallel ranks of the critic hold alike are
    apart after a step; they draw the same numbers for positions that they share."""
    backend = MegatronBackend(settings(folder, FLAGS + flags), layout, total_steps=8)
    assert backend.critic is not None
    backend.critic.load_hf(f"{folder}/critic")
    torch.manual_seed(100 * layout.pp_rank)  # the policy's stages have other numbers
    for seed in range(2):
        backend.update_critic(share(critic_samples(seed), backend.critic.layout))
    apart = 0.0
    for chunk in backend.critic.chunks:
        for _, parameter in chunk.named_parameters():
            if not getattr(parameter, "tensor_model_parallel", False):
                theirs = [torch.empty_like(parameter) for _ in range(2)]
                dist.all_gather(
                    theirs, parameter.detach().contiguous(), group=backend.critic.layout.tp_group
                )
                apart = max(apart, float((theirs[0] - theirs[1]).abs().max()))
    return apart


def several(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """One launch for the pairs of one number of processes."""
    result: dict[str, Any] = {}
    cases = {
        name: (arguments["model"], flags)
        for name, flags in (PAIRS if world_size == 2 else QUADS).items()
    }
    if world_size == 2:
        cases |= {name: (arguments["experts"], flags) for name, flags in EXPERTS.items()}
    for name, (folder, flags) in cases.items():
        with WithoutFloat32(), parallel(**sizes_of(flags)) as layout:
            result[name] = train(folder, layout, flags, f"{arguments['out']}/{name}.pt")
            dist.barrier()
    if world_size == 2:
        with WithoutFloat32(), parallel(pp=2) as layout:
            flags = (
                f"{PP2} {critics('--pipeline-model-parallel-size 1 ' + TP2)} --hidden-dropout 0.2"
            )
            result["apart"] = replicas_apart(arguments["model"], layout, flags)
    return result
