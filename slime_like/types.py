"""Core records. Frozen; shapes in the field comments: T packed tokens, S sequences, L sample
length, R response length.

One alignment rule: row t of every per-token tensor of a `MicroBatch` speaks about `labels[t]`, the
token that follows
`tokens[t]` in the same sequence. The shift happens once, in `megatron_backend/packing.py`. Tensors
of a `Sample` or a `TrainSample` are over the response only: entry j speaks about the j-th response
token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from slime_like.lazy import Tensor, torch

if TYPE_CHECKING:
    from slime_like.metrics.typed import Metric
    from slime_like.sample_index import AnySample


NOT_SAMPLED = -1  # in place of the weight version of a token that the model did not write
# metadata key of ReMax's baseline, so that recorded rollouts have it too
GREEDY_REWARD = "greedy_reward"
REWARD_DETAILS = "reward_details"
# metadata key of what --custom-convert-samples-to-train-data-path trains on in place of the reward
TRAIN_REWARD = "train_reward"
# metadata key of what a teacher's prompt is made of, see data/prompt_format.py
TEACHER_CONTEXT = "teacher_context"
# of a `Sample`, over its tokens or a prompt's; in the order of the bytes of one number, the largest first
OPTIONAL_TENSORS = (
    "token_rewards",
    "rollout_log_probs",
    "teacher_log_probs",
    "token_sets",
    "teacher_prompt",
    "routes",
)


class SampleStatus(StrEnum):
    """How generation ended."""

    COMPLETED = "completed"  # a stop token or stop string was reached
    TRUNCATED = "truncated"  # the length limit was reached
    ABORTED = "aborted"  # the engine gave up; the sample is not trained on
    FAILED = "failed"  # generation or reward raised; the sample is not trained on
    PARTIAL = "partial"  # not ended: it goes on, in this rollout or in a later one


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data source, ready to be generated from.

    group_id: unique over the run; the samples of one prompt form the group of GRPO.
    text: the prompt as the model sees it (chat template applied). tokens: its ids.
    turns: what follows it in a conversation to learn from, texts and whether they are learnt.
    rejected: of a pair of answers, the same prompt with the one that is not preferred. margin: by
    how much it is worse, where that is known.
    """

    group_id: int
    text: str
    tokens: tuple[int, ...]
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    turns: tuple[tuple[str, bool], ...] = ()
    rejected: Prompt | None = None
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to one prompt."""

    group_id: int
    sample_id: int  # unique over the run
    tokens: Tensor  # [L] int64, prompt then response
    response_length: int  # R <= L
    loss_mask: Tensor  # [R] bool, True where the model wrote the token and it is trained on
    # [R] float32, by the sampler, at the sampling temperature
    rollout_log_probs: Tensor | None = None
    reward: float | None = None
    status: SampleStatus = SampleStatus.COMPLETED
    # of the weights that wrote each response token (NOT_SAMPLED: none); () when not generated here
    weight_versions: tuple[int, ...] = ()
    text: str = ""  # prompt text
    response: str = ""  # response text
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # [R, K] int32, what the sampler chose from, filled up with -1; None: the whole vocabulary
    token_sets: Tensor | None = None
    teacher_log_probs: Tensor | None = None  # [R] float32, of a served teacher
    # [P] int32, in place of the prompt where the policy is its own teacher; None: it teaches nothing
    teacher_prompt: Tensor | None = None
    # [R] float64, what a reward function gave each token; None: `reward` is of the whole response
    token_rewards: Tensor | None = None
    # [L, expert layers, topk] int16, where the sampler sent each token, -1 where it did not compute
    # one
    routes: Tensor | None = None
    # further sequences of the same episode, with this sample's id; its reward is theirs
    branches: tuple[Sample, ...] = ()

    @classmethod
    def empty(cls, prompt: Prompt, sample_id: int) -> Sample:
        """A sample of this prompt before its first token."""
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
        """Of the greedy response to its prompt, where the run asked for it."""
        return self.metadata.get(GREEDY_REWARD)

    @property
    def version_counts(self) -> Mapping[int, int]:
        """Tokens of the response that the model wrote, and of those of the branches, by weight
        version."""
        counts = Counter(self.weight_versions)
        for branch in self.branches:
            counts.update(branch.weight_versions)
        counts.pop(NOT_SAMPLED, None)
        return counts

    @property
    def num_branches(self) -> int:
        return len(self.branches)

    @property
    def versions_length(self) -> int:
        """Tokens that `weight_versions` speaks of: all of the response, or none."""
        return len(self.weight_versions)

    def has(self, name: str) -> bool:
        """Whether there is this one of `OPTIONAL_TENSORS`."""
        return getattr(self, name) is not None


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """All samples of one prompt; those that another rank has as `RemoteSample`."""

    group_id: int
    samples: tuple[AnySample, ...]


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A sample with all that the loss needs. `loss_weights` is `u` of the specification
    (1/denominator over the whole optimizer step); `policy_weights` is `w`, None where it equals
    `u`."""

    tokens: Tensor  # [L] int64
    response_length: int
    loss_mask: Tensor  # [R] bool
    loss_weights: Tensor  # [R] float32
    advantages: Tensor | None = None  # [R] float32
    old_log_probs: Tensor | None = None  # [R] float32
    rollout_log_probs: Tensor | None = None  # [R] float32
    ref_log_probs: Tensor | None = None  # [R] float32
    policy_weights: Tensor | None = None  # [R] float32
    keep_mask: Tensor | None = None  # [R] bool, of the off-policy correction
    importance_weights: Tensor | None = None  # [R] float32, of the off-policy correction
    rewards: Tensor | None = None  # [R] float32, the sample's raw reward on every token
    nll_weights: Tensor | None = None  # [R] float32, see `LossInputs`
    observation_weights: Tensor | None = None  # [R] float32, likewise
    values: Tensor | None = None  # [R] float32, the critic's, before the update
    # [R] float32, what the critic learns; NaN where there is no target
    returns: Tensor | None = None
    # [L, expert layers of this pipeline stage, topk] int16: the experts that are to be chosen
    routes: Tensor | None = None
    # [R, K] int32, as in `Sample`: all log-probs are over these tokens alone
    token_sets: Tensor | None = None
    # [R, K] int64: tokens that a row is scored on in place of one; what K is, all samples of a pass
    # agree on
    label_sets: Tensor | None = None
    label_weights: Tensor | None = None  # [R, K] float32, of each of them
    # [R] int64: what the last R rows are scored on, where that need not be the token that follows;
    # None: the response itself, whose first token stands after the row that is scored on it
    labels: Tensor | None = None

    @property
    def scored_rows(self) -> slice:
        """The rows of this sample's own L that its response values speak about."""
        end = int(self.tokens.numel()) - (0 if self.labels is not None else 1)
        return slice(max(0, end - self.response_length), max(0, end))


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """What one data-parallel rank contributes to one optimizer step. old_is_current: the policy is
    still the old one of its ratios, whose log-probs are those of the training pass itself; the
    samples have none."""

    samples: tuple[TrainSample, ...]
    old_is_current: bool = False


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed rows. Padding at the end is a sequence of its own with an all-False mask. Under
    context parallelism each rank has T of the rows of all S sequences (ops/context_parallel.py),
    whose ends are padded too; cu_seqlens and max_seqlen are those of the whole sequences."""

    tokens: Tensor  # [1, T] int64
    labels: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, restarting at 0 in every sequence
    seq_ids: Tensor  # [T] int64 in [0, S)
    cu_seqlens: Tensor  # [S + 1] int32
    max_seqlen: int
    loss_mask: Tensor  # [T] bool
    loss_weights: Tensor  # [T] float32 (u)
    policy_weights: Tensor | None = None  # [T] float32 (w); None: equal to loss_weights
    advantages: Tensor | None = None  # [T] float32
    old_log_probs: Tensor | None = None  # [T] float32
    rollout_log_probs: Tensor | None = None  # [T] float32
    ref_log_probs: Tensor | None = None  # [T] float32
    keep_mask: Tensor | None = None  # [T] bool
    importance_weights: Tensor | None = None  # [T] float32
    rewards: Tensor | None = None  # [T] float32
    nll_weights: Tensor | None = None  # [T] float32
    observation_weights: Tensor | None = None  # [T] float32, 0 where loss_mask is True
    values: Tensor | None = None  # [T] float32
    returns: Tensor | None = None  # [T] float32
    is_padding: Tensor | None = None  # [T] bool, rows that hold no token of a sample
    active_rows: Tensor | None = None  # [A] int64, where loss_mask is True; None: not looked up yet
    # of losses that choose tokens at random; equal on ranks that hold the same tokens, or sequences
    selection_seed: int = 0
    places: Tensor | None = None  # [T] int64: row where one process packs it; None: the row itself
    # [T] int64 in [0, num_turns): the answer of each row where loss_mask is True
    turn_ids: Tensor | None = None
    num_turns: int = 0
    # [T, expert layers of this pipeline stage, topk] int16, negative where the router chooses
    # itself
    routes: Tensor | None = None
    # [T, K] int32, tokens that log-probs are over, filled up with -1; None: the whole vocabulary
    token_sets: Tensor | None = None
    label_sets: Tensor | None = None  # [T, K] int64, of soft targets
    label_weights: Tensor | None = None  # [T, K] float32

    @property
    def num_seqs(self) -> int:
        return int(self.cu_seqlens.numel()) - 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step tells. grad_norm: global L2 norm before clipping. skipped: a
    non-finite gradient on any rank left weights and optimizer state unchanged."""

    metrics: Mapping[str, float]
    grad_norm: float
    learning_rate: float
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What the last pipeline stage computes from a model's output on one micro-batch.

    columns: per-token results without grad, [T] each. loss: 0-d, with grad, not scaled; None in a
    forward-only pass.
    """

    columns: tuple[Tensor, ...] = ()
    loss: Tensor | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
