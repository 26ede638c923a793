"""Calls between the tests' process and the solution's; used by :mod:`rollcast_rewards._sandbox_server`.

The tests run in one process and the model's program in another; a socket joins them. What crosses is plain data, which
either side makes anew with the exact built-in type, and references. A reference to an object of the solution becomes a
:class:`Remote`, which passes calls and reads on, but never compares or calculates: an object of the solution can
not pretend to equal the expected value. Of the tests, the solution only sees the functions that they pass to it, which
it can call and not inspect.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import datetime as dt
import decimal
import fractions
import importlib
import io
import json
import operator
import os
import re
import struct
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["Remote", "run_tests", "serve_solution"]

CHANNEL = 3
_HEADER = struct.Struct("!I")
_LARGEST = 1 << 28
_LARGE_INTEGER = 1 << 1000
_WORD = re.compile(r"[^\W\d]\w*")
#: Helpers that many tests use without importing them; the solution does not get to define them.
_HELPERS = {"isclose": ("math", "isclose"), "deepcopy": ("copy", "deepcopy")}
_ALIASES = {"np": "numpy", "pd": "pandas"}
_TEXTUAL: dict[str, type] = {
    f"{kind.__module__}.{kind.__name__}": kind
    for kind in (decimal.Decimal, fractions.Fraction, dt.date, dt.datetime, dt.time)
}
_SEQUENCES: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "iterator": iter,
}
_MAPPINGS: dict[str, Any] = {
    "dict": dict,
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **keywords: function(*arguments, **keywords),
    "get": getattr,
    "set": setattr,
    "bool": bool,
    "len": len,
    "str": str,
    "repr": repr,
    "item": operator.getitem,
    "set item": operator.setitem,
    "delete item": operator.delitem,
    "iter": iter,
    "next": next,
    "is a": lambda kind, value: isinstance(value, kind),
}
#: Calls whose arguments may change.
_CHANGING = ("call", "set item")


class CrossingError(TypeError):
    """A value that cannot cross between the tests and the solution, or a malformed message."""


class Remote:
    """A reference to an object of the other process, which performs calls and reads there."""

    __slots__ = ("__weakref__", "_channel", "_number")

    def __init__(self, channel: _Channel, number: int) -> None:
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_number", number)

    def _ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        channel: _Channel = object.__getattribute__(self, "_channel")
        return channel.request(operation, self, arguments, keywords)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return Remote._ask(self, "call", *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return Remote._ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        Remote._ask(self, "set", name, value)

    def __bool__(self) -> bool:
        return Remote._ask(self, "bool") is True

    def __len__(self) -> int:
        length: int = Remote._ask(self, "len")
        return length

    def __str__(self) -> str:
        text: str = Remote._ask(self, "str")
        return text

    def __repr__(self) -> str:
        text: str = Remote._ask(self, "repr")
        return text

    def __getitem__(self, key: Any) -> Any:
        return Remote._ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        Remote._ask(self, "set item", key, value)

    def __delitem__(self, key: Any) -> None:
        Remote._ask(self, "delete item", key)

    def __iter__(self) -> Iterator[Any]:
        iterator = Remote._ask(self, "iter")
        return iterator if type(iterator) is Remote else iter(iterator)

    def __next__(self) -> Any:
        return Remote._ask(self, "next")

    def __contains__(self, value: Any) -> bool:
        raise CrossingError("an object of the solution cannot decide whether it contains a value; list() it first")

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Remote and Remote._ask(self, "is a", value) is True

    def __eq__(self, other: object) -> bool:
        if type(other) is Remote and other is not self:
            raise CrossingError("objects of the solution cannot be compared; compare plain data")
        return other is self

    __hash__ = object.__hash__


class _Channel:
    """One end of the connection.

    Args:
        is_solution: True at the solution's end, whose objects may be read; False at the tests' end, whose functions
            may only be called.
    """

    def __init__(self, is_solution: bool) -> None:
        self._is_solution = is_solution
        self._exported: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Any] = {}

    # -- messages -----------------------------------------------------------------------------

    def send(self, message: list[Any]) -> None:
        data = json.dumps(message).encode()
        view = memoryview(_HEADER.pack(len(data)) + data)
        while view:
            view = view[os.write(CHANNEL, view) :]

    def receive(self) -> list[Any]:
        """Return the next message.

        Raises:
            EOFError: the other process has ended.
            CrossingError: the message is malformed.
        """
        (size,) = _HEADER.unpack(self._read(_HEADER.size))
        if size > _LARGEST:
            raise CrossingError("a value is too large to cross")
        message = json.loads(self._read(size))
        if not isinstance(message, list):
            raise CrossingError("malformed message")
        return message

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = os.read(CHANNEL, min(size - len(data), 1 << 20))
            if not part:
                raise EOFError("the solution's process has ended")
            data += part
        return bytes(data)

    def request(self, operation: str, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Perform an operation in the other process; serve its calls meanwhile."""
        parts = [self.encode(value) for value in (*arguments, *keywords.values())]
        where = self.encode(target) if type(target) is Remote else target
        self.send(["request", operation, where, parts, list(keywords)])
        while True:
            message = self.receive()
            if message[0] == "request":
                self.answer(message)
                continue
            _, changed, printed, outcome = message
            if printed:
                sys.stdout.write(str(printed))
            for index, value in changed:
                _change(arguments[index], self.decode(value))
            if outcome[0] == "raised":
                raise self._error(outcome)
            return self.decode(outcome[1])

    def answer(self, message: list[Any]) -> None:
        """Perform one requested operation and send the outcome."""
        printed = io.StringIO()
        changed: list[list[Any]] = []
        try:
            _, operation, where, parts, names = message
            target = self.decode(where)
            values = [self.decode(part) for part in parts]
            if not self._is_solution and operation != "call":
                raise CrossingError("functions of the tests can only be called")
            count = len(values) - len(names)
            keywords = dict(zip(names, values[count:], strict=True))
            with contextlib.redirect_stdout(printed) if self._is_solution else contextlib.nullcontext():
                value = _OPERATIONS[operation](target, *values[:count], **keywords)
            outcome = ["returned", self.encode(value)]
            if operation in _CHANGING and self._is_solution:
                after = [self.encode(value) for value in values[:count]]
                changed = [
                    [index, part] for index, part in enumerate(after) if part != parts[index] and part[0] != "iterator"
                ]
        except Exception as error:  # noqa: BLE001 -- crosses as the outcome
            outcome = self._raised(error)
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            outcome = self._raised(error)
        self.send(["answer", changed, printed.getvalue(), outcome])

    def _raised(self, error: BaseException) -> list[Any]:
        names = [kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind]
        kind = None if names[0] == type(error).__name__ else self.encode(type(error))
        try:
            arguments = [self.encode(argument) for argument in error.args]
        except Exception:  # noqa: BLE001 -- the text is enough
            arguments = [str(error)]
        return ["raised", names[0], kind, arguments]

    def _error(self, outcome: list[Any]) -> BaseException:
        _, name, kind, arguments = outcome
        base = getattr(builtins, str(name), None) if kind is None else self.decode(kind)
        if not isinstance(base, type) or not issubclass(base, BaseException):
            raise CrossingError("malformed error")
        return base(*(self.decode(argument) for argument in arguments))

    # -- values -------------------------------------------------------------------------------

    def encode(self, value: Any) -> Any:
        """Return the value as JSON data; lists are tagged.

        Raises:
            CrossingError: the value cannot cross.
        """
        if value is None or type(value) in (bool, str, float):
            return value
        for encode in (_encode_scalar, self._encode_container, self._encode_special):
            data = encode(value)
            if data is not None:
                return data
        return self._export(value)

    def _encode_container(self, value: Any) -> Any:
        for name, mapping in reversed(_MAPPINGS.items()):
            if isinstance(value, mapping):
                return [name, [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        for name in ("list", "tuple", "set", "frozenset", "deque"):
            if isinstance(value, _SEQUENCES[name]):
                return [name, [self.encode(part) for part in value]]
        if isinstance(value, type({}.keys()) | type({}.values()) | type({}.items())):
            return ["list", list(map(self.encode, value))]
        return None

    def _encode_special(self, value: Any) -> Any:
        kind = type(value)
        if kind is Remote:
            return ["yours", object.__getattribute__(value, "_number")]
        if kind is range:
            return ["range", *map(self.encode, (value.start, value.stop, value.step))]
        if kind.__module__ == "numpy":
            return self._encode_array(value)
        if not self._is_solution and isinstance(value, Iterator):
            return ["iterator", [self.encode(part) for part in value]]
        return None

    def _encode_array(self, value: Any) -> Any:
        if hasattr(value, "dtype") and value.dtype.kind in "biufcSUMm" and hasattr(value, "tobytes"):
            return ["array", str(value.dtype.str), list(value.shape), value.tobytes().hex()]
        return self._export(value)

    def _export(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        home = str(getattr(value, "__module__", ""))
        name = str(getattr(value, "__name__", ""))
        if home != "__main__" and getattr(sys.modules.get(home), name, None) is value:
            return ["from", home, name]
        if not self._is_solution and not callable(value):
            raise CrossingError(f"an object of {type(value).__name__} cannot cross to the solution; plain data can")
        number = self._numbers.setdefault(id(value), len(self._exported))
        if number == len(self._exported):
            self._exported.append(value)  # also keeps its id
        base = ""
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(kind.__name__ for kind in value.__mro__ if getattr(builtins, kind.__name__, None) is kind)
        return ["mine", number, name, base]

    def decode(self, value: Any) -> Any:
        """Return the value of JSON data, of an exact built-in type, or a reference.

        Raises:
            CrossingError: the data is malformed.
        """
        if not isinstance(value, list):
            if isinstance(value, dict):
                raise CrossingError("malformed value")
            return value
        tag, *parts = value
        if tag in _SEQUENCES:
            return _SEQUENCES[tag]([self.decode(part) for part in parts[0]])
        if tag in _MAPPINGS:
            mapping = _MAPPINGS[tag]()
            for key, part in parts[0]:
                mapping[self.decode(key)] = self.decode(part)
            return mapping
        if tag == "range":
            return range(*map(self.decode, parts))
        if tag == "yours":
            return self._exported[int(parts[0])]
        if tag == "mine":
            return self._remote(*parts)
        if tag in _SCALARS:
            return _SCALARS[tag](*parts)
        raise CrossingError(f"malformed value {str(tag)[:40]!r}")

    def _remote(self, number: int, name: str, base: str) -> Any:
        if number not in self._remotes:
            kind: Any = getattr(builtins, base, None) if base else None
            is_error = isinstance(kind, type) and issubclass(kind, BaseException)
            self._remotes[number] = type(str(name), (kind,), {}) if is_error else Remote(self, int(number))
        return self._remotes[number]


def _encode_scalar(value: Any) -> Any:
    """Return the data of a number, text or date, of a subclass too; None for other values."""
    kind = type(value)
    if isinstance(value, int):
        number = bool(value) if kind is bool else int.__index__(value)
        return number if abs(number) < _LARGE_INTEGER else ["int", hex(number)]
    if isinstance(value, float) and kind.__module__ != "numpy":
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex) and kind.__module__ != "numpy":
        return ["complex", value.real, value.imag]
    if isinstance(value, bytes | bytearray):
        return ["bytes" if isinstance(value, bytes) else "bytearray", bytes(value).hex()]
    if value is Ellipsis or value is NotImplemented:
        return ["constant", repr(value)]
    text = f"{kind.__module__}.{kind.__name__}"
    if _TEXTUAL.get(text) is kind:
        return ["text", text, value.isoformat() if hasattr(value, "isoformat") else str(value)]
    return None


def _read_text(name: str, text: str) -> Any:
    kind: Any = _TEXTUAL[name]
    return kind.fromisoformat(text) if hasattr(kind, "fromisoformat") else kind(text)


def _read_builtin(home: str, name: str) -> Any:
    kind = getattr(builtins, name, None)
    if home != "builtins" or not isinstance(kind, type):
        raise CrossingError(f"{home}.{name} cannot cross")
    return kind


def _make_array(kind: str, shape: list[int], data: str) -> Any:
    import numpy as np

    array = np.frombuffer(bytes.fromhex(data), np.dtype(kind)).reshape(shape)
    return array.copy() if shape else array[()]


#: Tag of a value without parts of its own → what makes it from its data.
_SCALARS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "complex": lambda real, imaginary: complex(float(real), float(imaginary)),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "constant": {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}.__getitem__,
    "text": _read_text,
    "array": _make_array,
    "from": _read_builtin,
}


def _import(name: str) -> Any:
    """Import a module of the standard library, or an installed one that tests compute with."""
    root = str(name).partition(".")[0]
    if root not in sys.stdlib_module_names and root not in ("numpy", "pandas", "scipy", "sympy", "networkx"):
        raise CrossingError(f"the module {root!r} cannot cross")
    return importlib.import_module(str(name))


def _change(old: Any, new: Any) -> None:
    """Repeat here what a call has done to an argument."""
    if type(old) is not type(new):
        return
    if isinstance(old, list):
        if len(old) == len(new):
            for place, (before, after) in enumerate(zip(old, new, strict=True)):
                if type(before) is type(after) and isinstance(before, list | dict | set):
                    _change(before, after)
                else:
                    old[place] = after
        else:
            old[:] = new
    elif isinstance(old, bytearray):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)
    elif isinstance(old, collections.deque):
        old.clear()
        old.extend(new)


