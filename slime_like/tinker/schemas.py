"""JSON request bodies, as sent by SDK 0.38. Unknown fields are rejected (422)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from slime_like.config import GREEDY_OR_TEMPERATURE

MAX_SEED = 2**63 - 1
# bounds of settings: squares and reciprocals of values beyond these are not finite in float32
SMALLEST = 1e-18
LARGEST = 1e18
MISSING_LOG_PROB = -99999.0  # the SDK's value (tinker.types.topk_logprobs)
MAX_METADATA = 64  # entries
MAX_METADATA_TEXT = 4096

Id = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9_:.-]+$")]
# name of a checkpoint: no separators, no hidden or parent folder
Name = Annotated[
    str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
TinkerPath = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^tinker://")]
MAX_SEQ_ID = 2**31 - 1
SeqId = Annotated[int, Field(ge=1, le=MAX_SEQ_ID)]
SamplingSeqId = Annotated[int, Field(ge=0, le=MAX_SEED)]
CountId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Ttl = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    type: str | None = Field(default=None, max_length=64)


def _check_metadata(metadata: dict[str, object] | None) -> dict[str, object] | None:
    for key, value in (metadata or {}).items():
        is_scalar = isinstance(value, str | int | float | bool | None)
        if not is_scalar or max(len(key), len(str(value))) > MAX_METADATA_TEXT:
            raise ValueError(
                "user_metadata: values must be strings or numbers of at most "
                f"{MAX_METADATA_TEXT} characters"
            )
    if metadata is not None and len(metadata) > MAX_METADATA:
        raise ValueError(f"user_metadata: at most {MAX_METADATA} entries")
    return metadata


class WithMetadata(Body):
    user_metadata: dict[str, object] | None = None

    _checked = field_validator("user_metadata")(_check_metadata)


class Turn(BaseModel):
    """The place of a request in its model's order; other fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    model_id: Id
    seq_id: SeqId


class ClientConfig(Body):
    sdk_version: str = Field(default="", max_length=64)


class CreateSession(WithMetadata):
    tags: list[Annotated[str, StringConstraints(max_length=256)]] = Field(
        default_factory=list, max_length=256
    )
    sdk_version: str = Field(default="", max_length=64)
    project_id: str | None = Field(default=None, max_length=256)
    display_name: str | None = Field(default=None, max_length=256)


class Heartbeat(Body):
    session_id: Id


class LoraConfig(Body):
    rank: int = Field(ge=0, le=4096)
    seed: int | None = Field(default=None, ge=-(2**63), le=MAX_SEED)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    model_config = ConfigDict(extra="allow", strict=True)

    type: str = Field(default="adamw", max_length=64)


class CreateModel(WithMetadata):
    session_id: Id
    model_seq_id: CountId
    base_model: ModelName
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    model_role: str | None = Field(default=None, max_length=64)


class ModelRequest(Body):
    model_id: Id


class AdamParams(Body):
    """Bounded so that updates, at most learning_rate / eps times a moment, fit float32."""

    learning_rate: Finite = Field(default=1e-4, ge=0, le=1e3)
    beta1: Finite = Field(default=0.9, ge=0, lt=1)
    beta2: Finite = Field(default=0.95, ge=0, lt=1)
    eps: Finite = Field(default=1e-12, ge=SMALLEST, le=LARGEST)
    weight_decay: Finite = Field(default=0.0, ge=0, le=1e3)
    grad_clip_norm: Finite = Field(default=0.0, ge=0, le=LARGEST)


class OptimStep(Body):
    model_id: Id
    seq_id: SeqId
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, object] | None = None


class SaveWeights(WithMetadata):
    model_id: Id
    seq_id: SeqId
    path: Name
    ttl_seconds: Ttl | None = None
    overwrite: bool = False


class SaveWeightsForSampler(WithMetadata):
    model_id: Id
    seq_id: SeqId
    path: Name | None = None
    sampling_session_seq_id: CountId | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None


class SaveWeightsExternal(Body):
    model_id: Id
    seq_id: SeqId
    path: Name
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: list[str] | None = Field(default=None, max_length=10)


