"""Registry of rollout engines (--rollout-engine). An entry is a factory function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slime_like.registry import Registry

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from arguments.run_config import RunConfig
    from slime_like.engines.base import RolloutEngine


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Arguments of an engine factory. tokenizer: a transformers tokenizer. device: this rank's
    device. output_dir: the run's folder, for logs."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    output_dir: Path


EngineFactory = Callable[[EngineContext], "RolloutEngine"]
Factory = TypeVar("Factory", bound=EngineFactory)

rollout_engines: Registry[EngineFactory] = Registry("rollout engine (--rollout-engine)")


def register_rollout_engine(name: str, *, help: str = "") -> Callable[[Factory], Factory]:
    """Decorator that registers ``make(context) -> RolloutEngine`` as --rollout-engine `name`. The
    factory is called on all ranks. Raises ValueError if the name is taken."""

    def register(make: Factory) -> Factory:
        rollout_engines.add(name, make, help=help)
        return make

    return register


_HERE = "slime_like.engines"
rollout_engines.add_lazy(
    "local",
    f"{_HERE}.local.engine:make_local_engine",
    help="transformers' generation inside each training rank.",
)
rollout_engines.add_lazy(
    "sglang", f"{_HERE}.sglang.factory:make_sglang_engine", help="SGLang servers."
)
