"""The table of policy losses. A new loss is one file that registers itself: with an import line in
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
    """A registered loss.

    config_type: frozen dataclass of its settings, declared with `slime_like.config.arg`. needs:
    fields of `LossInputs` that must be there. correction: who applies the off-policy correction:
    "outer" (losses/total.py), "internal" (the loss), "masks" (losses/total.py, and importance
    weights are refused: the loss's own ratio is against the sampler already) or "forbidden".
    recommended_reductions: others draw a warning; empty: any. sequence_ratio: its clip range is for
    the geometric mean of a sequence's ratios. homogeneous: loss(c * A) = c * loss(A) for c > 0.
    pairs: of preferences: samples are two answers to one prompt (pairs.py). scores: log_probs are
    what a scalar head gives at the last token of each sample. alias_defaults:
    settings that an alias changes, e.g. {"dual_clip": {"eps_clip_c": 3.0}}. by_config: what of the above its settings change, as keyword arguments;
    use `with_config` to have it applied.
    """

    name: str
    config_type: type
    fn: Callable[[LossInputs, Any], PolicyLossOutput]
    needs: frozenset[str]
    correction: Correction = "outer"
    recommended_reductions: tuple[str, ...] = ()
    required_reductions: tuple[str, ...] = ()
    sequence_ratio: bool = False
    homogeneous: bool = True
    pairs: bool = False
    scores: bool = False
    alias_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    by_config: Callable[[Any], Mapping[str, Any]] | None = None

    def with_config(self, config: object) -> PolicyLoss:
        """This loss as `config` makes it."""
        return self if self.by_config is None else replace(self, **self.by_config(config))

    def settings(self, name: str, config: object = None) -> Any:
        """The settings of this loss under `name`, its own or an alias.

        Args:
            name: an alias may stand for settings, as dual_clip does for a bound.
            config: None takes the defaults of `name`.

        Returns:
            `config`, or the defaults.

        Raises:
            ValueError: when `config` is of another loss, or lacks or contradicts what the alias
                stands for.
        """
        meant = self.alias_defaults.get(name, {})
        if config is None:
            return self.config_type(**meant)
        if not isinstance(config, self.config_type):
            raise ValueError(
                f"policy loss {name} takes a {self.config_type.__name__}, not a {type(config).__name__}"
            )
        choices = {f.name for f in fields(self.config_type) if f.metadata.get("choices")}
        for setting, value in meant.items():
            given = getattr(config, setting)
            if given is None or (setting in choices and given != value):
                raise ValueError(
                    f"policy loss {name} stands for {setting}={value!r}, and the config has {given!r}; set it, or use {self.name}"
                )
        return config


policy_losses: Registry[PolicyLoss] = Registry("policy loss")
"""Every `PolicyLoss`, by its name or an alias."""
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
    """Decorator that makes ``fn(inputs, config) -> PolicyLossOutput`` the loss of
    --policy-loss-type `name`.

    Args:
        config_type: its settings, each of which becomes a flag; see `PolicyLoss`.
        needs: fields of `LossInputs` that must be there.
        declared: further fields of `PolicyLoss`.

    Raises:
        ValueError: when the name is taken.
    """

    def register(fn: LossFunction) -> LossFunction:
        entry = PolicyLoss(name, config_type, fn, frozenset(needs), **declared)
        policy_losses.add(name, entry, aliases, help=help)
        return fn

    return register
