"""Remote storage: URLs of models, data and checkpoints, and their copies on each node.

A path may be a URL of any file system that fsspec supports, such as ``s3://bucket/model`` or ``hdfs://host/data``. Code
that opens files gets the path of a copy on its own node, never the URL: :class:`NodeCopies` plans the copies of a
config section, and every worker process waits for the copies of its node before its worker is built
(:meth:`rollcast.ClassWithInitArgs.with_options`). The Hugging Face folder of a model in a GGUF file is such a copy too,
and so is a model whose ``override_config`` changes its ``config.json``, of links to the model's files: every engine and
tokenizer sees the same model.

Copies are kept in ``rollcast-cache-UID`` of the temporary folder, or in ``/dev/shm`` with ``use_shm``; the environment
variable ``ROLLCAST_CACHE_DIR`` of the driver names another folder, which has to be writable on every node.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from rollcast.contracts.gguf import convert_gguf, digest_gguf, find_gguf
from rollcast.contracts.model_config import override_model_config
from rollcast.errors import ConfigError, ResourceError

__all__ = [
    "CopiedToNode",
    "ModelPath",
    "NodeCopies",
    "NodeCopy",
    "NodePath",
    "RemoteFolder",
    "explain_local",
    "explain_url",
    "fetch_files",
    "is_url",
]

S = TypeVar("S")
logger = logging.getLogger(__name__)
_URL = re.compile(r"[A-Za-z][\w+.-]*(::|://)")
#: Facts of a file that change when its content does, by the names that file systems give them; the first one counts.
_VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "modificationTime", "mtime", "created")
#: Errors of file systems, and of their drivers' arguments.
_FAILURES = (OSError, ImportError, TypeError, ValueError)
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # the point is that it is shared memory


@dataclass(frozen=True)
class CopiedToNode:
    """A marker for a config field with a path or URL of which every node needs a copy; see :data:`NodePath`.

    If the section's field ``use_shm`` is true, the copy is in shared memory, and a local path is copied too.

    Attributes:
        is_model: True for a model's folder, whose ``config.json`` the section's field ``override_config`` changes.
    """

    is_model: bool = False


NodePath = Annotated[str, CopiedToNode()]
"""A path, or a URL that is replaced by the path of a copy on each node."""
ModelPath = Annotated[str, CopiedToNode(is_model=True)]
"""A model's folder, or its URL, replaced by the path of a copy on each node where one is needed."""


def is_url(path: str) -> bool:
    """Return True if a path is a URL of a file system, such as ``s3://bucket/key``."""
    return _URL.match(path) is not None


def explain_local(name: str, url: str) -> str:
    """Return the message for a URL given for ``name``, a key or option that takes a path of a mounted file system."""
    return f"{name} must be a path on this machine, got the URL {url!r}; mount the file system, or give a local path"


def explain_url(url: str, error: Exception, where: str = "") -> str:
    """Return why a URL cannot be opened, with the package to install if one is missing.

    Args:
        where: environments that need the package, if it is not only this one.
    """
    from fsspec.registry import available_protocols, known_implementations

    protocols = re.findall(r"([\w+.-]+)(?=::|://)", url)  # several if they are chained, as in simplecache::s3://
    unknown = [protocol for protocol in protocols if protocol not in available_protocols()]
    if unknown:
        return f"fsspec has no file system {unknown[0]!r}; it has {', '.join(sorted(available_protocols()))}"
    if not isinstance(error, (ImportError, OSError)):  # an argument that no URL carries
        return str(error)
    hints = [hint for protocol in protocols if (hint := known_implementations.get(protocol, {}).get("err"))]
    reason = "; ".join(dict.fromkeys([str(error) or type(error).__name__, *hints]))
    return f"{reason} (in {where})" if hints and where else reason


