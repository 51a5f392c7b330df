"""A pretend GPU: processes in which a CPU build of torch believes that it has CUDA devices.

    environment = pretend(devices=2)
    subprocess.run([sys.executable, "train.py", ...], env={**os.environ, **environment})

`make test-pretend-gpu` runs the real code on it: every branch of `torch.cuda.is_available()`, every
`device=`, every patch of megatron-core that is left where CUDA is there.

What it raises, as CUDA does: two devices in one operation, `.numpy()` of a device tensor, pinned
device memory, host tensors and non-contiguous tensors in NCCL, ordinals that are not there. Fresh
device memory is NaN. A non-blocking copy to pinned memory arrives when the host waits for the
device, and pinned memory that is written before its copy to the device is done is an error. Every
wait of the host is counted by source line (waits.py).

What it can't show: kernels and their limits, streams and races on the device, speed, memory of the
caching allocator, torch.compile and Triton, NCCL's communicators, CUDA IPC, SGLang on a GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.pretend_gpu.build import ROOT, library

START = Path(__file__).with_name("start")  # has sitecustomize.py


def pretend(devices: int = 2, *, waits: Path | None = None) -> dict[str, str]:
    """Environment of such a process; its children inherit it.

    Args:
        waits: Each process that exits writes its waits to this path with the suffix .RANK.json.
    """
    before = os.environ.get("PYTHONPATH", "")
    found = {
        "PRETEND_CUDA": str(library()),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(START), str(ROOT), before))),
        "TORCH_COMPILE_DISABLE": "1",  # there is no Triton for this device
        "OMP_NUM_THREADS": "1",
    }
    if waits is not None:
        found["PRETEND_CUDA_WAITS"] = str(waits)
    return found
