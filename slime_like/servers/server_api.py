"""What a kind of server (SGLang, vLLM) calls its endpoints, and how it answers.

The pool of servers, their requests, the weight updates and the engine are the same for every kind;
each has one `ServerApi`. It holds no state, and is sent between ranks by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.images.processor import ImageProcessor
from slime_like.servers.indexer_topk import IndexerFormat
from slime_like.servers.routed_experts import RoutesFormat
from slime_like.weights.buckets import Bucket
from slime_like.weights.export_plan import TensorPlan


@dataclass(frozen=True, slots=True)
class ServerCall:
    """A POST to a server."""

    path: str
    body: Mapping[str, object] = field(default_factory=dict)
    answers_text: bool = False  # not an object


@dataclass(frozen=True, slots=True)
class Legal:
    """Legal content of a response."""

    vocab_size: int
    versions: Collection[int]  # weight versions that the server may have had
    routed_experts: RoutesFormat | None = None  # their format, of a network with experts
    indexer_topk: IndexerFormat | None = None  # that of selected keys, of one with indexers


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """A process group of a sending trainer rank, which is rank 0, and all ranks of all servers."""

    name: str
    address: str
    port: int
    first_rank: int  # of the server's ranks
    world: int
    backend: str  # gloo or nccl


@dataclass(frozen=True, slots=True)
class ServerSizes:
    """Parallelism of a server."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1


class RefusedByServer(ValueError):
    """The server aborted the request itself (out of memory, restart). `status`: its status code,
    500 if it gave none."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerApi(ABC):
    """Endpoints of one kind of server."""

    generate_path: str
    pause: ServerCall  # requests keep their tokens; what was computed for them is recomputed
    resume: ServerCall
    # GETs of health checks: one that fails if the server cannot generate, and one that a server
    # answers while it is paused, loads weights or has released its memory
    generation_probe: str = "/health"
    bare_probe: str = "/health"
    version_path: str  # answers a GET with {"weight_version": text}
    checksum: ServerCall
    noise: ServerCall  # overwrites the weights

    # --- requests

    @abstractmethod
    def generation_body(
        self,
        request: GenerateRequest,
        sampling: SamplingParams,
        rid: str,
        images: ImageProcessor | None,
    ) -> dict[str, object]:
        """The body of one request with id `rid`. Raises ValueError for what the server cannot
        do."""

    @abstractmethod
    def max_response_bytes(
        self, request: GenerateRequest, sampling: SamplingParams, token_bytes: int = 0
    ) -> int:
        """Size limit of the response. token_bytes: bytes of choices per token."""

    @abstractmethod
    def read_generation(
        self,
        answer: bytes,
        request: GenerateRequest,
        sampling: SamplingParams,
        rid: str,
        legal: Legal,
    ) -> GenerateOutput:
        """Validate a response. Raises InvalidResponse, WrongWeightVersion, RefusedByServer."""

    @abstractmethod
    def abort(self, rid: str) -> ServerCall: ...

    # --- control

    @abstractmethod
    def read_checksums(self, answer: Mapping[str, object]) -> dict[str, str]:
        """The checksum of every weight, by rank and name. Raises InvalidResponse."""

    @property
    @abstractmethod
    def info_path(self) -> str:
        """The path of a GET with the server's settings."""

    @abstractmethod
    def read_sizes(self, info: Mapping[str, object]) -> ServerSizes:
        """Raises InvalidResponse."""

    # --- weights: `begin`, buckets of one transport, `end`; or `load_folder` alone

    begin: ServerCall

    @abstractmethod
    def end(self, version: int) -> Sequence[ServerCall]:
        """The server has all weights of `version`."""

    @abstractmethod
    def load_folder(self, folder: Path, version: int) -> Sequence[ServerCall]: ...

    @abstractmethod
    def bucket(self, bucket: Bucket, flat: Tensor, version: int, ranks: int) -> ServerCall:
        """A bucket in the request itself.

        Args:
            flat: Its bytes; on a GPU they must stay alive until the server has answered.
            ranks: Ranks of the server, each of which takes it.
        """

    # --- adapters beside the base model, of engines with the trait `takes_adapters`

    def with_adapter(self, body: dict[str, object], name: str) -> dict[str, object]:
        """The body of a request that is served with this adapter."""
        raise NotImplementedError

    def adapter_bucket(
        self, name: str, config: Mapping[str, object], bucket: Bucket, ranks: int
    ) -> ServerCall:
        """An adapter in the request itself.

        Args:
            config: PEFT's adapter_config.json.
            bucket: All factors by PEFT's names, in host memory.
            ranks: Ranks of the server.
        """
        raise NotImplementedError

    def adapter_folder(self, name: str, folder: Path) -> ServerCall:
        """An adapter in a folder of PEFT's format."""
        raise NotImplementedError

    def unload_adapter(self, name: str) -> ServerCall:
        raise NotImplementedError

    def set_version(self, version: int) -> ServerCall:
        """The server reports this version from now on."""
        raise NotImplementedError

    # --- broadcasts

    @abstractmethod
    def join(self, group: JoinGroup) -> ServerCall: ...

    @abstractmethod
    def receive(
        self, group: str, tensors: Sequence[TensorPlan], version: int, *, is_last: bool
    ) -> ServerCall:
        """A bucket that is broadcast in a group."""

    @abstractmethod
    def leave(self, group: str) -> ServerCall: ...