@dataclass(frozen=True)
class NodeCopy:
    """A file or folder, and the path of its copy on a node.

    Attributes:
        source: path or URL.
        target: path of the copy, the same on every node.
        fingerprint: digest of the names, sizes and versions of the source's files when the run started.
        size: size in bytes.
        override_config: changes of the model's ``config.json`` as JSON, for a copy of links to a local folder; empty
            for a copy of the files.
        key: dotted key of the path, for messages.
        is_gguf: True for a Hugging Face folder of the model in a local GGUF file.
    """

    source: str
    target: str
    fingerprint: str
    size: int
    override_config: str = ""
    key: str = "model.path"
    is_gguf: bool = False

    def make(self) -> Path:
        """Make the copy unless it exists, and return its path; one process of a node copies, the others wait for it.

        Raises:
            ConfigError: the model's config has no such key, or cannot have such a value.
            ResourceError: the source cannot be read, has changed since the run started, or does not fit.
        """
        target = Path(self.target)
        if target.exists():
            return target
        _make_private(target.parent.parent)
        target.parent.mkdir(exist_ok=True)
        with _locked(target.parent / "lock"):
            if not target.exists():
                # A name of its own, so that a killed copy is never taken for a complete one.
                unfinished = target.with_name(f".{target.name}.{os.getpid()}")
                try:
                    self._fill(unfinished)
                    os.replace(unfinished, target)
                finally:
                    if unfinished.is_file():
                        unfinished.unlink()
                    shutil.rmtree(unfinished, ignore_errors=True)
        return target

    def _fill(self, unfinished: Path) -> None:
        if self.is_gguf:
            convert_gguf(Path(self.source), unfinished, self.key)
        elif self.override_config:
            self._link(unfinished)
        else:
            self._copy(unfinished)

    def _link(self, unfinished: Path) -> None:
        """Link the files of a model's folder, and write its ``config.json`` with the changes."""
        key = f"{self.key.removesuffix('path')}override_config"
        text = override_model_config(Path(self.source), json.loads(self.override_config), key)
        shutil.copytree(self.source, unfinished, copy_function=_link_file, ignore=shutil.ignore_patterns(".*"))
        (unfinished / "config.json").unlink()
        (unfinished / "config.json").write_text(text)

    def _copy(self, unfinished: Path) -> None:
        target = Path(self.target)
        free = shutil.disk_usage(target.parent).free
        if free < self.size:
            raise ResourceError(
                f"the copy of {self.source} needs {_gib(self.size)} in {target.parent}, which has {_gib(free)} free; "
                "free some space, or set ROLLCAST_CACHE_DIR to another folder, or model.use_shm=false if it is set"
            )
        started = time.monotonic()
        try:
            files, path = _open(self.source)
            if _read_fingerprint(files, path)[0] != self.fingerprint:
                raise ResourceError(f"{self.source} has changed since the run started; start the run again")
            files.get(path, str(unfinished), recursive=True)
        except _FAILURES as error:
            raise ResourceError(f"{self.source} cannot be copied: {explain_url(self.source, error)}") from error
        seconds = time.monotonic() - started
        logger.info("copied %s (%s) to %s in %.1f s", self.source, _gib(self.size), target, seconds)


