"""torch on CPU: in the modules listed below, "cuda" means the CPU.

Target    the global name `torch` of the megatron.core modules in MODULES, and
          dist_checkpointing.mapping: ShardedTensor.init_data.
Why       These modules unconditionally create tensors with device="cuda" or
          torch.cuda.current_device(), pin memory, and use CUDA streams, events and synchronisation.
Without   They raise an error on a machine without CUDA.
How       Each module gets a stand-in for `torch` that forwards every attribute to the real one,
          except the tensor factories, `device`, `autocast` and `torch.cuda`. The real torch and
          that of other modules stay untouched, and tensor operations have no overhead. (A global
          TorchFunctionMode would work too, but slows down every torch call.) init_data has the
          real torch.empty as a default argument and therefore needs its own wrapper.
When      No CUDA device.
Versions  megatron-core 0.16.1 to 0.19.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from megatron_patches.patch import NO_CUDA, Patch, find, missing

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor


NAME = "torch_on_cpu"
MODULES = (
    "tensor_parallel.data",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.random",
    "tensor_parallel.utils",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "distributed.distributed_data_parallel",
    "distributed.param_and_grad_buffer",
    "optimizer.clip_grads",
    "optimizer.cpu_offloading.hybrid_optimizer",
    "optimizer.distrib_optimizer",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "models.common.embeddings.rope_utils",
    "models.common.embeddings.rotary_pos_embedding",
    "models.common.embeddings.yarn_rotary_pos_embedding",
    "models.gpt.gpt_model",
    "parallel_state",
    "rerun_state_machine",
    "timers",
    "utils",
    "transformer.attention",
    "transformer.dot_product_attention",
    "transformer.mlp",
    "transformer.module",
    "transformer.multi_token_prediction",
    "transformer.transformer_layer",
    "transformer.utils",
    "transformer.moe.experts",
    "transformer.moe.moe_utils",
    "transformer.moe.router",
    "transformer.moe.shared_experts",
    "transformer.moe.token_dispatcher",
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.tensor_aware_state_dict",
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver",
)
INIT_DATA = "dist_checkpointing.mapping:ShardedTensor.init_data"
FACTORIES = (
    "tensor",
    "as_tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "zeros_like",
    "ones_like",
    "empty_like",
)
CPU = torch.device("cpu")


class StandIn(types.ModuleType):
    """A module that forwards to another one, except for the attributes in `own`."""

    def __init__(self, real: types.ModuleType, **own: object) -> None:
        super().__init__(f"{real.__name__} (on CPU, by megatron_patches)")
        self.__dict__.update(own, _real=real)

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["_real"], name)


class Stream:
    """CUDA stream or event on CPU: everything is synchronous, so there is nothing to wait for."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record_event(self, *args: object) -> Stream:
        return self

    def synchronize(self, *args: object) -> None:
        pass

    wait = wait_event = wait_stream = record = synchronize


def _cpu_device(device: object) -> object:
    """Map a CUDA device, given as name, object or index, to the CPU; return others unchanged."""
    return CPU if isinstance(device, int) or str(device).startswith("cuda") else device


def _on_cpu(factory: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(factory)
    def call(*args: object, **kwargs: object) -> object:
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = _cpu_device(kwargs["device"])
        return factory(*args, **kwargs)

    return call


def _device(*args: Any, **kwargs: Any) -> torch.device:
    return CPU if args and str(args[0]).startswith("cuda") else torch.device(*args, **kwargs)


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> torch.autocast:
    return torch.autocast("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _nothing(*args: object, **kwargs: object) -> None:
    pass


def _no_context(*args: object, **kwargs: object) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


def make_stand_in() -> StandIn:
    """Build the stand-in for torch that maps CUDA to the CPU."""
    only_stream = Stream()
    cuda = StandIn(
        torch.cuda,
        current_device=lambda: CPU,
        device_count=lambda: 1,
        set_device=_nothing,
        synchronize=_nothing,
        empty_cache=_nothing,
        memory_allocated=lambda *args: 0,
        Stream=Stream,
        Event=Stream,
        current_stream=lambda *args: only_stream,
        default_stream=lambda *args: only_stream,
        stream=_no_context,
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
        nvtx=types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=_no_context),
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
    return StandIn(torch, cuda=cuda, device=_device, autocast=_autocast, **factories)


def check() -> None:
    for name in MODULES:
        if vars(find(NAME, name)).get("torch") is not torch:
            raise missing(NAME, f"megatron.core.{name} has no global named torch")
    find(NAME, INIT_DATA)


def install() -> None:
    stand_in = make_stand_in()
    for name in MODULES:
        find(NAME, name).torch = stand_in

    original = find(NAME, INIT_DATA)

    @functools.wraps(original)
    def init_data(self: ShardedTensor, device: object, *args: object, **kwargs: object) -> object:
        return original(self, _cpu_device(device), *args, **kwargs)

    find(NAME, INIT_DATA.rpartition(".")[0]).init_data = init_data


PATCH = Patch(NAME, NO_CUDA, check, install)
