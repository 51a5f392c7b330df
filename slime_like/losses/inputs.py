"""What a loss sees and what it returns, and checks of what a caller gives. Tensors are packed: T
tokens of S sequences; row t of each speaks about one predicted token."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from slime_like.lazy import Tensor, dist, torch
from slime_like.losses.ranks import sum_over_ranks
from slime_like.metrics.typed import Metric, masked_max, masked_mean, masked_min, zero

LOG_RATIO_CLAMP = 20.0
SEQUENCE_LOG_RATIO_CAP = 10.0
IMPORTANCE_LEVELS = ("token", "sequence")
_REMEDIES = {"rollout_log_probs": "; let the sampler return log-probs"}


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Per-token tensors of one micro-batch. All but log_probs and entropy are constants. Values at
    rows where `loss_mask` is False are never used, NaN and infinity included; log_probs of
    observations are, where `observation_weights` is not 0.

    Under context parallelism each rank of cp_group has T of the rows of the same S sequences, and a
    loss returns what its own rows contribute. Quantities of whole sequences go through `seq_sum`
    and `seq_mean`, others of the micro-batch through `ranks.py`: the sums there are exact over the
    ranks, and so are their gradients."""

    log_probs: Tensor  # [T] current policy, with grad
    loss_mask: Tensor  # [T] bool, the original mask
    loss_weights: Tensor  # [T] u: 1 / denominator of the reduction, over the whole optimizer step
    seq_ids: Tensor  # [T] int64 in [0, S)
    num_seqs: int
    policy_weights: Tensor | None = None  # [T] w, the weight of the policy term; None: u
    advantages: Tensor | None = None  # [T]
    old_log_probs: Tensor | None = None  # [T] trainer, before the update
    rollout_log_probs: Tensor | None = None  # [T] sampler
    ref_log_probs: Tensor | None = None  # [T] reference model
    entropy: Tensor | None = None  # [T], with grad where its bonus is used
    keep_mask: Tensor | None = None  # [T] bool, of the off-policy correction; None keeps all
    importance_weights: Tensor | None = None  # [T], of the off-policy correction; None: 1
    # "sequence": importance_weights holds one weight of the whole sequence on each of its tokens
    importance_level: str = "token"
    rewards: Tensor | None = None  # [T] the sample's raw reward on every token
    # [T] 1 / (tokens of the optimizer step in samples with a reward above 0) on those tokens, else
    # 0
    nll_weights: Tensor | None = None
    # [T] 1 / (observation tokens of the optimizer step) on these tokens, which the model did not
    # write, so that `loss_mask` is False there; else 0
    observation_weights: Tensor | None = None
    # of losses that choose tokens at random: from (seed, step, micro-batch)
    selection_seed: int = 0
    # [T] int64: row of the micro-batch where one process packs it; None: the row itself
    places: Tensor | None = None
    # [T, K] current policy's, of the tokens that a teacher was asked about, with grad
    label_log_probs: Tensor | None = None
    # [T, K] the teacher's probabilities of them, all 0 at a token without a teacher
    label_weights: Tensor | None = None
    # [T] int64 in [0, num_turns): the answer of each active token, see `turns_of`; None: not looked
    # up yet
    turn_ids: Tensor | None = None
    num_turns: int = 0
    # ranks that hold other rows of the same sequences; None: this one holds all
    cp_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        require_choice("importance_level", self.importance_level, IMPORTANCE_LEVELS)

    def masked(self, x: Tensor) -> Tensor:
        """x in fp32 (fp64 stays), 0 at inactive rows. Selection comes before any product, so that
        NaN never meets a 0; in backward an inactive row gets exactly 0."""
        x = x if x.dtype == torch.float64 else x.float()
        return torch.where(self.loss_mask, x, zero(x.device, x.dtype))

    def required(self, name: str) -> Tensor:
        """The constant field `name`, masked and without gradient. Raises ValueError when the batch
        has none."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                f"the loss needs {name}, and the batch has none{_REMEDIES.get(name, '')}"
            )
        return self.masked(value.detach())

    @property
    def kept(self) -> Tensor:
        """[T] bool: active tokens that the off-policy correction keeps."""
        return self.loss_mask if self.keep_mask is None else self.loss_mask & self.keep_mask

    def policy_gradient(self, weight: Tensor) -> Tensor:
        """-weight log_prob [T] with a constant weight [T]: its gradient by the log-prob is -weight. A
        weight at a rejected token, which
        may not be finite, is not used."""
        return -torch.where(self.kept, weight.detach(), 0.0) * self.masked(self.log_probs)

    def log_ratio(self, anchor: str = "old_log_probs") -> Tensor:
        """d = clamp(log_probs - anchor, +-20) [T], 0 at inactive rows; the clamp also stops the
        gradient."""
        return (self.masked(self.log_probs) - self.required(anchor)).clamp(
            -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP
        )

    def sequence_log_ratio(self, level: str = "sequence") -> Tensor:
        """log s_t of GSPO-token (arXiv 2507.18071, equation 14) [T], at most 10: its value is the
        mean log-ratio of the sequence over the original mask, its gradient the token's own. level:
        "sequence", or "turn" for the mean of the answer."""
        log_probs = self.masked(self.log_probs)
        mean_of = self.turn_mean if level == "turn" else self.seq_mean
        mean = mean_of(self.log_ratio().detach())
        return (log_probs - log_probs.detach() + mean).clamp(max=SEQUENCE_LOG_RATIO_CAP)

    def seq_sum(self, x: Tensor) -> Tensor:
        """Sum of x over the active tokens of each sequence, on every row of it: [T] -> [T],
        differentiable."""
        return sum_over_ranks(self._own_sums(x), self.cp_group).index_select(0, self.seq_ids)

    def seq_mean(self, x: Tensor) -> Tensor:
        """Mean of x over the active tokens of each sequence, on every row of it: [T] -> [T]; 0 in a
        sequence without any."""
        return self._mean_of(x, self.seq_ids, self.num_seqs)

    def turn_mean(self, x: Tensor) -> Tensor:
        """As `seq_mean`, of the active tokens of each answer; anything at inactive rows."""
        if self.turn_ids is not None:
            return self._mean_of(x, self.turn_ids, self.num_turns)
        assert self.cp_group is None, "a rank that holds a part of a row cannot find its answers"
        # as many places as rows: to count the answers the host would wait for the device
        return self._mean_of(x, turns_of(self.loss_mask, self.seq_ids), self.loss_mask.numel())

    def _mean_of(self, x: Tensor, ids: Tensor, count: int) -> Tensor:
        own = self._own_sums(x, ids, count)
        ones = self._own_sums(torch.ones_like(x), ids, count)
        sums, counts = sum_over_ranks(torch.stack([own, ones]), self.cp_group)
        return (sums / counts.clamp(min=1)).index_select(0, ids)

    def _own_sums(self, x: Tensor, ids: Tensor | None = None, count: int | None = None) -> Tensor:
        """[T] -> [S], or [count] by `ids` [T], over this rank's rows."""
        x = self.masked(x)
        size = self.num_seqs if count is None else count
        return torch.zeros(size, dtype=x.dtype, device=x.device).index_add(
            0, self.seq_ids if ids is None else ids, x
        )


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    """token_losses: [T], to be minimised, neither masked nor weighted. metrics: typed, over the
    active tokens of the original mask."""

    token_losses: Tensor
    metrics: Mapping[str, Metric]