class NodeCopies:
    """The copies that the nodes of a run need, planned on the driver.

    Example::

        copies = NodeCopies()
        model = copies.place(config.model)  # model.path is now a path on every node
        copies.make()  # on this node
        worker = ClassWithInitArgs(MyWorker, model).with_options(copies=copies.planned)
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[str, bool, str], NodeCopy] = {}

    @property
    def planned(self) -> tuple[NodeCopy, ...]:
        """All copies that were planned."""
        return tuple(self._copies.values())

    def place(self, section: S, path: str = "") -> S:
        """Return a section whose marked paths (:data:`NodePath`) are those of copies; nothing is copied yet.

        A local path stays as it is, unless the section sets ``use_shm`` or ``override_config``. A model in a local GGUF
        file is converted on this node at once.

        Args:
            section: dataclass instance; sections within it are placed too.
            path: dotted path of the section, for messages.

        Raises:
            ConfigError: a URL cannot be listed, or a model's config cannot have the changes; names the key.
        """
        if not dataclasses.is_dataclass(section) or isinstance(section, type):
            return section
        changes: dict[str, Any] = {}
        in_memory = bool(getattr(section, "use_shm", False))
        for name, mark in _marked_fields(type(section)).items():
            placed = value = getattr(section, name)
            key = f"{path}.{name}" if path else name
            if mark is None:
                placed = self.place(value, key)
            elif isinstance(value, str) and (is_url(value) or (in_memory and Path(value).exists())):
                placed = self.plan(value, in_memory, key).target
            if mark is not None and mark.is_model and isinstance(placed, str):
                placed = self._convert(placed, in_memory, key)
                if changed := getattr(section, "override_config", None):
                    placed = self._override(placed, changed, in_memory, key)
            if placed is not value:
                changes[name] = placed
        return dataclasses.replace(section, **changes) if changes else section

    def plan(self, source: str, in_memory: bool = False, key: str = "") -> NodeCopy:
        """Plan a copy of a file or folder, and return it.

        Raises:
            ConfigError: the source cannot be listed; names ``key``.
        """
        known = self._copies.get((source, in_memory, ""))
        if known is not None:
            return known
        try:
            files, path = _open(source)
            fingerprint, size = _read_fingerprint(files, path)
        except _FAILURES as error:
            shown = f"{key}={source}" if key else source
            raise ConfigError(f"{shown} cannot be read: {explain_url(source, error)}") from error
        name = re.sub(r"[^\w.-]", "_", path.rstrip("/").rpartition("/")[2]) or "root"
        digest = hashlib.blake2b(f"{source} {fingerprint}".encode(), digest_size=12).hexdigest()
        copy = NodeCopy(source, str(_cache_folder(in_memory) / digest / name), fingerprint, size)
        self._copies[source, in_memory, ""] = copy
        return copy

    def _unchanged_copy(self, target: str) -> NodeCopy | None:
        """Return the planned copy at a path whose config is not changed; None if there is none."""
        return next((copy for copy in self.planned if copy.target == target and not copy.override_config), None)

    def _convert(self, path: str, in_memory: bool, key: str) -> str:
        """Plan the folder of a model in a GGUF file, and return its path; a local one is made at once."""
        copied = self._unchanged_copy(path)
        names = _list_names(path if copied is None else copied.source)
        name = Path(path).name if path.lower().endswith(".gguf") else find_gguf(names, path, key)
        if name is None or not names:
            return path
        local = Path(path).expanduser().absolute()
        file = str(local if local.name == name else local / name)
        digest = digest_gguf(Path(file)) if copied is None else copied.fingerprint
        target = str(_cache_folder(in_memory) / f"{digest}-gguf" / name[: -len(".gguf")])
        copy = self._copies[file, in_memory, "gguf"] = NodeCopy(file, target, digest, 0, "", key, is_gguf=True)
        if copied is None:
            copy.make()
        return target

    def _override(self, folder: str, changes: Mapping[str, Any], in_memory: bool, key: str) -> str:
        """Plan a model's folder with another ``config.json``, and return its path; a local one is made at once."""
        text = json.dumps(dict(changes), sort_keys=True)
        known = self._copies.get((folder, in_memory, text))
        if known is not None:
            return known.target
        copied = self._unchanged_copy(folder)
        if copied is not None:
            fingerprint = copied.fingerprint
        elif (Path(folder) / "config.json").is_file():
            fingerprint, _ = _read_fingerprint(*_open(str(Path(folder).resolve())))
        else:
            return folder  # whoever opens it says what is missing
        digest = hashlib.blake2b(f"{folder} {fingerprint} {text}".encode(), digest_size=12).hexdigest()
        target = str(_cache_folder(in_memory) / digest / (Path(folder).resolve().name or "root"))
        copy = self._copies[folder, in_memory, text] = NodeCopy(folder, target, fingerprint, 0, text, key)
        if (Path(folder) / "config.json").is_file():
            copy.make()
        return target

    def make(self) -> None:
        """Make all copies on this node; see :meth:`NodeCopy.make`."""
        for copy in self.planned:
            copy.make()


def fetch_files(patterns: Sequence[str], key: str = "") -> list[str]:
    """Return paths of files on this node: URLs, which may be globs, are copied; other patterns stay as they are.

    Raises:
        ConfigError: a URL cannot be listed or matches no file; names ``key``.
        ResourceError: a file cannot be copied.
    """
    paths: list[str] = []
    copies = NodeCopies()
    for pattern in patterns:
        if is_url(pattern):
            paths += [str(copies.plan(url, key=key).make()) for url in _expand(pattern, key)]
        else:
            paths.append(pattern)
    return paths


class RemoteFolder:
    """A folder at a URL.

    Args:
        url: URL of the folder.
        key: config key that holds it, for messages.

    Raises:
        ConfigError: no file system for the URL is installed; the message names the package.
    """

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._files, self._path = _open(self.url)
        except _FAILURES as error:
            raise ConfigError(f"{key}={url} cannot be opened: {explain_url(url, error)}") from error

    def upload(self, source: Path, name: str) -> None:
        """Copy a file or folder to ``name``, replacing what is there; a reader may see a part of it meanwhile.

        Raises:
            ResourceError: it cannot be written.
        """
        with self._explained(f"{source} cannot be copied to {self.url}/{name}"):
            if source.is_dir():
                self.remove(name)
            for path in [source, *sorted(source.rglob("*"))]:
                relative = path.relative_to(source).as_posix()
                target = self._at(name) if relative == "." else f"{self._at(name)}/{relative}"
                if path.is_dir():
                    self._files.makedirs(target, exist_ok=True)
                else:
                    self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
                    self._files.put_file(str(path), target)

    def download(self, name: str, target: Path) -> None:
        """Copy the file or folder ``name`` to ``target``, which must not exist if it is a folder.

        Raises:
            ResourceError: it cannot be read.
        """
        with self._explained(f"{self.url}/{name} cannot be copied to {target}"):
            self._files.get(self._at(name), str(target), recursive=True)

    def read_text(self, name: str) -> str | None:
        """Return the content of a text file; None if there is none.

        Raises:
            ResourceError: it cannot be read.
        """
        with self._explained(f"{self.url}/{name} cannot be read"):
            # A listing may be cached, from before the last write.
            self._files.invalidate_cache()
            if not self._files.exists(self._at(name)):
                return None
            content: Any = self._files.cat_file(self._at(name))
            return bytes(content).decode()

    def write_text(self, name: str, text: str) -> None:
        """Write a text file; raises ResourceError if it cannot be written."""
        with self._explained(f"{self.url}/{name} cannot be written"):
            self._files.pipe_file(self._at(name), text.encode())

    def names(self, name: str) -> list[str]:
        """Return the names in the folder ``name``, none without it; raises ResourceError if it cannot be listed."""
        with self._explained(f"{self.url}/{name} cannot be listed"):
            self._files.invalidate_cache()
            if not self._files.isdir(self._at(name)):
                return []
            return [str(entry).rstrip("/").rpartition("/")[2] for entry in self._files.ls(self._at(name), detail=False)]

    def remove(self, name: str) -> None:
        """Remove a file or folder if it exists; raises ResourceError if that fails."""
        with self._explained(f"{self.url}/{name} cannot be removed"):
            if self._files.exists(self._at(name)):
                self._files.rm(self._at(name), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}".rstrip("/")

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            raise ResourceError(f"{what}: {explain_url(self.url, error)}") from error


