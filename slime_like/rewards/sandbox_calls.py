"""Tests of a program in a process of their own, in which no text of the model runs.

Where a test ran in the program's process, the program could write its verdict: by the stack, the
garbage collector or an `__eq__` that is always true. Here the program's process (`serve`) only
answers calls, and the test's process (`run_test`) sees plain data: numbers, texts, containers of
exact types, which it builds itself. Other objects stay with the program, as a `Remote`, and never
equal data. Both processes are children of the same sandbox. Standard library only.

Frames on both pipes: 8 bytes of length, then JSON. A test's request is ``[verb, ...]``; the reply
is ``["value", value, arguments after the call, printed text]``, ``["raised", names of the
exception's classes, message, printed text]``, or a request to call a function of the test, which is
answered first.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
import importlib
import io
import json
import os
import struct
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_HEADER = struct.Struct("<Q")
_MAX_FRAME = 2**27  # bytes
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
# values that are made from texts or numbers
_SCALARS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, lambda v: v.decode("latin1"), lambda v: v.encode("latin1")),
    "bytearray": (bytearray, lambda v: v.decode("latin1"), lambda v: bytearray(v, "latin1")),
    "complex": (complex, lambda v: [v.real, v.imag], lambda v: complex(*v)),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
    "datetime": (datetime.datetime, str, datetime.datetime.fromisoformat),
    "date": (datetime.date, str, datetime.date.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda v: datetime.timedelta(*v),
    ),
    "range": (range, lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
}


class Channel:
    """Both ends of the pipes to the other process, and the objects that it may name."""

    def __init__(self, reader: int, writer: int) -> None:
        self.reader, self.writer = reader, writer
        self.objects: list[Any] = []

    def send(self, message: object) -> None:
        body = json.dumps(message).encode()
        data = _HEADER.pack(len(body)) + body
        while data:
            data = data[os.write(self.writer, data) :]

    def receive(self) -> Any:
        """The next message. Raises EOFError at the end of the other process."""
        (size,) = _HEADER.unpack(self._read(_HEADER.size))
        if size > _MAX_FRAME:
            raise EOFError("a message is too large")
        return json.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self.reader, min(size, 2**20))
            if not part:
                raise EOFError("the program has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def encode(self, value: Any) -> Any:
        """A value as JSON: data, or the number of an object that stays in this process."""
        if value is None or type(value) in (bool, str, float):
            return value
        if isinstance(value, int):
            return int(value)
        for name, (kind, encode, _) in _SCALARS.items():
            if type(value) is kind:
                return {name: encode(value)}
        for name in _SEQUENCES:
            sequence: Any = getattr(builtins, name, collections.deque)
            if type(value) is sequence or (sequence is tuple and isinstance(value, tuple)):
                return {name: [self.encode(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        if isinstance(value, str):  # of a subclass
            return str.__str__(value)
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if isinstance(value, Remote):
            return {"yours": value._number}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": _names(value), "number": self._keep(value)}
        return {"object": self._keep(value)}

    def _keep(self, value: object) -> int:
        self.objects.append(value)
        return len(self.objects) - 1


def _names(kind: type) -> list[str]:
    """Names of an exception's class and its bases."""
    return [each.__name__ for each in kind.__mro__ if issubclass(each, BaseException)]


# --- the program's process -------------------------------------------------------------------


def serve(program: str, reader: int, writer: int) -> None:
    """Run the program, then answer calls until the test ends."""
    channel = Channel(reader, writer)
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    exec(compile(program, "program.py", "exec"), names)
    sys.stdout.flush()
    public = {k: channel.encode(v) for k, v in names.items() if not k.startswith("__")}
    channel.send(public)
    with contextlib.suppress(EOFError):
        while True:
            _answer(channel, channel.receive())


