"""Maps loss names and settings of the Tinker API to slime_like/losses. Every loss is a weighted sum
of token losses."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_like.config import SettingsError
from slime_like.losses import policy_losses
from slime_like.losses.value_loss import ValueLossConfig
from slime_like.tinker.errors import Refused
from slime_like.tinker.loss_graph import LossGraph
from slime_like.tinker.schemas import LARGEST, SMALLEST

CRITIC_LOSS = "ppo_critic"
CUSTOM_LOSS = "custom"  # a graph that the client has sent (loss_graph.py)
# Thinking Machines' formula is not public: ours is a documented equivalent, and answers say so
STABLE_REINFORCE = "stable_reinforce"
# tensor of a datum -> field of TrainSample
FIELDS = {
    "target_tokens": "labels",
    "weights": "loss_weights",
    "logprobs": "old_log_probs",
    "rollout_logprobs": "rollout_log_probs",
    "advantages": "advantages",
    "rewards": "rewards",
    "mask": "keep_mask",
    "sequence_ratio_mask": "keep_mask",
    "values": "values",
    "returns": "returns",
}
SETS = {"target_tokens": "label_sets", "weights": "label_weights"}  # for shape [N, K]
ENTROPY = "entropy_coef"  # setting of all slime_like losses, equal to --entropy-coef
SOFT_LOSS = "cross_entropy"  # the loss that accepts [N, K] targets
INTEGERS = {"target_tokens"}
MASKS = {"mask", "sequence_ratio_mask"}
_RL = frozenset({"target_tokens", "logprobs", "advantages"})


@dataclass(frozen=True, slots=True)
class ServedLoss:
    """A loss function of the API."""

    name: str  # the client's name
    kind: str  # a registered policy loss, or CRITIC_LOSS
    settings: Mapping[str, Any]  # of its configuration
    required: frozenset[str]  # tensors of a datum
    optional: frozenset[str] = frozenset({"weights"})  # tensors of a datum
    # weight of the per-token entropy bonus, which is subtracted from the loss
    entropy_coef: float = 0.0
    kl_coef: float = 0.0  # weight of the k2 estimate of the KL to the sampling policy
    graph: LossGraph | None = None  # of a custom loss

    @property
    def is_critic(self) -> bool:
        return self.kind == CRITIC_LOSS

    @property
    def replays(self) -> bool:
        """Whether log-probs and sampling masks come from the server's records."""
        return self.name == STABLE_REINFORCE


def served_loss(name: str, config: Mapping[str, float | str]) -> ServedLoss:
    """Resolve a loss and its configuration. Raises Refused for an unknown loss or setting, a
    missing setting, or an illegal value."""
    if name in _TINKER_LOSSES:
        return _TINKER_LOSSES[name](_Config(name, config))
    if name not in policy_losses.names(with_aliases=True):
        raise Refused(f"unknown loss_fn {name!r}; accepted: {', '.join(loss_names())}")
    return _policy_loss(name, config)


def custom_loss(
    config: Mapping[str, float | str], find_graph: Callable[[str], LossGraph]
) -> ServedLoss:
    """The loss that a client has created.

    Args:
        find_graph: Looks up a graph by its id; raises Refused.
    """
    check_keys(CUSTOM_LOSS, config, ["loss_id"])
    loss_id = config.get("loss_id")
    if not isinstance(loss_id, str):
        raise Refused(
            f"loss_fn {CUSTOM_LOSS!r} needs loss_fn_config['loss_id'], the id that "
            "create_custom_loss has returned"
        )
    graph = find_graph(loss_id)
    required = {"target_tokens", *(name for name, _ in graph.data_inputs)}
    return ServedLoss(CUSTOM_LOSS, CUSTOM_LOSS, {}, frozenset(required), frozenset(), graph=graph)


def loss_names() -> list[str]:
    return [
        *_TINKER_LOSSES,
        CUSTOM_LOSS,
        *(n for n in policy_losses.names() if n not in _TINKER_LOSSES),
    ]


def check_keys(loss: str, config: Mapping[str, object], accepted: Sequence[str]) -> None:
    """Raise Refused for keys that the loss does not accept."""
    if unknown := [repr(key) for key in config if key not in accepted]:
        raise Refused(
            f"loss_fn {loss!r}: unknown loss_fn_config {', '.join(unknown)}; accepted: "
            f"{', '.join(accepted) or 'none'}"
        )


class _Config:
    """A loss_fn_config that is read key by key."""

    def __init__(self, loss: str, values: Mapping[str, float | str]) -> None:
        self._loss = loss
        self._values = values
        self._keys: list[str] = []  # that were read

    def number(
        self, key: str, default: float | None, is_legal: Callable[[float], bool], legal: str
    ) -> float:
        self._keys.append(key)
        value = self._values.get(key, default)
        if value is None:
            raise Refused(
                f"loss_fn {self._loss!r} needs loss_fn_config[{key!r}] ({legal}); Tinker does not "
                "document a default"
            )
        if isinstance(value, str) or not is_legal(value) or not fits_float32(value):
            raise Refused(
                f"loss_fn {self._loss!r}: loss_fn_config[{key!r}] is {value!r}, must be {legal}"
            )
        return float(value)

    def finish(self) -> None:
        check_keys(self._loss, self._values, self._keys)

    def thresholds(self, low: float | None, high: float | None) -> tuple[float, float]:
        """Bounds of a ratio as absolute values."""
        below = self.number(
            "clip_low_threshold", low, lambda x: 0 <= x <= 1, "a ratio, 0 <= x <= 1"
        )
        above = self.number(
            "clip_high_threshold", high, lambda x: 1 <= x < float("inf"), "a ratio, >= 1"
        )
        self.finish()
        return 1 - below, above - 1


