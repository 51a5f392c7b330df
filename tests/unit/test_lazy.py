"""slime_like/lazy.py and arguments/cuda.py: what stands in for torch until it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed

from arguments import cuda
from slime_like import lazy


def test_the_first_use_imports_torch() -> None:
    code = (
        "import sys\n"
        "from slime_like.losses import compute_policy_loss\n"
        "from slime_like.lazy import dist, torch\n"
        "before = 'torch' in sys.modules\n"
        "assert torch.zeros(2).tolist() == [0, 0] and not dist.is_initialized()\n"
        "print(before, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_it_sees_what_the_module_holds_now(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lazy.torch.float32 is torch.float32 and lazy.dist.ReduceOp is torch.distributed.ReduceOp
    assert lazy.torch.zeros is torch.zeros
    monkeypatch.setattr(torch, "zeros", torch.ones)  # megatron_patches replace functions of torch
    assert lazy.torch.zeros is torch.ones
    with pytest.raises(AttributeError, match="bogus_name"):
        getattr(lazy.torch, "bogus_name")  # noqa: B009


def test_cuda_is_found_where_torch_finds_it() -> None:
    assert cuda.cuda_available() == torch.cuda.is_available()


def test_the_build_of_torch_is_read_from_its_file() -> None:
    build = cuda._torch_build()
    assert (build["__version__"], build["cuda"]) == (torch.__version__, torch.version.cuda)
