"""A probe of CUDA IPC handles when a run starts. Containers without a shared /dev/shm or PID
namespace, expandable segments of torch's allocator, another torch in the servers and GPUs under
other numbers break them, and the first update would be too late to say so."""

from __future__ import annotations

import logging
import os
import subprocess

import torch

from slime_like.distributed.collectives import gather, is_rank_zero
from slime_like.sglang.tensor_bucket import tensor_update
from slime_like.weights.buckets import in_buckets

logger = logging.getLogger(__name__)
NUMBERS = 1024
LIMIT_S = 120.0  # the other process imports torch and initialises the GPU
OPEN = """
import base64, pickle, sys, torch
content = pickle.loads(base64.b64decode(sys.stdin.read()))
print(float(content["flattened_tensor"].view(torch.float32).double().sum()))
"""


def without_broken_handles(transport: str, python: str, device: torch.device) -> str:
    """`transport`, or "tensor" with a warning if it is "cuda_ipc" and a process of some node cannot
    open a handle. Collective over all ranks.

    python: the servers' interpreter.
    """
    if transport != "cuda_ipc":
        return transport
    # the first rank of a node sends to the servers there
    sends = os.environ.get("LOCAL_RANK", "0") == "0"
    reasons = filter(None, gather(why_no_handles(python, device) if sends else ""))
    reason = next(reasons, "")
    if not reason:
        return transport
    if is_rank_zero():
        logger.warning(
            f"--update-weight-transport cuda_ipc: another process cannot open memory of {device} "
            f"({reason}); weights go to the servers as bytes (tensor), which is slow"
        )
    return "tensor"


def why_no_handles(python: str, device: torch.device) -> str:
    """Why another process cannot open a handle of this one's memory on `device`, as a server opens
    those of an update; empty if it can."""
    weight = torch.arange(NUMBERS, device=device, dtype=torch.float32)
    (bucket,) = in_buckets(iter([("probe", weight)]), weight.nbytes)
    try:
        (entry,) = tensor_update(bucket, bucket.flat, 0, 1)["serialized_named_tensors"]
        done = subprocess.run(
            [python, "-c", OPEN],
            input=entry,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {LIMIT_S:g} s"
    except (RuntimeError, OSError) as error:
        return str(error).splitlines()[0]
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    if done.stdout.strip() != str(float(NUMBERS * (NUMBERS - 1) // 2)):
        return f"it reads {done.stdout.strip()[:40]} there"
    return ""