def _answer(channel: Channel, request: list[Any]) -> None:
    """Answer one request of the test."""
    printed = io.StringIO()
    arguments: list[Any] = []
    try:
        with contextlib.redirect_stdout(printed):
            verb, number, *rest = request
            if verb == "call":
                arguments = [_decode_own(channel, each) for each in rest[0]]
                named = {k: _decode_own(channel, v) for k, v in rest[1].items()}
                result = channel.objects[number](*arguments, **named)
                arguments += named.values()
            else:
                values = [_decode_own(channel, each) for each in rest]
                result = _VERBS[verb](channel.objects[number], *values)
        changed = [channel.encode(each) for each in arguments if type(each) in _MUTABLE]
        channel.send(["value", channel.encode(result), changed, printed.getvalue()])
    except BaseException as error:
        names = _names(type(error))
        channel.send(["raised", names, _message(error), printed.getvalue()])


_MUTABLE = (list, dict, set, bytearray, collections.deque)
_VERBS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "item": lambda value, key: value[key],
    "put": lambda value, key, item: value.__setitem__(key, item),
    "delete": lambda value, key: value.__delitem__(key),
    "iter": iter,
    "next": next,
    "len": len,
    "str": str,
    "repr": repr,
    "bool": bool,
    "hash": hash,
    "same": lambda value, other: bool(value == other),
    "less": lambda value, other: bool(value < other),
    "isinstance": lambda value, other: isinstance(other, value),
    "enter": lambda value: value.__enter__(),
    "leave": lambda value: value.__exit__(None, None, None),
    "add": lambda value, other: value + other,
    "subtract": lambda value, other: value - other,
    "multiply": lambda value, other: value * other,
}


