"""SGLang's endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from slime_like.checked_json import read
from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.images.processor import ImageProcessor
from slime_like.servers.control_answers import Checksums, ServerInfo
from slime_like.servers.server_api import JoinGroup, Legal, ServerApi, ServerCall, ServerSizes
from slime_like.sglang import protocol
from slime_like.sglang.tensor_bucket import serialized, tensor_update
from slime_like.weights.buckets import Bucket
from slime_like.weights.export_plan import TensorPlan


class SglangApi(ServerApi):
    """See `ServerApi`. A server takes the version with the last bucket, and then forgets what it
    has computed for earlier prompts (flush_cache)."""

    generate_path = "/generate"
    # requests stay, retracted: their KV cache is recomputed
    pause = ServerCall("/pause_generation", {"mode": "retract"})
    resume = ServerCall("/continue_generation")
    generation_probe = "/health_generate"
    bare_probe = version_path = "/model_info"
    checksum = ServerCall("/weights_checker", {"action": "checksum"})
    noise = ServerCall("/weights_checker", {"action": "reset_tensors"})
    info_path = "/server_info"
    begin = ServerCall("/begin_weight_update")

    def generation_body(
        self,
        request: GenerateRequest,
        sampling: SamplingParams,
        rid: str,
        images: ImageProcessor | None,
    ) -> dict[str, object]:
        return protocol.generation_body(request, sampling, rid, images)

    def max_response_bytes(
        self, request: GenerateRequest, sampling: SamplingParams, token_bytes: int = 0
    ) -> int:
        return protocol.max_response_bytes(request, sampling, token_bytes)

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
        return ServerCall("/abort_request", {"rid": rid})

    def read_checksums(self, answer: Mapping[str, object]) -> dict[str, str]:
        return read(Checksums, answer).by_name()

    def read_sizes(self, info: Mapping[str, object]) -> ServerSizes:
        found = read(ServerInfo, info)
        return ServerSizes(found.tp_size, found.pp_size, found.dp_size)

    def end(self, version: int) -> Sequence[ServerCall]:
        return (ServerCall("/end_weight_update"),)

    def load_folder(self, folder: Path, version: int) -> Sequence[ServerCall]:
        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
        }
        return (ServerCall("/update_weights_from_disk", body),)

    def bucket(self, bucket: Bucket, flat: Tensor, version: int, ranks: int) -> ServerCall:
        return ServerCall(
            "/update_weights_from_tensor", tensor_update(bucket, flat, version, ranks)
        )

    def with_adapter(self, body: dict[str, object], name: str) -> dict[str, object]:
        return {**body, "lora_path": name}

    def adapter_bucket(
        self, name: str, config: Mapping[str, object], bucket: Bucket, ranks: int
    ) -> ServerCall:
        body = {
            "lora_name": name,
            "config_dict": dict(config),
            "serialized_named_tensors": serialized(bucket, bucket.flat, ranks),
            "load_format": "flattened_bucket",
        }
        return ServerCall("/load_lora_adapter_from_tensors", body)

    def adapter_folder(self, name: str, folder: Path) -> ServerCall:
        return ServerCall("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> ServerCall:
        return ServerCall("/unload_lora_adapter", {"lora_name": name})

    def set_version(self, version: int) -> ServerCall:
        body = {"new_version": str(version), "abort_all_requests": False}
        return ServerCall("/update_weight_version", body)

    def join(self, group: JoinGroup) -> ServerCall:
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "world_size": group.world,
            "group_name": group.name,
            "backend": group.backend,
            "rank_offset": group.first_rank,
        }
        return ServerCall("/init_weights_update_group", body)

    def receive(
        self, group: str, tensors: Sequence[TensorPlan], version: int, *, is_last: bool
    ) -> ServerCall:
        body: dict[str, object] = {
            "names": [t.name for t in tensors],
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors],
            "shapes": [list(t.shape) for t in tensors],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": is_last,
        }
        if is_last:
            body["weight_version"] = str(version)
        return ServerCall("/update_weights_from_distributed", body)

    def leave(self, group: str) -> ServerCall:
        return ServerCall("/destroy_weights_update_group", {"group_name": group})
