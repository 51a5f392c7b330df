"""Tracks live tensor memory and collective traffic while modules run: on the meta device in a
preflight, on the CPU in tests that compare both."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@dataclass(slots=True)
class MemoryTraffic:
    """One kind of collective in one group."""

    calls: int = 0  # their number
    bytes: int = 0  # the larger of a rank's input and output, summed over calls


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that tracks memory and communication."""

    def __init__(self, groups: Mapping[int, str] | None = None, topk: int = 0) -> None:
        """
        Args:
            groups: Id of a process group -> its name in `traffic`; see `group_key`.
            topk: Experts per token, since a router on the meta device cannot choose.
        """
        super().__init__()
        self.now = self.peak = 0  # bytes of live storages that were created in this mode
        # by (collective, name of the group)
        self.traffic: dict[tuple[str, str], MemoryTraffic] = defaultdict(MemoryTraffic)
        self._groups = groups or {}
        self._tracked: set[int] = set()
        self._topk = topk

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self._count_traffic(func, args)
        elif func is torch.ops.aten.masked_select.default and args[0].is_meta:
            mask = args[1]  # a router's [experts, tokens]
            return self._track(args[0].new_empty(self._topk * mask.size(1)))
        named = dict(kwargs or {})
        if func is torch.ops.aten.new_empty.default and args[0].is_meta:
            named["device"] = args[0].device  # megatron-core requests the current device
        return self._track(func(*args, **named))

    def _track(self, result: object) -> object:
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._tracked:
                    self._tracked.add(key)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._release, key, storage.nbytes())
        return result

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Exclude tensors that exist outside of this mode, such as parameters and gradient buffers,
        which enter through views and as results of in-place operations."""
        for tensor in tensors:
            self._tracked.add(tensor.untyped_storage()._cdata)

    def _release(self, key: int, size: int) -> None:
        self._tracked.discard(key)
        self.now -= size

    def _count_traffic(self, func: Any, args: Sequence[object]) -> None:
        name = func.__name__.split(".")[0].strip("_")
        sizes = [_bytes(arg) for arg in args]
        group = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        if group is None or "barrier" in name:
            return
        process_group = dist.ProcessGroup.unbox(group)
        if process_group.size() > 1:
            traffic = self.traffic[name, self._groups.get(group_key(process_group), "other")]
            traffic.calls += 1
            traffic.bytes += max(sizes)


def group_key(group: dist.ProcessGroup) -> int:
    """An id that is equal for all handles of a group."""
    return hash(group.group_name)


def _bytes(arg: object) -> int:
    return sum(t.nbytes for t in tree_iter(arg) if isinstance(t, Tensor))
