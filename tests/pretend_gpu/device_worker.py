"""Work of the processes of test_device.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.pretend_gpu.waits import WAITS


def errors(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, str]:
    """What each forbidden thing says; empty where it says nothing."""
    a, host = torch.randn(3, 4, device="cuda"), torch.ones(3, 4)
    index = torch.tensor([0, 1])
    other = torch.ones(3, 4, device=f"cuda:{1 - rank}")
    forbidden = {
        "host and device": lambda: a + host,
        "two devices": lambda: a + other,
        "numpy": lambda: a.numpy(),
        "pinned device memory": lambda: a.pin_memory(),
        "host index of a kernel": lambda: a.index_select(0, index),
        "device index of a host tensor": lambda: host[index.cuda()],
        "no such device": lambda: torch.ones(1, device="cuda:2"),
        "host tensor in NCCL": lambda: dist.all_reduce(host, group=dist.new_group(backend="nccl")),
        "holes in NCCL": lambda: dist.all_reduce(a[:, ::2]),
        "random state of the device": lambda: torch.cuda.set_rng_state(
            torch.cuda.get_rng_state().cuda()
        ),
    }
    found = {}
    for name, action in forbidden.items():
        try:
            action()
            found[name] = ""
        except (RuntimeError, TypeError, ValueError) as error:
            found[name] = str(error)
    dist.barrier()
    return found


def late_copies(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Fresh memory, and copies that do not block."""
    fresh = torch.empty(4, device="cuda")
    value = torch.arange(4.0, device="cuda")
    host = torch.zeros(4, pin_memory=True)
    host.copy_(value, non_blocking=True)
    early = host.tolist()
    torch.cuda.synchronize()
    sent = torch.ones(4, pin_memory=True)
    sent.to("cuda", non_blocking=True)
    sent.zero_()
    try:
        torch.cuda.synchronize()
        written = ""
    except RuntimeError as error:
        written = str(error)
    return {
        "fresh": fresh.isnan().all().item(),
        "early": early,
        "late": host.tolist(),
        "written": written,
        "allocated": torch.cuda.memory_allocated() > 0,
    }


def waits(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, list[Any]]:
    """By what was done: kinds of waits that were counted."""
    a = torch.randn(4, device="cuda")
    mask = a > 0
    pinned, pageable = torch.ones(4, pin_memory=True), torch.ones(4)
    actions = {
        "item": lambda: a.sum().item(),
        "nonzero": lambda: mask.nonzero(),
        "mask": lambda: a[mask],
        "fill": lambda: a.__setitem__(mask, 0.0),
        "to the host": lambda: a.cpu(),
        "to the device": lambda: pageable.cuda(),
        "pinned, without a wait": lambda: pinned.to("cuda", non_blocking=True),
        "not pinned": lambda: pageable.to("cuda", non_blocking=True),
        "arithmetic": lambda: (a * 2 + 1).softmax(0).sum(),
    }
    found = {}
    for name, action in actions.items():
        WAITS.start()
        with WAITS.phase(name):
            action()
        found[name] = [[w.phase, w.kind, w.blocks, n] for w, n in WAITS.stop().items()]
    return found


def collectives(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Of device tensors over NCCL, of host tensors over gloo, in one default group."""
    local = torch.full((2,), float(rank + 1), device="cuda")
    total = local.clone()
    dist.all_reduce(total)
    gathered = torch.empty(4, device="cuda")
    dist.all_gather_into_tensor(gathered, local)
    parts = [torch.empty(n, device="cuda") for n in (1, 3)]  # uneven, as NCCL allows
    dist.all_gather(parts, torch.full((1 + 2 * rank,), float(rank), device="cuda"))
    share = torch.empty(1, device="cuda")
    dist.reduce_scatter_tensor(share, local * torch.tensor([1.0, 10.0], device="cuda"))
    host = torch.tensor(float(rank + 1))
    dist.all_reduce(host)
    return {
        "total": total.tolist(),
        "gathered": gathered.tolist(),
        "parts": [part.tolist() for part in parts],
        "share": share.tolist(),
        "host": float(host),
        "device": str(local.device),
    }
