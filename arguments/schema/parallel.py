"""Parallel sizes; further settings are megatron-core's ModelParallelConfig flags."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import ABOVE_ONE, AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class ParallelConfig(CheckedSettings):
    tensor_model_parallel_size: int = arg(
        1, "Tensor-parallel size: ranks that shard each layer's matrices.", legal=AT_LEAST_ONE
    )
    pipeline_model_parallel_size: int = arg(
        1, "Pipeline-parallel size: stages that the layers are split into.", legal=AT_LEAST_ONE
    )
    num_virtual_stages_per_pipeline_rank: int | None = arg(
        None,
        "Interleaved schedule: model chunks on each pipeline rank.",
        legal=ABOVE_ONE,
        needs="pipeline_model_parallel_size>1",
    )
    num_layers_per_virtual_pipeline_stage: int | None = arg(
        None,
        "Interleaved schedule: layers per model chunk; excludes "
        "--num-virtual-stages-per-pipeline-rank.",
        legal=AT_LEAST_ONE,
        excludes="num_virtual_stages_per_pipeline_rank",
        needs="pipeline_model_parallel_size>1",
    )
    context_parallel_size: int = arg(
        1,
        "Context-parallel size: ranks that share the tokens of each sequence; sequences are padded "
        "to a multiple of twice this size.",
        legal=AT_LEAST_ONE,
    )
    expert_model_parallel_size: int = arg(
        1, "Expert-parallel size: ranks that share the experts.", legal=AT_LEAST_ONE
    )
    expert_tensor_parallel_size: int | None = arg(
        None, "Tensor-parallel size of the experts.", legal=AT_LEAST_ONE
    )
    sequence_parallel: bool = arg(
        False,
        "Split activations between tensor-parallel regions along the sequence.",
        needs="tensor_model_parallel_size>1",
    )
    distributed_backend: str = arg(
        "auto",
        "Process-group backend. auto: nccl with CUDA, else gloo. With nccl, tensors of the host "
        "still go over gloo.",
        choices=("auto", "nccl", "gloo"),
    )
    distributed_timeout_minutes: float = arg(
        10.0,
        "Timeout of the rendezvous and of every collective; the run then ends with an error.",
        legal=POSITIVE,
    )
    heartbeat_timeout_s: float = arg(
        120.0,
        "End the run if a rank sends no heartbeat for this long (process stopped, host lost), "
        "printing the stacks of the others. A slow rank still sends heartbeats. 0: off.",
        legal=NON_NEGATIVE,
    )

    @property
    def model_parallel_size(self) -> int:
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    @property
    def grid(self) -> tuple[int, ...]:
        """The sizes that determine the process groups; layouts with equal grids can share them."""
        tensor = self.tensor_model_parallel_size
        pipeline = self.pipeline_model_parallel_size
        experts = (self.expert_model_parallel_size, self.expert_tensor_parallel_size or tensor)
        return (
            tensor,
            pipeline,
            self.num_virtual_stages_per_pipeline_rank or 1,
            self.context_parallel_size,
            *experts,
        )