def ratio_metrics(
    inputs: LossInputs, ratio: Tensor, anchor: str = "old_log_probs"
) -> dict[str, Metric]:
    """Metrics that every loss with a ratio reports. ratio: [T]."""
    mask = inputs.loss_mask
    log_ratio = inputs.masked(inputs.log_probs.detach()) - inputs.required(anchor)
    return {
        "ppo_kl": masked_mean(-log_ratio, mask),
        "ratio_mean": masked_mean(ratio, mask),
        "ratio_min": masked_min(ratio, mask),
        "ratio_max": masked_max(ratio, mask),
        "ratio_clamp_frac": masked_mean(log_ratio.abs() > LOG_RATIO_CLAMP, mask),
    }


def sequence_mean_metric(inputs: LossInputs, x: Tensor) -> Metric:
    """Mean over sequences with active tokens of the mean of x [T] over a sequence's active tokens."""
    share = 1.0 / inputs.seq_sum(torch.ones_like(inputs.loss_mask, dtype=torch.float32)).clamp(
        min=1
    )
    share = torch.where(inputs.loss_mask, share, 0.0)
    return Metric("mean", (share * inputs.masked(x.detach()).float()).sum(), share.sum())


# What the public functions of losses and advantages ask of their tensors: one sentence for each way
# of being wrong. Every function raises ValueError that names the argument, what was given and what
# is legal. They look at values, which waits for the device: training, which has made its tensors
# itself, calls the functions below these checks.


