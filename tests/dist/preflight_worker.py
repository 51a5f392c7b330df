"""Workers of tests/dist/test_preflight.py: count the memory of a rank in a real run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor

from benchmarks.parity.cells import sizes_of
from benchmarks.parity.steps import parallel, settings, share, train_samples
from slime_like.megatron.backend import MegatronBackend
from slime_like.megatron.ops.attention import packed_rows
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.megatron.trained_network import TrainedNetwork
from slime_like.preflight.live_bytes import LiveBytes

TOKENS = 4096


def count(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """By layout: bytes by term on every rank, in the order of ranks."""
    found: dict[str, Any] = {}
    for name, (folder, flags) in arguments["layouts"].items():
        with parallel(**sizes_of(flags)) as layout:
            own = counted(folder, layout, flags)
            everywhere: list[Any] = [None] * world_size
            dist.all_gather_object(everywhere, own)
            found[name] = everywhere
    return found


def counted(folder: str, layout: ParallelLayout, flags: str) -> dict[str, int]:
    backend = MegatronBackend(settings(folder, flags), layout, total_steps=3)
    network = backend.policy
    assert isinstance(network, TrainedNetwork)
    kept = kept_bytes(network, layout)
    backend.update(share(train_samples(1), layout))
    buffers = [b for m in network.modules for b in (*m.buffers, *m.expert_parallel_buffers)]
    parameters = {id(p): p for chunk in network.chunks for p in chunk.parameters()}.values()
    weights = sum(b.param_data.nbytes for b in buffers if b.param_data is not None)
    main, moments = optimizer_tensors(network.optimizer)
    own = {p.untyped_storage().data_ptr() for p in parameters}
    return {
        "parameters": sum(p.numel() for p in parameters),
        "weights": weights or sum(p.nbytes for p in parameters),
        "gradients": sum(b.grad_data.nbytes for b in buffers),
        "main": sum(t.nbytes for t in main if t.untyped_storage().data_ptr() not in own),
        "moments": sum(t.nbytes for t in moments),
        "activations": kept,
    }


def optimizer_tensors(optimizer: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that torch's optimizers step, and the moments that they keep."""
    main, moments = [], []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            main += group["params"]
        for state in inner.state.values():
            moments += [state[key] for key in ("exp_avg", "exp_avg_sq")]
            main += [state["master_param"]] if "master_param" in state else []
    return main, moments


def kept_bytes(network: Any, layout: ParallelLayout) -> int:
    """Bytes of the storages that autograd saves of one micro-batch of one sequence, parameters left
    out. With recomputation, of all that are alive: megatron-core's checkpoint keeps rotary
    embeddings and random states, which autograd does not see."""
    module, config = network.modules[0].train(), network.config
    model = unwrap_model(module)
    rows = TOKENS // layout.cp_size
    tokens = torch.randint(61, (1, rows))
    if not model.pre_process:
        split = layout.tp_size if config.sequence_parallel else 1
        shape = (rows // split, 1, config.hidden_size)
        model.set_input_tensor(torch.randn(shape, dtype=config.params_dtype).requires_grad_())
    fixed = (*model.parameters(), *model.buffers())
    known = {t.untyped_storage().data_ptr() for t in fixed}
    held: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage
        return tensor

    lengths = torch.tensor([0, TOKENS], dtype=torch.int32)
    live = LiveBytes()
    live.ignore(fixed)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with live if config.recompute_granularity else hooks:
        output = module(
            input_ids=tokens,
            position_ids=torch.arange(rows)[None],
            attention_mask=None,
            packed_seq_params=packed_rows(lengths, layout.cp_size, layout.cp_rank),
        )
    assert output.requires_grad
    return live.now or sum(storage.nbytes() for storage in held.values())