class SetTtl(Body):
    ttl_seconds: Ttl | None


class LoadWeights(WithMetadata):
    path: TinkerPath
    optimizer: bool
    model_id: Id | None = None
    seq_id: SeqId | None = None
    session_id: Id | None = None
    model_seq_id: CountId | None = None
    base_model: ModelName | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = Field(default=None, max_length=4096)


class CreateSamplingSession(Body):
    session_id: Id
    sampling_session_seq_id: CountId
    base_model: ModelName | None = None
    model_path: TinkerPath | None = None


class JoinSamplingSession(Body):
    sampling_session_id: Id


class CustomLossInput(Body):
    name: str = Field(max_length=64)
    rank: Literal[0, 1, 2]


class CustomLossNode(Body):
    """A node of torch.fx; `loss_graph.check_graph` validates the arguments."""

    op: str = Field(max_length=64)
    name: str = Field(max_length=256)
    target: str = Field(max_length=256)
    args: list[object] = Field(default_factory=list)
    kwargs: dict[str, object] = Field(default_factory=dict)


class CustomLossGraph(Body):
    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLoss(Body):
    session_id: Id
    custom_loss_seq_id: CountId
    name: str = Field(max_length=256)
    inputs: list[CustomLossInput]
    graph: CustomLossGraph


class PromptChunk(Body):
    # fields of other kinds of chunks are allowed here, and rejected later with a clearer message
    model_config = ConfigDict(extra="allow", strict=True)

    type: str = Field(default="encoded_text", max_length=64)
    tokens: list[Token] | None = None


class Prompt(Body):
    chunks: list[PromptChunk]


class SamplingParams(Body):
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    seed: int | None = Field(default=None, ge=-(2**63), le=MAX_SEED)
    stop: str | list[str] | list[Token] | None = None
    temperature: Finite = Field(default=1.0, ge=0, le=100)
    top_k: int = -1
    top_p: Finite = Field(default=1.0, gt=0, le=1)

    @field_validator("temperature")
    @classmethod
    def _temperature(cls, value: float) -> float:
        if not GREEDY_OR_TEMPERATURE.holds(value):
            raise ValueError(f"temperature is {GREEDY_OR_TEMPERATURE.description}")
        return value

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int) -> int:
        if value != -1 and not 1 <= value < 2**31:
            raise ValueError("top_k must be -1 (no limit) or at least 1")
        return value

    @field_validator("stop")
    @classmethod
    def _stop(cls, value: str | list[str] | list[int] | None) -> str | list[str] | list[int] | None:
        entries = [value] if isinstance(value, str) else value or []
        texts = [entry for entry in entries if isinstance(entry, str)]
        legal = all(1 <= len(text) <= 1024 for text in texts)
        if not legal or len(texts) > 64 or len(entries) > 1024:
            raise ValueError("stop: at most 64 texts of 1 to 1024 characters, or 1024 tokens")
        return value


Size = Annotated[int, Field(ge=0, le=2**31 - 1)]


class TensorData(Body):
    """A tensor of tokens, or -1 for none; dense or sparse (CSR)."""

    data: list[Annotated[int, Field(ge=-1, le=2**31 - 1)]]
    dtype: Literal["int64"]
    shape: list[Size]
    sparse_crow_indices: list[Size] | None = None
    sparse_col_indices: list[Size] | None = None


class Sample(Body):
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: int = Field(default=1, ge=1, le=4096)
    sampling_session_id: Id
    seq_id: SamplingSeqId
    prompt_logprobs: bool | None = None
    base_model: ModelName | None = None
    model_path: TinkerPath | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


RequestId = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class CancelFuture(Body):
    request_id: RequestId


class RetrieveFuture(Body):
    request_id: RequestId
    allow_metadata_only: bool = False
    model_id: str | None = Field(default=None, max_length=256)


class WeightsInfo(Body):
    tinker_path: TinkerPath


class FinishReason(Body):
    type: str = Field(max_length=64)


class FinishSession(Body):
    reason: FinishReason | None = None
    detail: str | None = Field(default=None, max_length=65536)
