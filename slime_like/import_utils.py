"""Functions of the user's own, named on the command line: ``module.function`` or ``path/to/file.py:function``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_function(path: str, flag: str) -> Callable[..., Any]:
    """Raises ValueError, naming `flag`, for a path that cannot be imported or does not name a callable."""
    file, colon, name = path.rpartition(":")
    if not colon:
        file, _, name = path.rpartition(".")
    if not file or not name:
        raise ValueError(f"{flag} {path!r}: must be module.function or path/to/file.py:function")
    try:
        module = _load_file(Path(file)) if file.endswith(".py") else importlib.import_module(file)
    except Exception as error:
        raise ValueError(
            f"{flag} {path!r}: cannot import {file!r}: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if function is None:
        there = sorted(
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        )
        raise ValueError(
            f"{flag} {path!r}: {file!r} has no {name!r}; its functions: {', '.join(there) or 'none'}"
        )
    if not callable(function):
        raise ValueError(
            f"{flag} {path!r}: {name!r} is a {type(function).__name__}, not a function"
        )
    return function


def _load_file(path: Path) -> ModuleType:
    """A file as a module of its own name, once in a process."""
    path = path.resolve()
    name = f"custom_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
