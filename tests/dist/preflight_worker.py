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
FEW_TOKENS = 64  # activations below the size of the gradient buffers


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
    # before the larger passes, after which megatron-core keeps their communication buffers
    peak = peak_bytes(network, layout)
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
        "peak": peak,
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
    config, model = network.config, unwrap_model(network.modules[0])
    fixed = (*model.parameters(), *model.buffers())
    known = {t.untyped_storage().data_ptr() for t in fixed}
    held: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage
        return tensor

    live = LiveBytes()
    live.ignore(fixed)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with live if config.recompute_granularity else hooks:
        output = forward(network, layout, TOKENS)
    assert output.requires_grad
    return live.now or sum(storage.nbytes() for storage in held.values())


def forward(network: Any, layout: ParallelLayout, tokens: int) -> Tensor:
    """The output of one micro-batch of one sequence."""
    module, config = network.modules[0].train(), network.config
    model = unwrap_model(module)
    rows = tokens // layout.cp_size
    lengths = torch.tensor([0, tokens], dtype=torch.int32)
    if not model.pre_process:
        split = layout.tp_size if config.sequence_parallel else 1
        shape = (rows // split, 1, config.hidden_size)
        model.set_input_tensor(torch.randn(shape, dtype=config.params_dtype).requires_grad_())
    output: Tensor = module(
        input_ids=torch.randint(61, (1, rows)),
        position_ids=torch.arange(rows)[None],
        attention_mask=None,
        packed_seq_params=packed_rows(lengths, layout.cp_size, layout.cp_rank),
    )
    return output


def peak_bytes(network: Any, layout: ParallelLayout) -> int:
    """The most bytes that a forward and backward pass allocate at a time, from the events of torch's
    allocator, which the preflight does not see."""
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = forward(network, layout, FEW_TOKENS)
        output.backward(torch.empty_like(output))
        del output
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    waiting = list(results.experimental_event_tree())
    sizes = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    now = most = 0
    for _, size in sorted(sizes, key=lambda item: item[0]):
        now += size
        most = max(most, now)
    for module in network.modules:
        module.zero_grad_buffer()
    return most