def _plain(kind: str, required: frozenset[str]) -> Callable[[_Config], ServedLoss]:
    def make(config: _Config) -> ServedLoss:
        config.finish()
        return ServedLoss(kind, kind, {}, required)

    return make


def _ppo(config: _Config) -> ServedLoss:
    low, high = config.thresholds(0.8, 1.2)
    return ServedLoss("ppo", "ppo", {"eps_clip": low, "eps_clip_high": high}, _RL)


def _cispo(config: _Config) -> ServedLoss:
    low, high = config.thresholds(0.0, 4.0)
    return ServedLoss(
        "cispo", "cispo", {"cispo_eps_clip_low": low, "cispo_eps_clip_high": high}, _RL
    )


def _gspo(config: _Config) -> ServedLoss:
    low, high = config.thresholds(None, None)
    return ServedLoss(
        "gspo", "gspo", {"eps_clip": low, "eps_clip_high": high}, _RL | {"sequence_ratio_mask"}
    )


def _dro(config: _Config) -> ServedLoss:
    beta = config.number("beta", None, lambda x: 0 < x < float("inf"), "> 0")
    config.finish()
    return ServedLoss("dro", "dro", {"dro_beta": beta}, _RL)


def _stable_reinforce(config: _Config) -> ServedLoss:
    """-sg(min(r, bound)) A lp + kl_coeff (lp - q)^2 / 2 with r = exp(lp - q), where q is the
    recorded log-prob, and lp and q are over the recorded sampling mask: truncated importance
    sampling (Ionides 2008), whose gradient a token of small q cannot dominate, with the k2 estimate
    of the KL to the sampling policy."""
    kl_coef = config.number("kl_coeff", 0.0, lambda x: 0 <= x < float("inf"), ">= 0")
    bound = config.number("ratio_bound", 2.0, lambda x: 1 <= x < float("inf"), ">= 1")
    config.finish()
    return ServedLoss(
        STABLE_REINFORCE,
        "cispo",
        {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": bound - 1},
        frozenset({"target_tokens", "advantages"}),
        # the cookbook sends the log-probs that it was given; those of the record take their place
        frozenset({"weights", "logprobs"}),
        kl_coef=kl_coef,
    )


def _critic(config: _Config) -> ServedLoss:
    clip = config.number(
        "value_clip", ValueLossConfig().value_clip, lambda x: 0 < x < float("inf"), "> 0"
    )
    config.finish()
    settings = {"value_clip": clip, "value_loss_scale": 0.5}
    return ServedLoss(
        CRITIC_LOSS,
        CRITIC_LOSS,
        settings,
        frozenset(),
        frozenset({"values", "returns", "weights", "target_tokens"}),
    )


_TINKER_LOSSES: dict[str, Callable[[_Config], ServedLoss]] = {
    "cross_entropy": _plain("cross_entropy", frozenset({"target_tokens"})),
    "importance_sampling": _plain("importance_sampling", _RL),
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
    STABLE_REINFORCE: _stable_reinforce,
    CRITIC_LOSS: _critic,
}


def _policy_loss(name: str, config: Mapping[str, float | str]) -> ServedLoss:
    """A slime_like loss, by its own name, with flag names as settings. `mask` selects the tokens
    that it counts."""
    kind = policy_losses.canonical(name)
    loss = policy_losses.get(kind)
    hints = typing.get_type_hints(loss.config_type)
    check_keys(name, config, [*(f.name for f in dataclasses.fields(loss.config_type)), ENTROPY])
    values = {key: _typed(name, key, value, hints.get(key, float)) for key, value in config.items()}
    entropy_coef = values.pop(ENTROPY, 0.0)
    if not 0 <= entropy_coef < float("inf"):
        raise Refused(
            f"loss_fn {name!r}: loss_fn_config[{ENTROPY!r}] is {entropy_coef!r}, must be >= 0"
        )
    settings = {**loss.alias_defaults.get(name, {}), **values}
    try:
        needs = loss.with_config(loss.config_type(**settings)).needs
    except SettingsError as error:
        message = "; ".join(
            f"{problem.flag.lstrip('-').replace('-', '_')} is {problem.value!r}: {problem.message}"
            for problem in error.problems
        )
        raise Refused(f"loss_fn {name!r}: {message}") from None
    required = {"target_tokens", "mask"} | {
        key for key, field in FIELDS.items() if field in needs and key not in MASKS
    }
    optional = frozenset({"weights", "logprobs", "rollout_logprobs", "rewards"})
    return ServedLoss(name, kind, settings, frozenset(required), optional, entropy_coef)


def fits_float32(value: float) -> bool:
    """Whether a setting, its square and its reciprocal are finite in float32."""
    return value == 0 or SMALLEST <= abs(value) <= LARGEST


def _typed(loss: str, key: str, value: float | str, hint: object) -> Any:
    """Convert a setting to its type; protobuf transmits numbers as doubles."""
    kinds = typing.get_args(hint) or (hint,)
    if isinstance(value, str):
        if str in kinds:
            return value
    elif float in kinds and fits_float32(value):
        return float(value)
    elif int in kinds and math.isfinite(value) and value == int(value):
        return int(value)
    elif bool in kinds and value in (0.0, 1.0):
        return bool(value)
    legal = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    if float in kinds and not isinstance(value, str):
        legal = f"0, or of magnitude {SMALLEST:g} to {LARGEST:g}"
    raise Refused(f"loss_fn {loss!r}: loss_fn_config[{key!r}] is {value!r}, must be {legal}")