def serve_solution(module: dict[str, Any]) -> None:
    """Answer the tests' requests about the solution's module until they end."""
    channel = _Channel(is_solution=True)
    with contextlib.suppress(EOFError):
        while True:
            message = channel.receive()
            if message[0] == "names":
                channel.send([[name, _try_encode(channel, module[name])] for name in message[1] if name in module])
            else:
                channel.answer(message)


def _try_encode(channel: _Channel, value: Any) -> Any:
    try:
        return channel.encode(value)
    except Exception:  # noqa: BLE001 -- a value that the tests may not need at all
        return ["none"]


def _solution_names(channel: _Channel, code: str, wanted: str | None) -> dict[str, Any]:
    """Return what the solution defines of the words in the tests' code.

    Built-in names and the usual helpers of tests never come from the solution, nor does a module of the standard
    library whose attributes the tests use.
    """
    words = dict.fromkeys(_WORD.findall(code))
    names: dict[str, Any] = {}
    asked = []
    for word in words:
        module = _ALIASES.get(word, word)
        if word == wanted:
            asked.append(word)
        elif word in _HELPERS:
            home, name = _HELPERS[word]
            names[word] = getattr(importlib.import_module(home), name)
        elif (module in sys.stdlib_module_names or word in _ALIASES) and re.search(rf"\b{word}\s*\.", code):
            with contextlib.suppress(ImportError):
                names[word] = importlib.import_module(module)
        elif not hasattr(builtins, word) and not word.startswith("__"):
            asked.append(word)
    channel.send(["names", asked])
    for name, value in channel.receive():
        if name in asked and name not in names:
            with contextlib.suppress(CrossingError, ImportError, AttributeError):
                names[name] = _imported(name, value) if _is_imported(value) else channel.decode(value)
    return names


