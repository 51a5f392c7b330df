"""Transformer Engine's real Python over a stand-in for its compiled extension: megatron-core builds
its layers from it, they compute what they should (engine_layers.py), and its Adam steps. `start`
comes before megatron-core is imported, in a process of the pretend GPU."""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import itertools
import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

FOLDER = "PRETEND_TE"  # variable: where the package is, of make te-python
DISTRIBUTIONS = ("transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")
# imported by Transformer Engine for what is not run here
ABSENT = ("onnxscript", "onnx", "triton", "einops", "nvdlfw_inspect")


_NUMBERS = itertools.count(1)


class _Values(type):
    """Every attribute of such a class is a distinct number."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = next(_NUMBERS)
        setattr(cls, name, value)
        return value


class _Anything(metaclass=_Values):
    def __init__(self, *words: Any, **named: Any) -> None: ...


class _Extension(ModuleType):
    """transformer_engine_torch: classes by capital letters, and functions that fail when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            made: Any = _Values(name, (_Anything,), {})
        else:

            def made(*words: Any, **named: Any) -> Any:
                raise RuntimeError(f"transformer_engine_torch.{name} is not here")

        setattr(self, name, made)
        return made


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = mock.MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        module.__version__ = "3.4.0"
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def adam(
    chunk: int, skip: Tensor, lists: list[list[Tensor]], rate: float, beta1: float, beta2: float,
    eps: float, step: int, mode: int, bias_correction: int, decay: float, *more: Any,
) -> None:  # fmt: skip
    """multi_tensor_adam: gradients, parameters, moments (and main parameters, which are updated in
    place of the parameters and copied into them)."""
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1, 1)
    for gradient, parameter, first, second, *main in zip(*lists, strict=True):
        target = main[0] if main else parameter
        g = gradient.float()
        first.mul_(beta1).add_(g, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        update = (first / corrections[0]) / ((second / corrections[1]).sqrt() + eps)
        target.sub_(rate * (update + decay * target if mode == 1 else update))
        if main:
            parameter.copy_(target)


def l2norm(
    chunk: int, skip: Tensor, lists: list[list[Tensor]], *more: Any
) -> tuple[Tensor, Tensor | None]:
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return torch.linalg.vector_norm(norms).reshape(1), None


def scale(chunk: int, skip: Tensor, lists: list[list[Tensor]], factor: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


def _mirrored(file: Path, name: str) -> enum.EnumMeta:
    """An enumeration of the extension, of which the Python file has a copy that must agree."""
    members = re.findall(rf"= int\({re.escape(name)}\.(\w+)\)", file.read_text(encoding="utf-8"))
    return enum.IntEnum(name.rpartition(".")[2], {member: i for i, member in enumerate(members)})


def start() -> None:
    """Import it, with an Adam that steps."""
    # these look for the absent packages themselves, and must not find them
    import torch._dynamo.repro.after_dynamo
    import torch._functorch.aot_autograd
    import torch._inductor.compile_fx
    import torch.utils.flop_counter

    torch.compile(lambda x: x)
    folder = Path(os.environ[FOLDER])
    sys.path.append(str(folder))
    extension: Any = _Extension("transformer_engine_torch")
    package = folder / "transformer_engine" / "pytorch"
    extension.DType = _mirrored(package / "constants.py", "tex.DType")
    extension.NVTE_Fused_Attn_Backend = _mirrored(
        package / "cpp_extensions" / "fused_attn.py", "NVTE_Fused_Attn_Backend"
    )
    extension.__spec__ = importlib.machinery.ModuleSpec("transformer_engine_torch", None)
    extension.__file__ = "stand-in"
    extension.multi_tensor_adam = adam
    extension.multi_tensor_l2norm = l2norm
    extension.multi_tensor_scale = scale
    sys.modules["transformer_engine_torch"] = extension
    version = metadata.version
    own = version("transformer-engine")
    metadata.version = lambda name: (  # type: ignore[assignment]
        own if name.lower().replace("_", "-") in DISTRIBUTIONS else version(name)
    )
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # it does not load its shared objects then
    sys.meta_path.append(_Absent())
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch

    from tests.pretend_gpu.engine_layers import replace_kernels

    replace_kernels()