def require_tensor(name: str, value: object) -> Tensor:
    """`value` as it is. Raises ValueError when it is None or no tensor."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is {type(value).__name__}; it must be a torch.Tensor")
    return value


def require_shape(name: str, value: object, like: Tensor, like_name: str) -> Tensor:
    """`value` as it is. Raises ValueError when it is no tensor of the shape of `like`."""
    tensor = require_tensor(name, value)
    if tensor.shape != like.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, {like_name} has {tuple(like.shape)}; they must be equal"
        )
    return tensor


def require_mask(name: str, value: object) -> Tensor:
    """`value` as bool. Raises ValueError for an element that is neither 0 nor 1, NaN included."""
    tensor = require_tensor(name, value)
    if tensor.dtype == torch.bool:
        return tensor
    strange = ~((tensor == 0) | (tensor == 1))
    if strange.any():
        where, what = _first(tensor, strange)
        raise ValueError(f"{name}{where} is {what:g}; it must be bool, or 0 and 1 alone")
    return tensor.bool()


def require_finite(name: str, value: Tensor, where: Tensor) -> None:
    """Raises ValueError when `value` is NaN or infinite where `where`, a bool tensor of its shape,
    is True."""
    bad = where & ~torch.isfinite(value)
    if bad.any():
        place, what = _first(value, bad)
        raise ValueError(f"{name}{place} is {what:g}; it must be finite at every active token")


def require_ids(
    name: str, value: object, count: int, *, below: int | None = None, index: bool = False
) -> Tensor:
    """`value` as it is: [count] whole numbers, in [0, below) where that is given.

    Args:
        index: of an integer type, as indices must be.

    Raises:
        ValueError: for anything else.
    """
    tensor = require_tensor(name, value)
    if tensor.shape != (count,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [{count}]")
    inexact = tensor.is_floating_point() and index
    if tensor.dtype == torch.bool or tensor.is_complex() or inexact:
        raise ValueError(f"{name} is of {tensor.dtype}; it must hold whole numbers")
    if (
        tensor.is_floating_point()
        and (broken := (tensor != tensor.trunc()) | ~torch.isfinite(tensor)).any()
    ):
        place, what = _first(tensor, broken)
        raise ValueError(f"{name}{place} is {what:g}; it must be a whole number")
    if count and below is not None and not 0 <= int(tensor.min()) <= int(tensor.max()) < below:
        bounds = f"{int(tensor.min())} to {int(tensor.max())}"
        raise ValueError(f"{name} runs from {bounds}; it must be in [0, {below})")
    return tensor


def require_choice(name: str, value: object, legal: Collection[str]) -> None:
    """Raises ValueError when `value` is none of `legal`."""
    if value not in legal:
        raise ValueError(f"unknown {name} {value!r}; legal values: {', '.join(legal)}")


def require_samples(masks: Sequence[Tensor], **lists: Sequence[object] | None) -> None:
    """Raises ValueError unless every list that is given has an entry for each mask, of its shape
    where it is a tensor.

    masks: [R] bool by sample. lists: by argument name; None: not given.
    """
    for i, mask in enumerate(masks):
        if require_tensor(f"masks[{i}]", mask).dtype != torch.bool or mask.dim() != 1:
            raise ValueError(f"masks[{i}] is {mask.dtype} {tuple(mask.shape)}; it must be [R] bool")
    for name, values in lists.items():
        if values is None:
            continue
        if len(values) != len(masks):
            raise ValueError(f"{name} has {len(values)} samples, masks {len(masks)}")
        for i, (value, mask) in enumerate(zip(values, masks)):
            if isinstance(value, torch.Tensor) and value.dim():
                require_shape(f"{name}[{i}]", value, mask, f"masks[{i}]")


def _first(values: Tensor, flags: Tensor) -> tuple[str, float]:
    """Place and value of the first element where `flags` is True."""
    place = flags.nonzero()[0].tolist()
    return (f"[{', '.join(map(str, place))}]" if place else ""), float(values[tuple(place)])


def turns_of(mask: Tensor, seq_ids: Tensor) -> Tensor:
    """The answers of a model among the rows of whole sequences: active tokens in a row.

    Args:
        mask: [T] bool, active tokens.
        seq_ids: [T], ascending.

    Returns:
        The answer of each row [T] int64, ascending from 0; of an inactive one any of them.
    """
    begins = mask.clone()
    begins[1:] &= ~(mask[:-1] & (seq_ids[1:] == seq_ids[:-1]))
    return (begins.cumsum(0) - 1).clamp(min=0)
