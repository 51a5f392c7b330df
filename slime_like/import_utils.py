"""Import user functions and modules named on the command line: ``module.function`` or
``path/to/file.py:function``."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from slime_like import slime_modules
from slime_like.errors import RunError
from slime_like.registry import registering_for
from slime_like.text import clean, did_you_mean

IMPORT_LIMIT_S = 60.0
MODULE_LIMIT_S = 600.0  # generous: interrupting an import of torch half-way breaks it


class ExitCalled(RunError):
    """User code called sys.exit, which would end the run, perhaps with status 0."""


def absolute(path: str) -> str:
    """The same function, whatever the working folder. path: see `load_function`."""
    file, colon, name = path.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if colon and file.endswith(".py") else path


def takes_args(function: Callable[..., object]) -> bool:
    """Whether a function that makes responses is in slime's convention: its first parameter is
    called ``args``."""
    return next(iter(inspect.signature(function).parameters), None) == "args"


def load_function(
    path: str, flag: str, *, limit_s: float = IMPORT_LIMIT_S, may_exit: bool = False
) -> Callable[..., Any]:
    """Load the function that `path` names. Calls of sys.exit inside it become `ExitCalled`.

    Args:
        path: ``module.function`` or ``path/to/file.py:function``. A file may import its neighbours.
        flag: The flag to name in errors.
        limit_s: Time limit of the import in seconds; enforced in the main thread only.
        may_exit: The caller handles SystemExit itself.

    Raises:
        ValueError: The path cannot be imported (including a module that calls sys.exit), or it is
            not callable.
    """
    file, colon, name = path.rpartition(":")
    if not colon and path.endswith(".py"):
        functions = _functions_of(_load(path, flag, path, limit_s))
        example = functions[0] if len(functions) == 1 else "FUNCTION"
        raise ValueError(
            f"{flag} {path!r}: name the function after a colon: {path}:{example}; its functions: "
            f"{', '.join(functions) or 'none'}"
        )
    if not colon:
        file, _, name = path.rpartition(".")
    if not file or not name:
        raise ValueError(f"{flag} {path!r}: must be module.function or path/to/file.py:function")
    module = _load(file, flag, path, limit_s)
    function = getattr(module, name, None)
    if function is None:
        functions = _functions_of(module)
        raise ValueError(
            f"{flag} {path!r}: {file!r} has no {name!r}{did_you_mean(name, functions)}; its "
            f"functions: {', '.join(functions) or 'none'}"
        )
    if not callable(function):
        raise ValueError(
            f"{flag} {path!r}: {name!r} is a {type(function).__name__}, not a function"
        )
    return function if may_exit else _without_exit(function)


def _functions_of(module: ModuleType) -> list[str]:
    """Names of the functions and classes that a module defines itself."""
    return sorted(
        name
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    )


def exit_called(error: SystemExit) -> ExitCalled:
    """The error to raise for a SystemExit, naming the line that called sys.exit."""
    code = "" if error.code is None else clean(repr(error.code), 100)
    return ExitCalled(
        f"sys.exit({code}) was called{_place(error)}; raise an exception instead to end the run"
    )


def _without_exit(function: Callable[..., object]) -> Callable[..., object]:
    """Wrap a function so that sys.exit raises `ExitCalled`. Classes and other callables are
    returned unchanged."""
    if inspect.iscoroutinefunction(function):

        async def called_later(*positional: object, **named: object) -> object:
            try:
                return await function(*positional, **named)
            except SystemExit as error:
                _raise(error)

        return functools.wraps(function)(called_later)
    if not inspect.isfunction(function) or inspect.isasyncgenfunction(function):
        return function

    def called(*positional: object, **named: object) -> object:
        try:
            return function(*positional, **named)
        except SystemExit as error:
            _raise(error)

    return functools.wraps(function)(called)


def _raise(error: SystemExit) -> NoReturn:
    raise exit_called(error).with_traceback(error.__traceback__) from error


def load_module(path: str, flag: str, *, limit_s: float = MODULE_LIMIT_S) -> None:
    """Import a user module for its registrations (losses, rewards, ...).

    Args:
        path: ``package.module`` or ``path/to/file.py``. A file may import its neighbours.
        flag: The flag to name in errors.
        limit_s: Time limit of the import in seconds; enforced in the main thread only.

    Raises:
        ValueError: It cannot be imported, or it registers a name that is taken.
    """
    source = str(Path(path).resolve()) if path.endswith(".py") else path
    with registering_for(source):
        _load(path, flag, path, limit_s)


def _load(file: str, flag: str, path: str, limit_s: float) -> ModuleType:
    """The module in `file`; `path` is what errors show. Raises ValueError."""
    slime_modules.provide()
    try:
        with _deadline(limit_s):
            return _load_file(Path(file)) if file.endswith(".py") else importlib.import_module(file)
    except (Exception, SystemExit) as error:
        reason = clean(f"{type(error).__name__}: {error}")
        raise ValueError(
            f"{flag} {path!r}: cannot import {file!r}: {reason}{_place(error)}"
        ) from error


@contextlib.contextmanager
def _deadline(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `limit_s` seconds. It is a signal: it works in the main
    thread only, and does not interrupt native code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"the import takes longer than {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    others = signal.setitimer(signal.ITIMER_REAL, limit_s)  # the caller's timer, or zeros
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *others)
        signal.signal(signal.SIGALRM, before)


def _place(error: BaseException) -> str:
    """`` (file:line)`` of the last traceback frame outside importlib, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [
        f" ({frame.filename}:{frame.lineno})"
        for frame in frames
        if frame.filename != __file__ and not frame.filename.startswith(("<", sys.base_prefix))
    ]
    return places[-1] if places else ""


def _load_file(path: Path) -> ModuleType:
    """Import a file as a module, once per process. Its folder is appended to sys.path, so that it
    can import the files next to it."""
    path = path.resolve()
    name = f"custom_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
