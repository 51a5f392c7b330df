"""The table of policy losses. A new loss is one file that registers itself, and one import line in `__init__.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from slime_like.losses.inputs import LossInputs, PolicyLossOutput
from slime_like.registry import Registry

Correction = Literal["outer", "internal", "masks", "forbidden"]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A registered loss.

    config_type: frozen dataclass of its settings, declared with `slime_like.config.arg`. needs: fields of `LossInputs` that must be
    there. correction: who applies the off-policy correction: "outer" (losses/total.py), "internal" (the loss), "masks" (losses/total.py,
    and importance weights are refused: the loss's own ratio is against the sampler already) or "forbidden".
    recommended_reductions: others draw a warning; empty: any. homogeneous: loss(c * A) = c * loss(A) for c > 0.
    alias_defaults: settings that an alias changes, e.g. {"dual_clip": {"eps_clip_c": 3.0}}. by_config: what of the above its settings
    change, as keyword arguments; use `with_config` to have it applied.
    """

    name: str
    config_type: type
    fn: Callable[[LossInputs, Any], PolicyLossOutput]
    needs: frozenset[str]
    correction: Correction = "outer"
    recommended_reductions: tuple[str, ...] = ()
    required_reductions: tuple[str, ...] = ()
    homogeneous: bool = True
    alias_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    by_config: Callable[[Any], Mapping[str, Any]] | None = None

    def with_config(self, config: Any) -> PolicyLoss:
        """This loss as `config` makes it."""
        return self if self.by_config is None else replace(self, **self.by_config(config))


policy_losses: Registry[PolicyLoss] = Registry("policy loss")