def _is_imported(value: Any) -> bool:
    return isinstance(value, list) and value[0] in ("module", "from")


def _imported(name: str, value: list[Any]) -> Any:
    """Import here what the solution has imported by this name; only under its own name, so that nothing poses as it."""
    tag, home, *attribute = value
    if tag == "from" and attribute == [name]:
        return getattr(_import(home), name)
    if tag == "module" and str(home).rpartition(".")[2] == name:
        return _import(home)
    raise CrossingError(f"{name} is a name of {home}")


def run_tests(source: str, module: dict[str, Any], passed: Callable[[], None]) -> None:
    """Run tests against the solution at the other end of the channel, and call ``passed`` if none fails.

    Args:
        source: JSON text with ``code`` and ``entry_point`` (a name or null), or with ``fn_name``, ``arguments`` and
            ``expected``.
        module: namespace of the tests.
        passed: called after the last line.
    """
    test: Mapping[str, Any] = json.loads(source)
    channel = _Channel(is_solution=False)
    if "fn_name" in test:
        name = test["fn_name"]
        names = _solution_names(channel, f"{name} Solution", name)
        function = names[name] if name in names else getattr(names["Solution"](), name)
        value = function(*test["arguments"])
        if not any(_plain(value) == _plain(expected) for expected in test["expected"]):
            raise AssertionError("wrong answer")
    else:
        module.update(_solution_names(channel, test["code"], test["entry_point"]))
        exec(compile(test["code"], "tests.py", "exec", dont_inherit=True), module)  # noqa: S102 -- tests of the data set
    passed()


def _plain(value: Any) -> Any:
    """Return the value as JSON has it: tuples become lists, and the keys of mappings texts."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    return value
