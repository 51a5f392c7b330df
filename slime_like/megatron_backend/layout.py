"""The one reader of megatron-core's parallel state. Everything else is handed a `ParallelLayout`."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes, ranks and process groups of this process. `dp_*` excludes context parallelism, `dp_cp_group` includes it.
    A copy of the model is spread over the tensor-, context- and pipeline-parallel ranks. Experts are spread in a grid of their own, of
    expert-tensor-, expert- and pipeline-parallel ranks, which may take in several data-parallel ranks."""

    world_size: int
    rank: int
    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    vp_size: int  # model chunks on this rank; 1 without the interleaved schedule
    cp_size: int
    cp_rank: int
    dp_size: int
    dp_rank: int
    ep_size: int  # ranks that share the experts
    ep_rank: int
    etp_size: int  # ranks that share each expert's matrices
    etp_rank: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup
    ep_group: dist.ProcessGroup
    etp_group: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        """True where the embedding is (of the first model chunk)."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True where the output layer is (of the last model chunk): the ranks that compute losses and log-probs."""
        return self.pp_rank == self.pp_size - 1

    def describe(self) -> str:
        vp = f" VP{self.vp_size}" if self.vp_size > 1 else ""
        experts = f" EP{self.ep_size} ETP{self.etp_size}" if self.ep_size > 1 or self.etp_size != self.tp_size else ""
        return f"TP{self.tp_size} PP{self.pp_size}{vp} CP{self.cp_size} DP{self.dp_size}{experts}"


def read_layout() -> ParallelLayout:
    """The layout after `initialize_model_parallel`."""
    from megatron.core import parallel_state as mpu

    return ParallelLayout(
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        vp_size=mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
        cp_size=mpu.get_context_parallel_world_size(),
        cp_rank=mpu.get_context_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        dp_rank=mpu.get_data_parallel_rank(),
        ep_size=mpu.get_expert_model_parallel_world_size(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        etp_size=mpu.get_expert_tensor_parallel_world_size(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
        tp_group=mpu.get_tensor_model_parallel_group(),
        pp_group=mpu.get_pipeline_model_parallel_group(),
        cp_group=mpu.get_context_parallel_group(),
        dp_group=mpu.get_data_parallel_group(),
        dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
        ep_group=mpu.get_expert_model_parallel_group(),
        etp_group=mpu.get_expert_tensor_parallel_group(),
    )
