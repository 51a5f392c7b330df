"""Stands in for torchvision, which SGLang imports for models that see. Names resolve; nothing
computes."""

from __future__ import annotations

from typing import Any, NoReturn

__version__ = "0.28.0"


class Missing:
    """Any class, function or submodule of the real one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing()

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "torchvision is not here; this is SGLang without a GPU (scripts/sglang_cpu)"
        )


def __getattr__(name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing()


from torchvision import io, transforms  # noqa: E402, F401
