"""Core records: prompts, samples, train batches and micro-batches. All are frozen dataclasses.

Dimensions in the field comments: T packed tokens, S sequences, L tokens of a sample (prompt and
response), R response tokens, K tokens per position.

Alignment: row t of every per-token tensor of a `MicroBatch` belongs to `labels[t]`, the token that
follows `tokens[t]` in the same sequence; the shift happens once, in `megatron/packing.py`.
Per-token tensors of a `Sample` or a `TrainSample` cover the response only: entry j belongs to the
j-th response token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from slime_like.images.encoded import EncodedImage
from slime_like.lazy import Tensor, torch
from slime_like.token_columns import TokenColumns

if TYPE_CHECKING:
    from slime_like.images.rows import ImageRows
    from slime_like.megatron.ops.attention import PackedRows
    from slime_like.metrics.typed import Metric


NOT_SAMPLED = -1  # weight version of a token that the policy did not generate (tool output etc.)
# metadata key of ReMax's greedy baseline; in the metadata, so that recorded rollouts keep it
GREEDY_REWARD = "greedy_reward"
REWARD_DETAILS = "reward_details"
# metadata key of the sum of the rewards of an agent's answers, if the run's reward function decides
# the rest: grading adds it to what that says
ANSWER_REWARDS = "sum_of_answer_rewards"
# metadata key of the reward that --custom-convert-samples-to-train-data-path put in place
TRAIN_REWARD = "train_reward"
# metadata key of the context from which data/prompt_format.py builds the teacher's prompt
TEACHER_CONTEXT = "teacher_context"
# metadata key of a prompt's messages, for functions that render them
PROMPT_MESSAGES = "prompt_messages"
# metadata key of where a prompt of a mix comes from: name of the source, row, and epoch
PROMPT_SOURCE = "prompt_source"
# metadata key of attributes that user functions have added to slime's sample
SAMPLE_ATTRIBUTES = "sample_attributes"
# optional tensors of a `Sample`, ordered by element size, the largest first
OPTIONAL_TENSORS = (
    "token_rewards",
    "rollout_log_probs",
    "teacher_log_probs",
    "sampling_mask",
    "teacher_prompt",
    "indexer_topk",
    "routed_experts",
)


class SampleStatus(StrEnum):
    """How generation ended."""

    COMPLETED = "completed"  # a stop token or stop string was reached
    TRUNCATED = "truncated"  # the length limit was reached
    ABORTED = "aborted"  # the engine gave up; the sample is not trained on
    FAILED = "failed"  # generation or reward raised; the sample is not trained on
    PARTIAL = "partial"  # unfinished: generation continues in this rollout or a later one


FINISHED = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)  # with a response that is graded


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data source, tokenized and ready for generation."""

    group_id: int  # unique over the run; the samples of one prompt form the group of GRPO
    text: str  # the prompt as the model sees it (chat template applied)
    tokens: tuple[int, ...]  # its ids
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # the rest of a conversation for supervised training: (text, whether it is trained on)
    turns: tuple[tuple[str, bool], ...] = ()
    rejected: Prompt | None = None  # in a preference pair, the same prompt with the rejected answer
    # reward of the chosen answer minus that of the rejected one, where the data has it
    margin: float | None = None
    desirable: bool | None = None  # whether the answer is, where the data say so
    images: tuple[EncodedImage, ...] = ()  # in the order of their placeholders


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to one prompt, with everything that the rollout engine and the reward added."""

    group_id: int
    sample_id: int  # unique over the run
    tokens: Tensor  # [L] int64, prompt then response
    response_length: int  # R <= L
    loss_mask: Tensor  # [R] bool, True for tokens that the policy generated and trains on
    # [R] float32, from the rollout engine, at the sampling temperature
    rollout_log_probs: Tensor | None = None
    reward: float | None = None
    status: SampleStatus = SampleStatus.COMPLETED
    # [R] weight version that generated each response token, or NOT_SAMPLED; () for given answers
    weight_versions: tuple[int, ...] = ()
    text: str = ""  # prompt text
    response: str = ""  # response text
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # [R, K] int32, sampling mask: tokens kept by top-k/top-p, padded with -1; None: full vocabulary
    sampling_mask: Tensor | None = None
    teacher_log_probs: Tensor | None = None  # [R] float32, from a teacher behind a server
    # [P] int32, the teacher's prompt in self-distillation; None: no teacher for this sample
    teacher_prompt: Tensor | None = None
    # [R] float64, per-token rewards; None: `reward` covers the response as a whole
    token_rewards: Tensor | None = None
    # [L, MoE layers, topk] int16, experts that the rollout engine routed each token to; -1: unknown
    routed_experts: Tensor | None = None
    # [max(0, L - K), indexers, K] int32, keys that the rollout engine's indexers selected; see
    # samples/indexer_topk.py
    indexer_topk: Tensor | None = None
    # further sequences of the same episode; they share this sample's id and reward
    branches: tuple[Sample, ...] = ()
    # of prompt and observations, in the order of their placeholders in `tokens`
    images: tuple[EncodedImage, ...] = ()

    @classmethod
    def empty(cls, prompt: Prompt, sample_id: int) -> Sample:
        """A partial sample of this prompt, with an empty response."""
        return cls(
            group_id=prompt.group_id,
            sample_id=sample_id,
            tokens=torch.tensor(prompt.tokens, dtype=torch.int64),
            response_length=0,
            loss_mask=torch.empty(0, dtype=torch.bool),
            rollout_log_probs=torch.empty(0, dtype=torch.float32),
            status=SampleStatus.PARTIAL,
            text=prompt.text,
            label=prompt.label,
            metadata=prompt.metadata,
            images=prompt.images,
        )

    @property
    def total_length(self) -> int:
        return int(self.tokens.numel())

    @property
    def prompt_length(self) -> int:
        return self.total_length - self.response_length

    @property
    def ended(self) -> bool:
        return self.status != SampleStatus.PARTIAL

    @property
    def active_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def greedy_reward(self) -> float | None:
        """Reward of the greedy response to the same prompt (ReMax); None where it was not
        sampled."""
        return self.metadata.get(GREEDY_REWARD)

    @property
    def version_counts(self) -> Mapping[int, int]:
        """Number of generated tokens by weight version, over the response and its branches."""
        counts = Counter(self.weight_versions)
        for branch in self.branches:
            counts.update(branch.weight_versions)
        counts.pop(NOT_SAMPLED, None)
        return counts

    @property
    def num_branches(self) -> int:
        return len(self.branches)

    @property
    def num_images(self) -> int:
        return len(self.images)

    @property
    def image_bytes(self) -> int:
        return sum(len(image.data) for image in self.images)

    @property
    def versions_length(self) -> int:
        """Length of `weight_versions`: the response length, or 0."""
        return len(self.weight_versions)

    def has(self, name: str) -> bool:
        """Whether the tensor `name`, one of `OPTIONAL_TENSORS`, is set."""
        return getattr(self, name) is not None


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainSample(TokenColumns):
    """A sample with every input of the loss. `loss_weights` is the `u` of losses/total.py (one over
    the denominator of the whole optimizer step); `policy_weights` is `w`, None where it equals
    `u`."""

    tokens: Tensor  # [L] int64
    response_length: int
    loss_mask: Tensor  # [R] bool
    loss_weights: Tensor  # [R] float32
    # [L, MoE layers of this pipeline stage, topk] int16: experts to replay
    routed_experts: Tensor | None = None
    # [max(0, L - K), indexers of this pipeline stage, K] int32: keys to replay
    indexer_topk: Tensor | None = None
    # [R, K] int32, as in `Sample`: log-probs are normalised over these tokens only
    sampling_mask: Tensor | None = None
    # [R, K] int64: soft targets, K tokens per row instead of one; K is equal for all samples of a
    # forward pass
    label_sets: Tensor | None = None
    label_weights: Tensor | None = None  # [R, K] float32, weight of each soft target
    # [R] int64: explicit labels of the last R rows, which need not be the next token; None: the
    # response itself, shifted by one
    labels: Tensor | None = None
    images: ImageRows | None = None  # where the tokens stand for images

    @property
    def scored_rows(self) -> slice:
        """The slice of this sample's L rows that its [R] tensors belong to."""
        end = int(self.tokens.numel()) - (0 if self.labels is not None else 1)
        return slice(max(0, end - self.response_length), max(0, end))


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The samples of one optimizer step on one data-parallel rank."""

    samples: tuple[TrainSample, ...]
    # the policy has not moved since the rollout, so the log-probs of the training forward pass
    # serve as the old ones, and the samples have no `old_log_probs`
    old_is_current: bool = False


@dataclass(frozen=True, slots=True)
class MicroBatch(TokenColumns):
    """S sequences packed into T rows (THD layout). Padding at the end is one more sequence with an
    all-False mask. Under context parallelism each rank holds T rows, its share of every sequence
    (megatron/ops/context_parallel.py), and every sequence is padded too; cu_seqlens and max_seqlen
    are those of the full sequences."""

    tokens: Tensor  # [1, T] int64
    labels: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, restarting at 0 in every sequence
    seq_ids: Tensor  # [T] int64 in [0, S)
    cu_seqlens: Tensor  # [S + 1] int32
    max_seqlen: int
    loss_mask: Tensor  # [T] bool
    loss_weights: Tensor  # [T] float32 (u)
    is_padding: Tensor | None = None  # [T] bool, rows that hold no token of a sample
    # Rows that the head computes, int64, looked up when the rows are packed: where loss_mask is
    # True, where it is True or observation_weights is not 0, and of each multi-token prediction
    # layer where its column of mask_ahead is True
    active_rows: Tensor | None = None
    observed_rows: Tensor | None = None
    predicted_rows: tuple[Tensor, ...] = ()
    # [T, layers] bool: loss_mask of the row that is 1, 2, ... later in the same sequence
    mask_ahead: Tensor | None = None
    # seed of losses that select tokens at random; equal on all ranks that share these sequences
    selection_seed: int = 0
    # S lengths of the full sequences, on the host, and what attention derives from them: made when
    # the rows are packed, so that no pass asks the device
    lengths: tuple[int, ...] = ()
    packed: PackedRows | None = None
    places: Tensor | None = None  # [T] int64: index of the row without context parallelism
    # [T] int64 in [0, num_turns): the assistant turn of each row, where loss_mask is True
    turn_ids: Tensor | None = None
    num_turns: int = 0
    # [T, MoE layers of this pipeline stage, topk] int16: experts to replay; negative: use the
    # router
    routed_experts: Tensor | None = None
    # [T, K] int32, sampling mask, padded with -1; None: the full vocabulary
    sampling_mask: Tensor | None = None
    label_sets: Tensor | None = None  # [T, K] int64, soft targets
    label_weights: Tensor | None = None  # [T, K] float32
    images: ImageRows | None = None  # of all sequences that have any

    @property
    def num_seqs(self) -> int:
        return int(self.cu_seqlens.numel()) - 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one optimizer step."""

    metrics: Mapping[str, float]
    grad_norm: float  # global L2 norm before clipping
    learning_rate: float
    # the gradient was not finite on some rank, so weights and optimizer state are unchanged on all
    skipped: bool = False
    loss_scale: float | None = None  # of the next step, in fp16


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What the last pipeline stage computes from the model output of one micro-batch."""

    columns: tuple[Tensor, ...] = ()  # per-token results without grad, [T] each
    loss: Tensor | None = None  # 0-d, with grad, not scaled; None in a forward-only pass
    metrics: Mapping[str, Metric] = field(default_factory=dict)
