"""What importing a module would do, as far as its source shows: names, imports, a raise."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

_CATCH_IMPORT_ERROR = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
_DYNAMIC_CALLS = {"globals", "exec", "eval", "vars", "locals", "setattr"}
_EXITS = {"sys.exit", "exit", "quit", "os._exit", "os.abort"}


@dataclass
class TopLevel:
    """The top level of one module.

    Attributes:
        names: what is bound, on whatever condition.
        imports: those that happen unconditionally, as (line, level, module, attribute); the
            attribute is empty for ``import module``.
        is_dynamic: whether names may exist that ``names`` lacks.
        stop: the unconditional end of the import, as text, or None.
    """

    names: set[str] = field(default_factory=set)
    imports: list[tuple[int, int, str, str]] = field(default_factory=list)
    is_dynamic: bool = False
    stop: str | None = None


def read_top_level(source: bytes, path: str) -> TopLevel:
    """Parse a module and judge its top level.

    Raises:
        SyntaxError: it cannot be parsed.
        ValueError: it contains null bytes (on some Python versions).
    """
    tree = ast.parse(source, path)
    reader = _Reader()
    reader.read(tree.body, certain=True)
    top = reader.top
    top.names.update(("__name__", "__doc__", "__file__", "__spec__"))
    top.is_dynamic = top.is_dynamic or "__getattr__" in top.names
    return top


class _Reader:
    def __init__(self) -> None:
        self.top = TopLevel()

    def read(self, body: Iterable[ast.stmt], certain: bool) -> None:
        """Read statements; ``certain`` if the module always executes them, uncaught."""
        for statement in body:
            if self.top.stop is not None and certain:
                return  # never reached
            self._read_one(statement, certain)

    def _read_one(self, node: ast.stmt, certain: bool) -> None:  # noqa: C901  # one case a kind of statement
        match node:
            case ast.Import() | ast.ImportFrom():
                self._read_import(node, certain)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self.top.names.add(node.name)
                self._find_globals(node)
            case ast.If():
                self._read_if(node, certain)
            case ast.Try() | ast.TryStar():
                self._read_try(node, certain)
            case ast.With() | ast.AsyncWith():
                self._bind_targets(node)
                self.read(node.body, certain and not _may_swallow(node))
            case ast.For() | ast.AsyncFor() | ast.While() | ast.Match():
                self._bind_targets(node)
                self._read_inner_blocks(node)
            case ast.Raise():
                if certain:
                    what = f": {ast.unparse(node.exc)}" if node.exc else ""
                    self.top.stop = f"line {node.lineno}: it always raises{what}"
            case ast.AnnAssign(value=None):
                pass  # a declaration binds nothing
            case ast.Assert(test=ast.Constant(value=value)) if not value and certain:
                self.top.stop = f"line {node.lineno}: its assertion always fails"
            case ast.Delete():
                if certain:
                    gone = {each.id for each in node.targets if isinstance(each, ast.Name)}
                    self.top.names -= gone
            case _:
                self._bind_targets(node)
                if certain and isinstance(node, ast.Expr):
                    self._read_exit(node)

    def _read_import(self, node: ast.Import | ast.ImportFrom, certain: bool) -> None:
        for alias in node.names:
            if alias.name == "*":
                self.top.is_dynamic = True
            else:
                bound = alias.asname or alias.name
                self.top.names.add(bound.split(".")[0])
            if not certain:
                continue
            if isinstance(node, ast.Import):
                self.top.imports.append((node.lineno, 0, alias.name, ""))
            else:
                found = (node.lineno, node.level, node.module or "", alias.name)
                self.top.imports.append(found)

    def _read_if(self, node: ast.If, certain: bool) -> None:
        if ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
            self.read(node.orelse, certain)  # its body does not exist when the module runs
            return
        self._bind_targets(node.test)
        self.read(node.body, certain=False)
        self.read(node.orelse, certain=False)

    def _read_try(self, node: ast.Try | ast.TryStar, certain: bool) -> None:
        stop = self.top.stop
        guarded = any(_forgives_import(handler) for handler in node.handlers)
        self.read(node.body, certain and not guarded)
        if node.handlers:
            self.top.stop = stop  # whatever was raised may be caught
        for handler in node.handlers:
            self.read(handler.body, certain=False)
        self.read(node.orelse, certain and not guarded)
        self.read(node.finalbody, certain)

    def _read_inner_blocks(self, node: ast.For | ast.AsyncFor | ast.While | ast.Match) -> None:
        if isinstance(node, ast.Match):
            for case in node.cases:
                self.read(case.body, certain=False)
            return
        self.read(node.body, certain=False)
        self.read(node.orelse, certain=False)

    def _read_exit(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in _EXITS:
            self.top.stop = f"line {node.lineno}: it calls {ast.unparse(node.value)}"

    def _bind_targets(self, node: ast.AST) -> None:
        """Bind what is assigned anywhere in a statement, and notice code that binds by string."""
        for each in ast.walk(node):
            match each:
                case ast.Name(ctx=ast.Store()):
                    self.top.names.add(each.id)
                case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                    self.top.names.add(name)
                case ast.Name(id=name) if name in _DYNAMIC_CALLS:
                    self.top.is_dynamic = True
                case ast.Attribute(attr="modules", value=ast.Name(id="sys")):
                    self.top.is_dynamic = True

    def _find_globals(self, node: ast.AST) -> None:
        for each in ast.walk(node):
            if isinstance(each, ast.Global):
                self.top.names.update(each.names)
            elif isinstance(each, ast.Name) and each.id == "globals":
                self.top.is_dynamic = True


def _forgives_import(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches an ImportError for good; one that raises in its turn does not."""
    if any(isinstance(each, ast.Raise) for each in handler.body):
        return False
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(each).split(".")[-1] in _CATCH_IMPORT_ERROR for each in caught)


def _may_swallow(node: ast.With | ast.AsyncWith) -> bool:
    """Whether a ``with`` block might keep an ImportError from leaving; doubt counts as yes."""
    return any("catch_warnings" not in ast.unparse(item.context_expr) for item in node.items)