def _list_names(path: str) -> list[str]:
    """Return the name of a file, or the names in a folder; none if there is neither."""
    files, root = _open(path)
    try:
        listed = [root] if files.isfile(root) else files.ls(root, detail=False)
    except FileNotFoundError:
        return []
    return [str(entry).rstrip("/").rpartition("/")[2] for entry in listed]


def _open(path: str) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path on it."""
    from fsspec.core import url_to_fs

    files, root = url_to_fs(str(Path(path).expanduser().absolute()) if not is_url(path) else path)
    return files, str(root)


def _expand(pattern: str, key: str) -> list[str]:
    shown = f"{key}: {pattern}" if key else pattern
    try:
        files, path = _open(pattern)
        matches = sorted(str(name) for name in files.glob(path)) if re.search(r"[*?\[]", path) else [path]
    except _FAILURES as error:
        raise ConfigError(f"{shown} cannot be read: {explain_url(pattern, error)}") from error
    if not matches:
        raise ConfigError(f"no file matches {shown}")
    return [pattern] if matches == [path] else [str(files.unstrip_protocol(match)) for match in matches]


def _read_fingerprint(files: Any, path: str) -> tuple[str, int]:
    """Return the digest of the files below ``path``, and their size in bytes."""
    info: Mapping[str, Any] = files.info(path)
    listed = [info] if info["type"] == "file" else list(files.find(path, detail=True).values())
    if not listed:
        raise FileNotFoundError(f"{path} has no files")
    rows = sorted(
        (str(details["name"]).removeprefix(path), int(details["size"] or 0), _version(details)) for details in listed
    )
    return hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest(), sum(size for _, size, _ in rows)


def _version(info: Mapping[str, Any]) -> str:
    return next((str(info[key]) for key in _VERSIONS if info.get(key)), "")


def _cache_folder(in_memory: bool) -> Path:
    name = f"rollcast-cache-{os.getuid()}"
    if in_memory:
        return _SHARED_MEMORY / name
    chosen = os.environ.get("ROLLCAST_CACHE_DIR")
    return Path(chosen).absolute() if chosen else Path(tempfile.gettempdir()) / name


@cache
def _marked_fields(schema: type) -> dict[str, CopiedToNode | None]:
    """Return the fields that are marked, with the mark, and those that may hold a section, with None."""
    hints = typing.get_type_hints(schema, include_extras=True)
    marks_by_field: dict[str, CopiedToNode | None] = {}
    for field in dataclasses.fields(schema):
        kinds = [hints[field.name], *typing.get_args(hints[field.name])]
        marks = [mark for kind in kinds for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, CopiedToNode)]
        if marks:
            marks_by_field[field.name] = marks[0]
        elif any(dataclasses.is_dataclass(kind) for kind in kinds):
            marks_by_field[field.name] = None
    return marks_by_field


def _make_private(folder: Path) -> None:
    """Create a folder that only this user can write to; the temporary folder is everybody's.

    Raises:
        ResourceError: the folder exists and belongs to somebody else.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ResourceError(
            f"{folder} belongs to another user, who could change the models in it; remove it, or set "
            "ROLLCAST_CACHE_DIR to a folder of your own"
        )


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _link_file(source: str, target: str) -> None:
    Path(target).symlink_to(os.path.realpath(source))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
