"""Finding out why a part would not import, without importing it or anything else.

A module is located step by step through the folders of its packages, its source is parsed, and
what its top level would do is judged: modules that cannot be found, names that are never bound,
an unconditional ``raise``. The judgement errs towards "ok": what depends on a condition, on a
``with`` block or on dynamic code is taken to work, and :mod:`rollcast.plugins.check`, which really
imports the part, is there for the rest.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollcast.plugins.loader import missing_module_hint
from rollcast.plugins.metadata import PartInfo
from rollcast.plugins.toplevel import TopLevel, read_top_level


@dataclass(frozen=True)
class _Module:
    """A located module: ``top`` is None if it has no source to read."""

    name: str
    is_package: bool
    path: str
    folders: tuple[str, ...] = ()
    top: TopLevel | None = None
    problem: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether names may exist in it that its source does not show."""
        return self.problem is None and (self.top is None or self.top.is_dynamic) and self.path != ""


class Diagnosis:
    """Diagnoses parts; remembers each module, so one object serves a whole report.

    Args:
        parts: all parts of the report. Imports are followed into the top-level packages of the
            distribution that a part belongs to, and no further.
    """

    def __init__(self, parts: Iterable[PartInfo]) -> None:
        self._modules: dict[str, _Module | None] = {}
        self._tops: dict[str, importlib.machinery.ModuleSpec | None] = {}
        self._owned: dict[str, set[str]] = {}
        for part in parts:
            self._owned.setdefault(part.distribution, set()).add(part.module.split(".")[0])

    def find_cause(self, part: PartInfo) -> str | None:
        """Why importing the part would fail; None if nothing speaks against it."""
        if not part.module:
            return f"{part.value!r} is not of the form 'module:attribute'"
        owned = self._owned.get(part.distribution, set()) | {part.module.split(".")[0]}
        return self._walk(part, owned) or self._attribute_problem(part)

    def _walk(self, part: PartInfo, owned: set[str]) -> str | None:
        """The first problem among all modules that importing the part would execute."""
        queue = list(_with_parents(part.module))
        seen = set(queue)
        for name in queue:  # grows while it is walked
            module = self._locate(name)
            if module is None:
                return f"there is no module {name!r}{self._hint(part, name)}"
            if module.problem is not None:
                return module.problem
            if module.top is None:
                continue
            for line, target in self._imports(module, module.top):
                problem = self._import_problem(part, target, owned)
                if problem is not None:
                    return f"{module.path}, line {line}: {problem}"
                if target[0].split(".")[0] in owned:
                    fresh = [each for each in self._executed(target) if each not in seen]
                    seen.update(fresh)
                    queue.extend(fresh)
            if module.top.stop is not None:
                return f"{module.path}, {module.top.stop}"
        return None

    def _hint(self, part: PartInfo, name: str) -> str:
        if name.split(".")[0] == part.module.split(".")[0]:
            return ""
        return f". {missing_module_hint(part.distribution, name)}"

    @staticmethod
    def _imports(module: _Module, top: TopLevel) -> Iterator[tuple[int, tuple[str, str]]]:
        for line, level, name, attribute in top.imports:
            if level == 0:
                yield line, (name, attribute)
                continue
            package = module.name if module.is_package else module.name.rpartition(".")[0]
            base = package.split(".")
            if level > len(base):
                yield line, ("", name)  # beyond the top-level package
                continue
            base = base[: len(base) - level + 1]
            yield line, (".".join([*base, *([name] if name else [])]), attribute)

    def _import_problem(self, part: PartInfo, target: tuple[str, str], owned: set[str]) -> str | None:
        name, attribute = target
        top = name.split(".")[0]
        if not name:
            return "a relative import leaves its top-level package"
        if top not in owned:
            if self._find_top(top) is not None or top in sys.stdlib_module_names:
                return None
            hint = missing_module_hint(part.distribution, top)
            return f"it imports {name!r}, but {top!r} is not installed. {hint}"
        for each in _with_parents(name):
            module = self._locate(each)
            if module is None:
                return f"it imports {name!r}, but there is no module {each!r}"
            if module.problem is not None:
                return None  # named when the walk comes to it
        if attribute and attribute != "*" and not self._has(name, attribute):
            return f"it imports {attribute!r} from {name!r}, which does not define it"
        return None

    def _executed(self, target: tuple[str, str]) -> Iterator[str]:
        name, attribute = target
        yield from _with_parents(name)
        module = self._locate(name)
        # `from package import x` imports the module x only if the package has no such name.
        if attribute and module is not None and module.is_package:
            bound = module.top is not None and attribute in module.top.names
            if not bound and self._locate(f"{name}.{attribute}") is not None:
                yield f"{name}.{attribute}"

    def _has(self, name: str, attribute: str) -> bool:
        module = self._locate(name)
        if module is None or module.problem is not None or module.is_open:
            return True
        if module.top is not None and attribute in module.top.names:
            return True
        return module.is_package and self._locate(f"{name}.{attribute}") is not None

    def _attribute_problem(self, part: PartInfo) -> str | None:
        first = part.attr.split(".")[0]
        if not first or self._has(part.module, first):
            return None
        module = self._locate(part.module)
        path = module.path if module is not None else part.module
        return f"{path or part.module} does not define {first!r}"

    def _find_top(self, name: str) -> importlib.machinery.ModuleSpec | None:
        if name not in self._tops:
            try:
                # For a top-level name this asks the finders and executes nothing.
                self._tops[name] = importlib.util.find_spec(name)
            except ValueError:  # a module in sys.modules without a spec, such as __main__
                self._tops[name] = importlib.machinery.ModuleSpec(name, None)
        return self._tops[name]

    def _locate(self, name: str) -> _Module | None:
        if name not in self._modules:
            self._modules[name] = self._find_module(name)
        return self._modules[name]

    def _find_module(self, name: str) -> _Module | None:
        parent_name = name.rpartition(".")[0]
        if not parent_name:
            spec = self._find_top(name)
        else:
            parent = self._locate(parent_name)
            if parent is None:
                return None
            if parent.problem is not None:
                return _Module(name, False, parent.path, problem=parent.problem)
            # By its last name: for a dotted one of a namespace package, Python would look for the
            # parent in sys.modules. The finders only ever use the last name to look for files.
            last = name.rpartition(".")[2]
            spec = importlib.machinery.PathFinder.find_spec(last, list(parent.folders))
            if spec is None and parent.top is not None and "__path__" in parent.top.names:
                return _Module(name, True, parent.path)  # the package looks elsewhere
        return None if spec is None else _read(name, spec)


def _read(name: str, spec: importlib.machinery.ModuleSpec) -> _Module:
    folders = tuple(spec.submodule_search_locations or ())
    is_package = spec.submodule_search_locations is not None
    path = spec.origin or ""
    if not path.endswith(".py") or not Path(path).is_file():
        return _Module(name, is_package, path, folders)  # a namespace, native code, a zip file
    try:
        top = read_top_level(Path(path).read_bytes(), path)
    except OSError as error:
        return _Module(name, is_package, path, folders, problem=f"cannot read it: {error}")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}, line {line}" if line else path
        text = getattr(error, "msg", None) or error
        problem = f"{where}: {type(error).__name__}: {text}"
        return _Module(name, is_package, path, folders, problem=problem)
    return _Module(name, is_package, path, folders, top)


def _with_parents(name: str) -> list[str]:
    steps = name.split(".")
    return [".".join(steps[: count + 1]) for count in range(len(steps))]
