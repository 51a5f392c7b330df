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
    from slime_like.images.processor import ImageProcessor
    from slime_like.megatron.network import Network


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Arguments of an engine factory."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase  # a transformers tokenizer
    device: torch.device  # this rank's device
    output_dir: Path  # the run's folder, for logs
    # of the model's images, with --multimodal-keys; an engine uses the trainer's, which remembers
    image_processor: ImageProcessor | None = None
    # of this rank, in a run that trains; its weights are the engine's after a weight update
    policy: Network | None = None


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What the rules of the command line must know about an engine before it is imported."""

    # rank 0 sends requests to servers, whose weights are elsewhere; otherwise each rank has a copy
    # of the weights
    has_servers: bool = False
    aborts_requests: bool = False  # a single request can be aborted
    takes_quantized: bool = False  # weights arrive in the quantised format of --hf-checkpoint
    takes_adapters: bool = False  # with --lora-sync adapter weights arrive as a LoRA adapter


EngineFactory = Callable[[EngineContext], "RolloutEngine"]
Factory = TypeVar("Factory", bound=EngineFactory)

rollout_engines: Registry[EngineFactory] = Registry("rollout engine (--rollout-engine)")
_traits: dict[str, EngineTraits] = {}


def engine_traits(name: str) -> EngineTraits:
    """The traits of --rollout-engine `name`; the defaults for an unknown one."""
    return _traits.get(name, EngineTraits())


def register_rollout_engine(
    name: str, *, help: str = "", traits: EngineTraits | None = None
) -> Callable[[Factory], Factory]:
    """Decorator that registers ``make(context) -> RolloutEngine`` as --rollout-engine `name`. The
    factory is called on all ranks. traits: None: those of an engine in each rank. Raises ValueError
    if the name is taken."""

    def register(make: Factory) -> Factory:
        rollout_engines.add(name, make, help=help)
        _traits[name] = traits or EngineTraits()
        return make

    return register


_HERE = "slime_like.engines"
rollout_engines.add_lazy(
    "local",
    f"{_HERE}.local.factory:make_local_engine",
    help="transformers' generation inside each training rank.",
)
rollout_engines.add_lazy(
    "sglang", f"{_HERE}.sglang.factory:make_sglang_engine", help="SGLang servers."
)
rollout_engines.add_lazy("vllm", f"{_HERE}.vllm.factory:make_vllm_engine", help="vLLM servers.")
_traits["local"] = EngineTraits(takes_adapters=True)
_traits["vllm"] = EngineTraits(has_servers=True, aborts_requests=True, takes_adapters=True)
_traits["sglang"] = EngineTraits(
    has_servers=True, aborts_requests=True, takes_quantized=True, takes_adapters=True
)
