"""The order of the rooms: who may import whom, read from the source; and what an import brings in."""

from __future__ import annotations

import ast
import graphlib
import importlib
import itertools
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rollcast
from rollcast.plugins.discovery import describe_groups

#: From the ground up; a room sees itself and those before it. Rooms of one floor do not see each other.
FLOORS = [
    ("errors", "_lazy", "_version"),
    ("protocol", "plugins"),
    ("_fork_server",),
    ("contracts",),
    ("controller",),
    ("runtime",),
    ("config",),
    ("cli",),
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
CORE = Path(rollcast.__file__).parent
REPOSITORY = Path(__file__).parents[2]
#: Strings that name a distribution or a group, not the module of the same name.
NO_MODULES = {"rollcast", *describe_groups()}
HEAVY = ("torch", "tensordict", "ray", "transformers")


def module_name(file: Path) -> str:
    parts = file.relative_to(CORE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted(CORE.rglob("*.py"))}
PLUGINS = {
    folder.name
    for pattern in ("plugins/*/src/*", "contrib/*/src/*")
    for folder in REPOSITORY.glob(pattern)
    if (folder / "__init__.py").exists()
}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def walk_what_runs(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only a type checker reads, and docstrings."""
    for child in ast.iter_child_nodes(tree):
        if is_type_checking(child):
            yield from walk_what_runs(ast.Module(child.orelse, []))
            continue
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        yield child
        yield from walk_what_runs(child)


def imports_of(module: str, source: str, by_name: bool = True) -> set[str]:
    """Modules that the source imports, at the top or in a function; and by a name in a string."""
    found: set[str] = set()
    for node in walk_what_runs(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in FILES else str(node.module))
        elif by_name and isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if (name in FILES and name not in NO_MODULES) or name.partition(".")[0] in PLUGINS:
                found.add(name)
    return found - {module}


IMPORTS = {module: imports_of(module, file.read_text()) for module, file in FILES.items()}


def room_of(module: str) -> str | None:
    """None for the package itself, which is above all rooms."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else None


def test_every_file_is_in_a_room() -> None:
    assert {room_of(module) for module in FILES} - {None} == set(FLOOR_OF)


@pytest.mark.parametrize("room", FLOOR_OF)
def test_a_room_imports_only_from_itself_and_from_below(room) -> None:
    wrong = []
    for module in (module for module in FILES if room_of(module) == room):
        for target in (target for target in IMPORTS[module] if target.split(".")[0] == "rollcast"):
            other = room_of(target)
            if other is None or (other != room and FLOOR_OF[other] >= FLOOR_OF[room]):
                wrong.append(f"{module} imports {target}")
    assert not wrong


def test_there_is_no_circle() -> None:
    graph = {module: imports_of(module, file.read_text(), by_name=False) for module, file in FILES.items()}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_core_does_not_import_ray() -> None:
    assert [module for module, targets in IMPORTS.items() if any(t.split(".")[0] == "ray" for t in targets)] == []


def test_the_core_names_no_plugin() -> None:
    assert {"rollcast_dispatch", "rollcast_fsdp", "rollcast_quickstart"} <= PLUGINS
    wrong = [f"{module}: {t}" for module, targets in IMPORTS.items() for t in targets if t.split(".")[0] in PLUGINS]
    assert not wrong


def test_this_reader_sees_what_it_should() -> None:
    source = '''
        """rollcast_fsdp is only mentioned here."""
        from typing import TYPE_CHECKING
        import ray.util
        from rollcast.protocol import DataProto, batch
        if TYPE_CHECKING:
            from rollcast.cli import app
        else:
            import json
        LAZY = {"Engine": "rollcast.contracts.engine", "part": "rollcast_fsdp.engine:Engine", "group": "rollcast.engines"}
        def f():
            """rollcast.cli"""
            from rollcast.config import assembly
    '''
    assert imports_of("here", textwrap.dedent(source)) == {
        "typing",
        "ray.util",
        "rollcast.protocol",
        "rollcast.protocol.batch",
        "json",
        "rollcast.contracts.engine",
        "rollcast_fsdp.engine",
        "rollcast.config.assembly",
    }


# -- what an import brings in ---------------------------------------------------------------------


@pytest.mark.parametrize("package", ["rollcast", *(f"rollcast.{room}" for room in FLOOR_OF)])
def test_public_names_resolve(package) -> None:
    module = importlib.import_module(package)
    for name in getattr(module, "__all__", ()):
        assert getattr(module, name) is not None, name
    if hasattr(module, "__getattr__"):
        assert set(module.__all__) <= set(dir(module))
        with pytest.raises(AttributeError, match="nothing_like_it"):
            _ = module.nothing_like_it


def brought_in(code: str) -> str:
    """What a fresh interpreter says after running ``code``."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_touches_nothing() -> None:
    code = """
        import logging, os, sys, threading, warnings
        before = (dict(os.environ), list(logging.root.handlers), logging.root.level, list(warnings.filters))
        threads = threading.active_count()
        import rollcast
        assert (dict(os.environ), list(logging.root.handlers), logging.root.level, list(warnings.filters)) == before
        assert threading.active_count() == threads
        print(sorted(name for name in sys.modules if name.startswith("rollcast")))
        """
    assert brought_in(textwrap.dedent(code)) == "['rollcast', 'rollcast._lazy']"


LIGHT = [m for m in FILES if room_of(m) not in (None, "protocol")]


@pytest.mark.parametrize("modules", [["rollcast"], [*LIGHT, "rollcast.protocol"]], ids=["rollcast", "light rooms"])
def test_light_modules_bring_in_nothing_heavy(modules) -> None:
    code = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
    code += f"print([name for name in {HEAVY!r} if name in sys.modules])"
    assert brought_in(code) == "[]"


# -- the declared surface -------------------------------------------------------------------------


#: Modules of the core that plugins may import, beside ``rollcast.contracts.*``.
SURFACE = {"rollcast", "rollcast.errors", "rollcast.protocol", "rollcast.plugins"}


def imports_of_plugins() -> Iterator[tuple[str, str]]:
    """Each plugin's distribution with a module that it imports, in functions and for type checkers too."""
    for pattern in ("plugins/*/src", "contrib/*/src"):
        for file in (file for root in REPOSITORY.glob(pattern) for file in root.rglob("*.py")):
            distribution = file.relative_to(REPOSITORY).parts[1]
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    yield from ((distribution, alias.name) for alias in node.names)
                elif isinstance(node, ast.ImportFrom):
                    modules = {f"{node.module}.{alias.name}" for alias in node.names}
                    yield from ((distribution, name if name in FILES else str(node.module)) for name in modules)


def private_imports() -> dict[str, set[str]]:
    """Private module of the core → the distributions that import it."""
    users: dict[str, set[str]] = {}
    for distribution, module in imports_of_plugins():
        if module.split(".")[0] == "rollcast" and not is_declared(module):
            users.setdefault(module, set()).add(distribution)
    return users


def is_declared(module: str) -> bool:
    return module in SURFACE or module.startswith("rollcast.contracts.")


def test_plugins_import_only_the_declared_surface() -> None:
    found = private_imports()
    assert {module: sorted(users) for module, users in found.items()} == {}


def test_other_distributions_import_only_the_surface_of_the_trainer() -> None:
    """Stages and trainers of other packages are written against ``rollcast_trainer.api``."""
    users = {
        (distribution, module)
        for distribution, module in imports_of_plugins()
        if module.split(".")[0] == "rollcast_trainer" and distribution != "rollcast-trainer"
    }
    assert {module for _, module in users} == {"rollcast_trainer.api"}
    assert {distribution for distribution, _ in users} == {"rollcast-agents", "rollcast-automap", "rollcast-dryrun"}


def test_every_distribution_is_typed() -> None:
    packages = [
        init.parent
        for pattern in ("core/src/*", "plugins/*/src/*", "contrib/*/src/*")
        for init in REPOSITORY.glob(f"{pattern}/__init__.py")
    ]
    assert len(packages) == len(PLUGINS) + 1
    assert [str(package) for package in packages if not (package / "py.typed").exists()] == []


def test_distributions_declare_what_their_modules_import() -> None:
    """An import that only another distribution brings in works here, where all are installed, and not for a user."""
    undeclared: dict[str, set[str]] = {}
    for pattern in ("plugins/*/src", "contrib/*/src"):
        for root in REPOSITORY.glob(pattern):
            project = tomllib.loads((root.parent / "pyproject.toml").read_text())["project"]
            extras = project.get("optional-dependencies", {}).values()
            lines = [*project["dependencies"], *itertools.chain.from_iterable(extras)]
            known = {project["name"], *(Requirement(line).name for line in lines)}
            for file in root.rglob("*.py"):
                if "testing" in str(file.relative_to(root)):
                    continue  # for suites, which need the extra `testing`
                for node in ast.parse(file.read_text()).body:
                    modules = [str(node.module)] if isinstance(node, ast.ImportFrom) else []
                    modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                    names = {module.split(".")[0].replace("_", "-") for module in modules}
                    if missing := {name for name in names if name.startswith("rollcast")} - known:
                        undeclared.setdefault(project["name"], set()).update(missing)
    assert undeclared == {}
