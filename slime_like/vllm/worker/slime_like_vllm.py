"""Weight updates inside vLLM's workers: --worker-extension-cls slime_like_vllm.WeightUpdates.

vLLM imports this file in its own environment, with this folder on PYTHONPATH, so it imports only
what vLLM has. A trainer calls the methods over /collective_rpc, which runs them on every rank of a
server. Between `slime_like_begin` and `slime_like_end` weights arrive in buckets, as names, dtypes,
shapes and bytes one after the other; vLLM loads them layer by layer into the tensors that it
computes with (`initialize_layerwise_reload`, vLLM 0.32: loading them alone would not reach
weights that a kernel has packed, as those of linear layers on a CPU).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

JOIN_S = 300  # time limit of a process group


class WeightUpdates:
    """Mixed into vLLM's worker. The prefix keeps the names apart from the worker's own."""

    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any

    def slime_like_begin(self) -> None:
        """Begin an update; one that was left open, by a trainer that is gone, ends first."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if getattr(self, "_slime_like_open", False):
            self.slime_like_end()
        model = self.model_runner.get_model()
        initialize_layerwise_reload(model)
        self._slime_like_kernels = _without_cpu_expert_kernels(model)
        self._slime_like_open = True

    def slime_like_end(self) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._slime_like_open = False
        model = self.model_runner.get_model()
        with self._slime_like_config():
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            for method, kernel in self._slime_like_kernels:
                if method.moe_kernel is None:  # its layer got no weights
                    method.moe_kernel = kernel
            for layer in model.modules():
                # An output layer tied to the embedding has no weights of its own to load, so vLLM
                # does not process it again; on a CPU it computes with a packed copy.
                if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
                    layer.quant_method.process_weights_after_loading(layer)
        self.model_runner.reset_lora_state()

    def slime_like_load_folder(self, folder: str) -> None:
        """The safetensors files of a folder, as one update."""
        from safetensors import safe_open

        def stored() -> Iterator[tuple[str, torch.Tensor]]:
            for path in sorted(Path(folder).glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    for name in list(file.keys()):
                        yield name, file.get_tensor(name)

        self.slime_like_begin()
        self._slime_like_load(stored())
        self.slime_like_end()

    def slime_like_load_bytes(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], data: str
    ) -> None:
        """A bucket. data: its bytes as base64."""
        flat = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
        self._slime_like_load(_views(flat, names, dtypes, shapes))

    def slime_like_join(
        self, name: str, address: str, port: int, first_rank: int, world: int, backend: str
    ) -> None:
        """Join a process group in which the trainer is rank 0. first_rank: of this server."""
        from torch.distributed import distributed_c10d as c10d

        limit = timedelta(seconds=JOIN_S)
        store = dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
        make: Any = c10d._new_process_group_helper
        group, _ = make(
            world,
            first_rank + self.rank,
            [],
            c10d.Backend(backend),
            dist.PrefixStore(name, store),
            group_name=name,
            timeout=limit,
        )
        c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
        self._slime_like_groups()[name] = group

    def slime_like_leave(self, name: str) -> None:
        group = self._slime_like_groups().pop(name, None)
        if group is not None:
            group.abort()
            dist.destroy_process_group(group)

    def slime_like_receive(
        self, group: str, names: list[str], dtypes: list[str], shapes: list[list[int]]
    ) -> None:
        """A bucket that the trainer broadcasts."""
        sizes = [_nbytes(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        dist.broadcast(flat, src=0, group=self._slime_like_groups()[group])
        self._slime_like_load(_views(flat, names, dtypes, shapes))

    def _slime_like_load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        if not getattr(self, "_slime_like_open", False):
            raise RuntimeError("no weight update is open")
        with self._slime_like_config():
            self.model_runner.get_model().load_weights(weights)

    def _slime_like_config(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)

    def _slime_like_groups(self) -> dict[str, Any]:
        if not hasattr(self, "_slime_like_joined"):
            self._slime_like_joined: dict[str, Any] = {}
        return self._slime_like_joined


def _without_cpu_expert_kernels(model: Any) -> list[tuple[Any, Any]]:
    """Takes the kernels of experts on a CPU away, for the end of an update to make them again:
    vLLM packs the weights of experts only where it makes the kernel, and keeps one that it has
    (`UnquantizedFusedMoEMethod._setup_kernel`), so an update would leave them unpacked. Returns
    (method, kernel) of each layer."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return []
    kernels: list[tuple[Any, Any]] = []
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            kernels.append((method, method.moe_kernel))
    for method, _ in kernels:
        method.moe_kernel = None
    return kernels


def _nbytes(dtype: str, shape: list[int]) -> int:
    return int(torch.Size(shape).numel() * getattr(torch, dtype).itemsize)


def _views(
    flat: torch.Tensor, names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a bucket."""
    start = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        end = start + _nbytes(dtype, shape)
        part = flat[start:end]
        if start % getattr(torch, dtype).itemsize:  # a view must be aligned
            part = part.clone()
        yield name, part.view(getattr(torch, dtype)).reshape(shape)
        start = end