def _message(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except Exception:
        return ""


def _decode_own(channel: Channel, value: Any) -> Any:
    """A value of the test: its data, its functions, and our own objects."""

    def other(name: str, content: Any) -> Any:
        if name == "yours":
            return channel.objects[content]

        def call(*arguments: Any, **named: Any) -> Any:
            given = [channel.encode(each) for each in arguments]
            channel.send(["call", content, given, {k: channel.encode(v) for k, v in named.items()}])
            return _decode_own(channel, channel.receive())

        return call

    return _decode(value, other)


# --- the test's process ----------------------------------------------------------------------


def run_test(check: str, reader: int, writer: int) -> None:
    """Run the statements with the program's names, except those that would replace a built-in
    function or a module of the library. Raises what they raise, and EOFError if the program has
    ended."""
    test = _Test(Channel(reader, writer))
    offered = test.channel.receive()
    code = compile(check, "check.py", "exec")
    used = {node.id for node in ast.walk(ast.parse(check)) if isinstance(node, ast.Name)}
    shadows = {name for name in offered if hasattr(builtins, name)}
    if used & offered.keys() - shadows:  # otherwise it is a function of such a name that is tested
        offered = {name: value for name, value in offered.items() if name not in shadows}
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    for name, value in offered.items():
        is_module = name in used and name in sys.stdlib_module_names
        names[name] = importlib.import_module(name) if is_module else test.decode(value)
    exec(code, names)


class _Test:
    """The test's view of the program."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._exceptions: dict[str, type[BaseException]] = {}

    def ask(self, verb: str, number: int, *values: Any) -> Any:
        return self._ask([verb, number, *map(self.channel.encode, values)])

    def call(self, number: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = [*arguments, *named.values()]
        return self._ask(
            [
                "call",
                number,
                [self.channel.encode(each) for each in arguments],
                {name: self.channel.encode(each) for name, each in named.items()},
            ],
            [each for each in given if type(each) in _MUTABLE],
        )

    def _ask(self, request: list[Any], mutable: list[Any] | None = None) -> Any:
        self.channel.send(request)
        while (reply := self.channel.receive())[0] == "call":
            function = self.channel.objects[reply[1]]
            arguments = [self.decode(each) for each in reply[2]]
            named = {name: self.decode(each) for name, each in reply[3].items()}
            self.channel.send(self.channel.encode(function(*arguments, **named)))
        kind, value, rest, printed = reply
        sys.stdout.write(printed)
        if kind == "raised":
            raise self._exception(value)(rest)
        for target, changed in zip(mutable or (), rest):
            _replace_content(target, self.decode(changed))
        return self.decode(value)

    def decode(self, value: Any) -> Any:
        return _decode(value, self._decode_other)

    def _decode_other(self, name: str, content: Any) -> Any:
        if name == "yours":
            return self.channel.objects[content]
        if name == "module":
            return importlib.import_module(content) if content in sys.stdlib_module_names else None
        if name == "exception":
            return self._exception(content)
        return Remote(self, content)

    def _exception(self, names: list[str]) -> type[BaseException]:
        """A class of this process for an exception of the program: a built-in one, or a subclass of
        the nearest."""
        known = getattr(builtins, names[0], None)
        if isinstance(known, type) and issubclass(known, BaseException):
            return known
        if names[0] not in self._exceptions:
            base = self._exception(names[1:]) if names[1:] else Exception
            self._exceptions[names[0]] = type(names[0], (base,), {})
        return self._exceptions[names[0]]


def _replace_content(target: Any, content: Any) -> None:
    """Give a container of the test the content that the program left in it."""
    if type(target) is not type(content):
        return
    if isinstance(target, list | bytearray):
        target[:] = content
    else:
        target.clear()
        (target.extend if isinstance(target, collections.deque) else target.update)(content)


class Remote:
    """An object of the program. Only compared with another one, by the program."""

    def __init__(self, test: _Test, number: int) -> None:
        self.__dict__.update(_test=test, _number=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._test.call(self._number, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return self._test.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._test.ask("set", self._number, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._test.ask("same", self._number, other) is True

    def __instancecheck__(self, instance: object) -> bool:
        return self._test.ask("isinstance", self._number, instance) is True

    def __bool__(self) -> bool:
        return self._test.ask("bool", self._number) is True

    def __iter__(self) -> Iterator[Any]:
        iterator = self._test.ask("iter", self._number)
        return iterator if isinstance(iterator, Remote) else iter(iterator)

    def __contains__(self, item: Any) -> bool:
        return any(each == item for each in self)  # the program does not see what is looked for


def _asking(verb: str) -> Callable[..., Any]:
    def method(self: Remote, *values: Any) -> Any:
        return self._test.ask(verb, self._number, *values)

    return method


def _asking_of_two(verb: str) -> Callable[..., Any]:
    """An operation on two objects of the program. With data of the test it would show the program
    what is expected, and let it decide."""

    def method(self: Remote, other: object) -> Any:
        if not isinstance(other, Remote):
            return NotImplemented
        return self._test.ask(verb, self._number, other)

    return method


for _name, _verb in {
    "__next__": "next",
    "__len__": "len",
    "__getitem__": "item",
    "__setitem__": "put",
    "__delitem__": "delete",
    "__str__": "str",
    "__repr__": "repr",
    "__hash__": "hash",
    "__enter__": "enter",
}.items():
    setattr(Remote, _name, _asking(_verb))
for _name, _verb in {
    "__lt__": "less",
    "__add__": "add",
    "__sub__": "subtract",
    "__mul__": "multiply",
}.items():
    setattr(Remote, _name, _asking_of_two(_verb))


def _leave(self: Remote, *error: object) -> None:
    self._test.ask("leave", self._number)


Remote.__exit__ = _leave  # type: ignore[attr-defined]


def _decode(value: Any, other: Callable[[str, Any], Any]) -> Any:
    """Data from JSON; `other` decodes what is none."""
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("no value of a program")
        return value
    name, content = next(iter(value.items()))
    if name in _SEQUENCES:
        return _SEQUENCES[name]([_decode(item, other) for item in content])
    if name in _SCALARS:
        return _SCALARS[name][2](content)
    if name == "dict":
        return {_decode(k, other): _decode(v, other) for k, v in content}
    return other(name, content)
