"""The Python side of the pretend GPU: what torch.cuda, torch.distributed and torch's flash attention
are asked for, over backend.cpp. `install` is called by start/sitecustomize.py as soon as torch is
imported."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import types
from collections import defaultdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tests.pretend_gpu import flash
from tests.pretend_gpu.extension import C

GIB = 2**30
NAME = "NVIDIA H100 80GB HBM3"
PROPERTIES = types.SimpleNamespace(
    name=NAME, major=9, minor=0, total_memory=80 * GIB, multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, gcnArchName="",
    L2_cache_size=50 * 2**20, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    is_integrated=0, is_multi_gpu_board=0, uuid="pretend",
)  # fmt: skip


def install() -> None:
    """Make this process believe in its devices; their number is that of CUDA_VISIBLE_DEVICES."""
    assert C.has_cuda(), "torch was asked for CUDA before the pretend GPU was there"
    devices = len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    C.set_devices(devices)
    _install_devices(devices)
    _install_streams()
    _install_memory()
    _install_random(devices)
    _install_storages()
    _install_nccl()
    _install_attention()
    _install_operators()
    if os.environ.get("PRETEND_CUDA_WAITS"):
        from tests.pretend_gpu.waits import count_for_file

        count_for_file()


_operators = torch.library.Library("aten", "IMPL")


def _install_operators() -> None:
    """Operators that only CUDA has, or has for more dtypes, and that transformers calls."""
    _operators.impl("histc", _histc, "CUDA")
    _operators.impl("_conv_depthwise2d", _conv_depthwise2d, "CUDA")


def _histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    return torch.histc(values.cpu().double(), bins, min, max).to(values.device, values.dtype)


def _conv_depthwise2d(
    x: Tensor,
    weight: Tensor,
    kernel_size: Any,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
) -> Tensor:
    bias = None if bias is None else bias.cpu()
    groups = x.size(1)
    found = torch.conv2d(x.cpu(), weight.cpu(), bias, stride, padding, dilation, groups)
    return found.to(x.device)


def _index(device: Any) -> int:
    if device is None:
        return int(C.device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(C.device()) if index is None else index


def _exchange(device: int) -> int:
    before = int(C.device())
    if device is not None and device >= 0:
        C.set_device(device)
    return before


def _install_devices(devices: int) -> None:
    cuda: Any = torch.cuda
    low: Any = torch._C
    cuda._is_compiled = cuda.is_available = cuda.is_initialized = lambda: True
    cuda._lazy_init = cuda.init = lambda: None
    cuda._initialized = True
    cuda.device_count = lambda: devices
    cuda.current_device = lambda: C.device()
    cuda.set_device = lambda device: C.set_device(_index(device))
    cuda._exchange_device = cuda._maybe_exchange_device = _exchange
    low._cuda_exchangeDevice = low._cuda_maybeExchangeDevice = _exchange
    low._cuda_getDevice = lambda: C.device()
    low._cuda_setDevice = C.set_device
    low._cuda_getDeviceCount = lambda: devices
    cuda.get_device_properties = lambda device=None: PROPERTIES
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_name = lambda device=None: NAME
    cuda.get_arch_list = lambda: ["sm_90"]
    cuda.is_bf16_supported = lambda *words, **named: True
    cuda.ipc_collect = lambda: None
    cuda.nvtx = types.SimpleNamespace(
        range_push=lambda *words: None,
        range_pop=lambda: None,
        mark=lambda *words: None,
        range=lambda *words, **named: contextlib.nullcontext(),
    )
    sys.modules["torch.cuda.nvtx"] = cuda.nvtx
    cuda.nccl = types.SimpleNamespace(version=lambda: (2, 27, 5))
    torch.backends.cuda.is_flash_attention_available = lambda: True
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "12.8"


class Stream:
    """The only stream: kernels have ended when their call returns."""

    def __init__(self, device: Any = None, priority: int = 0, **named: Any) -> None:
        self.device = torch.device("cuda", C.device())
        self.cuda_stream = self.stream_id = 0
        self.priority = priority
        self.device_index = C.device()
        self.device_type = 1

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        C.synchronize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


class Event:
    def __init__(self, enable_timing: bool = False, **named: Any) -> None:
        self._timing = enable_timing
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        assert self._timing and end._timing, "both events need enable_timing"
        return 1e3 * (end._at - self._at)

    def synchronize(self) -> None:
        C.synchronize()


def _install_streams() -> None:
    cuda: Any = torch.cuda
    only = Stream()
    low: Any = torch._C
    low._cuda_getCurrentRawStream = lambda index: 0
    low._cuda_isCurrentStreamCapturing = lambda: False
    cuda.synchronize = lambda device=None: C.synchronize()
    cuda.Stream = cuda.ExternalStream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.current_stream = cuda.default_stream = lambda device=None: only
    cuda.stream = cuda.StreamContext = lambda stream=None: contextlib.nullcontext()
    cuda.set_stream = lambda stream: None
    cuda.is_current_stream_capturing = lambda: False
    cuda.graphs.is_current_stream_capturing = lambda: False


def _install_memory() -> None:
    def stats(device: Any = None) -> dict[str, int]:
        known = {"allocated_bytes.all.current": C.bytes(), "allocated_bytes.all.peak": C.peak()}
        return defaultdict(int, known)

    functions: dict[str, Any] = {
        "memory_allocated": lambda device=None: C.bytes(),
        "memory_reserved": lambda device=None: C.bytes(),
        "max_memory_allocated": lambda device=None: C.peak(),
        "max_memory_reserved": lambda device=None: C.peak(),
        "reset_peak_memory_stats": lambda device=None: C.reset_peak(),
        "reset_max_memory_allocated": lambda device=None: C.reset_peak(),
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (80 * GIB - C.bytes(), 80 * GIB),
        "memory_stats": stats,
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
        setattr(torch.cuda.memory, name, function)


def _install_random(devices: int) -> None:
    """One generator for all devices of a process: our processes use one device each."""

    def on_host(state: torch.Tensor) -> torch.Tensor:
        if state.device.type != "cpu":
            raise TypeError("RNG state must be a torch.ByteTensor")  # torch's words
        return state

    functions: dict[str, Any] = {
        "get_rng_state": lambda device="cuda": C.generator().get_state(),
        "set_rng_state": lambda state, device="cuda": C.generator().set_state(on_host(state)),
        "get_rng_state_all": lambda: [C.generator().get_state()],
        "set_rng_state_all": lambda states: C.generator().set_state(on_host(states[0])),
        "manual_seed": lambda seed: C.generator().manual_seed(seed) and None,
        "manual_seed_all": lambda seed: C.generator().manual_seed(seed) and None,
        "initial_seed": lambda: C.generator().initial_seed(),
        "seed": lambda: C.generator().seed(),
        "seed_all": lambda: C.generator().seed(),
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
        setattr(torch.cuda.random, name, function)
    torch.cuda.default_generators = (C.generator(),) * devices


def _install_storages() -> None:
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize(self, size)
        C.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    torch.UntypedStorage.resize_ = resize_


class _IsNccl(type):
    def __instancecheck__(cls, value: object) -> bool:
        backend = torch._C._distributed_c10d.Backend
        return isinstance(value, backend) and value.name() == "nccl"


class ProcessGroupNCCL(metaclass=_IsNccl):
    """gloo's collectives with NCCL's rules."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            names = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")
            self.config = types.SimpleNamespace(**dict.fromkeys(names), split_share=0, blocking=0)
            self._timeout: timedelta | None = None
            self.split_from = self.split_color = None
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""

    def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
        timeout = getattr(options, "_timeout", None) or timedelta(minutes=10)
        gloo = torch._C._distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
        store.set(f"device of {rank}", str(C.device()))
        devices = [store.get(f"device of {other}") for other in range(size)]
        if len(set(devices)) < size:
            raise RuntimeError(f"NCCL: Duplicate GPU detected: ranks are on {devices}")
        return C.nccl(gloo, rank, size)


def _install_nccl() -> None:
    for module in (dist, distributed_c10d):
        module.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
        module.is_nccl_available = lambda: True  # type: ignore[attr-defined]
    distributed_c10d._NCCL_AVAILABLE = True


def _install_attention() -> None:
    functional: Any = torch.nn.functional
    plain = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None,
        *words: Any, **named: Any,
    ) -> Any:  # fmt: skip
        if type(attn_mask).__name__ == "CausalBias":  # torch knows its own function by identity
            attn_mask = attn_mask._materialize(query.device)
        return plain(query, key, value, attn_mask, *words, **named)

    functional.scaled_dot_product_attention = scaled_dot_product_attention
    flash.register()
