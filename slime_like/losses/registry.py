"""Registry of policy losses. A new loss is one file that registers itself: with an import line in
`__init__.py`, or outside the package with --import-modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from slime_like.losses.inputs import LossInputs, PolicyLossOutput
from slime_like.registry import Registry

Correction = Literal["outer", "internal", "masks", "forbidden"]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A registered loss."""

    name: str
    config_type: type  # dataclass of its settings, declared with `slime_like.config.arg`
    fn: Callable[[LossInputs, Any], PolicyLossOutput]
    needs: frozenset[str]  # required fields of `LossInputs`
    # who applies the off-policy correction: "outer" (losses/total.py), "internal" (the loss),
    # "masks" (losses/total.py, but importance weights are rejected, because the loss's ratio is to
    # the rollout engine already) or "forbidden"
    correction: Correction = "outer"
    recommended_reductions: tuple[str, ...] = ()  # others cause a warning; empty: any
    required_reductions: tuple[str, ...] = ()
    sequence_ratio: bool = False  # the clip range is for the geometric mean of a sequence's ratios
    bounds_ratio: bool = True  # far from the old policy its gradient is clipped, or falls
    homogeneous: bool = True  # loss(c * A) = c * loss(A) for c > 0
    policy_gradient: bool = True  # with all ratios 1, its gradient is that of -A log_prob
    pairs: bool = False  # a preference loss of pairs (pairs.py)
    mismatched: bool = False  # a preference loss of single answers with a reference point (kto.py)
    scores: bool = False  # log_probs are outputs of a scalar head at the last token of each sample
    # settings that an alias changes, e.g. {"dual_clip": {"eps_clip_c": 3.0}}
    alias_defaults: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    # maps settings to the fields above that they change; `with_config` applies it
    by_config: Callable[[Any], Mapping[str, Any]] | None = None

    def with_config(self, config: object) -> PolicyLoss:
        """This loss with the fields that `config` changes."""
        return self if self.by_config is None else replace(self, **self.by_config(config))

    def settings(self, name: str, config: object = None) -> object:
        """The settings of this loss under `name`, its own or an alias.

        Args:
            name: An alias may imply settings, as dual_clip does a bound.
            config: None: the defaults of `name`.

        Returns:
            `config`, or the defaults.

        Raises:
            ValueError: `config` belongs to another loss, or lacks or contradicts a setting that the
                alias implies.
        """
        implied = self.alias_defaults.get(name, {})
        if config is None:
            return self.config_type(**implied)
        if not isinstance(config, self.config_type):
            expected = self.config_type.__name__
            actual = type(config).__name__
            raise ValueError(f"policy loss {name} takes a {expected}, not a {actual}")
        choices = {f.name for f in fields(self.config_type) if f.metadata.get("choices")}
        for setting, value in implied.items():
            actual = getattr(config, setting)
            if actual is None or (setting in choices and actual != value):
                raise ValueError(
                    f"policy loss {name} implies {setting}={value!r}, and the config has "
                    f"{actual!r}; set it, or use {self.name}"
                )
        return config


policy_losses: Registry[PolicyLoss] = Registry("policy loss")
"""Every `PolicyLoss` by name and alias."""
LossFunction = TypeVar("LossFunction", bound=Callable[[LossInputs, Any], PolicyLossOutput])


def register_policy_loss(
    name: str,
    config_type: type,
    *,
    needs: Iterable[str] = (),
    aliases: Iterable[str] = (),
    help: str = "",
    **declared: Any,
) -> Callable[[LossFunction], LossFunction]:
    """Decorator that registers ``fn(inputs, config) -> PolicyLossOutput`` as --policy-loss-type
    `name`.

    Args:
        config_type: Dataclass of its settings, each of which becomes a flag; see `PolicyLoss`.
        needs: Required fields of `LossInputs`.
        declared: Further fields of `PolicyLoss`.

    Raises:
        ValueError: The name is taken.
    """

    def register(fn: LossFunction) -> LossFunction:
        entry = PolicyLoss(name, config_type, fn, frozenset(needs), **declared)
        policy_losses.add(name, entry, aliases, help=help)
        return fn

    return register
