"""vLLM's endpoints: those of a server with VLLM_SERVER_DEV_MODE=1, --enable-scale-out and our
worker extension (`worker/slime_like_vllm.py`), whose methods
/collective_rpc calls on every rank."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field
from torch import Tensor

from slime_like.checked_json import ShortText, StrictModel, read
from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.images.processor import ImageProcessor
from slime_like.servers.server_api import JoinGroup, Legal, ServerApi, ServerCall, ServerSizes
from slime_like.vllm import protocol
from slime_like.weights.buckets import Bucket
from slime_like.weights.export_plan import TensorPlan

_Ranks = Annotated[int, Field(ge=1, le=4096)]


class _Checksums(StrictModel):
    checksums: dict[str, ShortText]


class _Parallel(StrictModel):
    tensor_parallel_size: _Ranks = 1
    pipeline_parallel_size: _Ranks = 1
    data_parallel_size: _Ranks = 1
    worker_extension_cls: str = ""


class _Model(StrictModel):
    logprobs_mode: str
    dtype: str  # torch.float32
    max_model_len: int


class _Lora(StrictModel):
    max_lora_rank: int


class _Config(StrictModel):
    parallel_config: _Parallel
    lora_config: _Lora | None = None
    served: _Model = Field(alias="model_config")


class ServerInfo(StrictModel):
    """/server_info."""

    vllm_config: _Config


class VllmApi(ServerApi):
    """See `ServerApi`. A paused server keeps its requests; with the weights they lose their KV
    cache (reset_running_requests), which is computed again after `resume`."""

    generate_path = "/inference/v1/generate"
    pause = ServerCall("/pause?mode=keep")
    resume = ServerCall("/resume")
    version_path = "/weight_info"
    checksum = ServerCall("/weight_checker", {"action": "checksum"})
    noise = ServerCall("/weight_checker", {"action": "reset"})
    info_path = "/server_info?config_format=json"

    def generation_body(
        self,
        request: GenerateRequest,
        sampling: SamplingParams,
        rid: str,
        images: ImageProcessor | None,
    ) -> dict[str, object]:
        return protocol.generation_body(request, sampling, rid)

    def max_response_bytes(
        self, request: GenerateRequest, sampling: SamplingParams, token_bytes: int = 0
    ) -> int:
        return protocol.max_response_bytes(request, sampling)

    def read_generation(
        self,
        answer: bytes,
        request: GenerateRequest,
        sampling: SamplingParams,
        rid: str,
        legal: Legal,
    ) -> GenerateOutput:
        return protocol.read_generation(answer, request, sampling, rid, legal)

    def abort(self, rid: str) -> ServerCall:
        return ServerCall("/abort_requests", {"request_ids": [protocol.PREFIX + rid]})

    def read_checksums(self, answer: Mapping[str, object]) -> dict[str, str]:
        return read(_Checksums, answer).checksums

    def read_sizes(self, info: Mapping[str, object]) -> ServerSizes:
        found = read(ServerInfo, info).vllm_config.parallel_config
        return ServerSizes(
            found.tensor_parallel_size, found.pipeline_parallel_size, found.data_parallel_size
        )

    begin = ServerCall("/collective_rpc", {"method": "slime_like_begin"})

    def end(self, version: int) -> Sequence[ServerCall]:
        return (_on_ranks("end"), *_has(version))

    def load_folder(self, folder: Path, version: int) -> Sequence[ServerCall]:
        return (_on_ranks("load_folder", folder=str(folder)), *_has(version))

    def bucket(self, bucket: Bucket, flat: Tensor, version: int, ranks: int) -> ServerCall:
        data = base64.b64encode(flat.numpy().tobytes()).decode()
        return _on_ranks("load_bytes", **_contents(bucket.tensors), data=data)

    def with_adapter(self, body: dict[str, object], name: str) -> dict[str, object]:
        return {**body, "model": name}

    def adapter_folder(self, name: str, folder: Path) -> ServerCall:
        body = {"lora_name": name, "lora_path": str(folder)}
        return ServerCall("/v1/load_lora_adapter", body, answers_text=True)

    def unload_adapter(self, name: str) -> ServerCall:
        return ServerCall("/v1/unload_lora_adapter", {"lora_name": name}, answers_text=True)

    def set_version(self, version: int) -> ServerCall:
        return ServerCall("/update_weight_version", {"new_version": str(version)})

    def join(self, group: JoinGroup) -> ServerCall:
        return _on_ranks(
            "join",
            name=group.name,
            address=group.address,
            port=group.port,
            first_rank=group.first_rank,
            world=group.world,
            backend=group.backend,
        )

    def receive(
        self, group: str, tensors: Sequence[TensorPlan], version: int, *, is_last: bool
    ) -> ServerCall:
        return _on_ranks("receive", group=group, **_contents(tensors))

    def leave(self, group: str) -> ServerCall:
        return _on_ranks("leave", name=group)


def _on_ranks(method: str, **arguments: object) -> ServerCall:
    """A call of the worker extension on every rank of the server."""
    return ServerCall("/collective_rpc", {"method": f"slime_like_{method}", "kwargs": arguments})


def _has(version: int) -> tuple[ServerCall, ServerCall]:
    """What was computed with earlier weights is forgotten, and the version is new. In this order:
    a server that fails in between has no version that it does not compute with."""
    return (
        ServerCall("/reset_prefix_cache?reset_running_requests=true"),
        VllmApi().set_version(version),
    )


def _contents(tensors: Sequence[TensorPlan]) -> dict[str, object]:
    return {
        "names": [t.name for t in tensors],
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors],
        "shapes": [list(t.shape) for t in tensors],
    }
