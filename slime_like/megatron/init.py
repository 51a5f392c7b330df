"""Process groups, the device of this process, and random seeds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from arguments.schema import ParallelConfig
from slime_like.distributed.connections import opening_groups
from slime_like.distributed.rendezvous import join_rendezvous, next_rendezvous
from slime_like.errors import RunError
from slime_like.megatron.parallel_layout import ParallelLayout, read_layout, without_layout


def device_of_this_process() -> torch.device:
    """The CUDA device of this local rank, else the CPU. A launcher that shows each process one GPU
    (srun --gpus-per-task=1) has given it that one.

    Raises RunError if there are fewer GPUs than processes on this host.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if count == 1:
        return torch.device("cuda", 0)
    if rank >= count:
        raise RunError(
            f"process {rank} of this host has no GPU: {count} are visible (CUDA_VISIBLE_DEVICES); "
            f"start at most {count} processes, or show each process one GPU"
        )
    return torch.device("cuda", rank)


@contextmanager
def process_groups(
    parallel: ParallelConfig, *, virtual_stages: int | None, seed: int
) -> Iterator[ParallelLayout]:
    """Create the default process group and megatron-core's groups, and destroy them at the end.
    Raises as `world_of_processes`."""
    with (
        world_of_processes(parallel),
        model_parallel_groups(parallel, virtual_stages=virtual_stages, seed=seed) as layout,
    ):
        yield layout


@contextmanager
def world_of_processes(parallel: ParallelConfig) -> Iterator[None]:
    """The default process group. Without torchrun the world is one process.

    Raises RunError naming host, port and rank if the rendezvous fails.
    """
    device = device_of_this_process()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = parallel.distributed_backend
    if backend != "gloo" and device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"  # signals and samples are tensors of the host
    elif backend == "auto":
        backend = "gloo"
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    meeting = next_rendezvous()
    if meeting is None:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    else:
        store = join_rendezvous(meeting, timeout)
        try:
            with opening_groups():
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=meeting.rank,
                    world_size=meeting.world_size,
                    timeout=timeout,
                )
        except (RuntimeError, ValueError) as error:
            # the rendezvous succeeded, but ranks cannot connect to each other
            raise meeting.failed(f"{backend}: {str(error).splitlines()[0]}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def model_parallel_groups(
    parallel: ParallelConfig, *, virtual_stages: int | None, seed: int
) -> Iterator[ParallelLayout]:
    """Create megatron-core's groups over all processes, and its random states."""
    from megatron.core import parallel_state

    try:
        yield make_layout(parallel, virtual_stages=virtual_stages, seed=seed)
    finally:
        parallel_state.destroy_model_parallel()


def make_layout(
    parallel: ParallelConfig, *, virtual_stages: int | None, seed: int
) -> ParallelLayout:
    """Create megatron-core's groups and random states after the rendezvous, and activate the
    layout."""
    from megatron.core import parallel_state

    from slime_like.megatron.rng import seed_stage

    with opening_groups():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual_stages,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            distributed_timeout_minutes=max(1, round(parallel.distributed_timeout_minutes)),
        )
    seed_stage(seed, parallel_state.get_pipeline_model_parallel_rank())
    return read_layout()


def make_further_layout(
    parallel: ParallelConfig, *, virtual_stages: int | None, seed: int
) -> ParallelLayout:
    """Create another layout over the same processes; the current one stays active. Its groups are
    destroyed with the default process group."""
    with without_layout():
        return make_layout(parallel, virtual_stages=virtual_stages, seed=seed)
