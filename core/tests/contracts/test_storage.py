"""Remote storage: copies on a node, sections with URLs, folders at a URL."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rollcast import ClassWithInitArgs
from rollcast.contracts.config import config
from rollcast.contracts.storage import NodeCopies, NodeCopy, NodePath, RemoteFolder, fetch_files, is_url
from rollcast.errors import ConfigError, ResourceError

BIG = 200_000


@config
class Weights:
    """A section with a marked path."""

    path: NodePath = ""
    other: NodePath | None = None
    plain: str = "s3://left/alone"
    use_shm: bool = False


@config
class Both:
    """A section with a section."""

    weights: Weights | None = None
    number: int = 1


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLCAST_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def memory() -> Iterator[Any]:
    files = MemoryFileSystem()
    files.pipe_file("/bucket/model/config.json", b"{}")
    files.pipe_file("/bucket/model/deep/weights.bin", b"w" * BIG)
    yield files
    files.rm("/", recursive=True)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://bucket/x", True),
        ("memory://x", True),
        ("simplecache::gs://b/x", True),
        ("file:///tmp/x", True),
        ("/a/b", False),
        ("a://", True),
        ("models/x", False),
        ("C:/models", False),
        ("", False),
    ],
)
def test_is_url(path: str, expected: bool) -> None:
    assert is_url(path) is expected


def test_a_section_gets_the_path_of_a_copy(memory: Any, cache: Path) -> None:
    copies = NodeCopies()
    section = Both(Weights(path="memory://bucket/model", other="/local"))
    placed = copies.place(section, "it")
    assert placed.weights is not None
    assert placed.weights.plain == "s3://left/alone"
    assert placed.weights.other == "/local"
    folder = Path(placed.weights.path)
    assert folder.name == "model"
    assert folder.is_relative_to(cache)
    assert not folder.exists()
    copies.make()
    assert (folder / "config.json").read_bytes() == b"{}"
    assert (folder / "deep" / "weights.bin").stat().st_size == BIG
    assert copies.planned[0].size == BIG + 2
    assert section.weights is not None
    assert section.weights.path == "memory://bucket/model"


def test_a_section_without_urls_is_returned_as_it_is() -> None:
    section = Both(Weights(path="/local"))
    copies = NodeCopies()
    assert copies.place(section) is section
    assert copies.planned == ()


def test_a_url_is_copied_once(memory: Any) -> None:
    first, second = NodeCopies(), NodeCopies()
    paths = [each.plan("memory://bucket/model").make() for each in (first, second)]
    assert paths[0] == paths[1]
    stamp = (paths[0] / "config.json").stat().st_mtime_ns
    second.make()
    assert (paths[0] / "config.json").stat().st_mtime_ns == stamp


def test_another_content_gets_another_copy(memory: Any) -> None:
    old = NodeCopies().plan("memory://bucket/model").make()
    memory.pipe_file("/bucket/model/config.json", b'{"a": 1}')
    new = NodeCopies().plan("memory://bucket/model").make()
    assert old != new
    assert (new / "config.json").read_bytes() == b'{"a": 1}'
    assert (old / "config.json").read_bytes() == b"{}"


def test_a_source_that_changed_since_the_start_is_refused(memory: Any) -> None:
    """Else a node that starts later would train other weights than the rest."""
    copy = NodeCopies().plan("memory://bucket/model")
    memory.pipe_file("/bucket/model/config.json", b'{"a": 1}')
    with pytest.raises(ResourceError, match="memory://bucket/model has changed since the run started"):
        copy.make()


def test_a_killed_copy_is_not_taken_for_a_complete_one(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = NodeCopies().plan("memory://bucket/model")
    calls: list[str] = []

    def broken(path: str, target: str, **_: Any) -> None:
        Path(target).mkdir()
        (Path(target) / "config.json").write_text("{")
        calls.append(target)
        raise OSError("connection lost")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get", lambda self, *a, **k: broken(*a, **k))
        with pytest.raises(ResourceError, match="memory://bucket/model cannot be copied: connection lost"):
            copy.make()
    assert calls
    assert not Path(copy.target).exists()
    assert (copy.make() / "config.json").read_bytes() == b"{}"


def test_the_cache_is_private(memory: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = NodeCopies().plan("memory://bucket/model/config.json")
    assert copy.make().read_bytes() == b"{}"
    assert cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    other = NodeCopies().plan("memory://bucket/model")
    with pytest.raises(ResourceError, match="belongs to another user"):
        other.make()


def test_a_full_disk_is_named(memory: Any) -> None:
    plan = NodeCopies().plan("memory://bucket/model")
    copy = NodeCopy(plan.source, plan.target, plan.fingerprint, 1 << 60)
    with pytest.raises(ResourceError, match=r"needs 1073741824.0 GiB in .*ROLLCAST_CACHE_DIR"):
        copy.make()


def test_shared_memory_takes_local_paths_too(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    copies = NodeCopies()
    placed = copies.place(Weights(path=str(tmp_path / "model"), use_shm=True))
    copies.make()
    try:
        assert placed.path.startswith(f"/dev/shm/rollcast-cache-{os.getuid()}/")
        assert (Path(placed.path) / "config.json").read_text() == "{}"
    finally:
        for each in Path(placed.path).parent.iterdir():
            each.unlink() if each.is_file() else [file.unlink() for file in each.iterdir()]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://bucket/none", "it.path=memory://bucket/none cannot be read"),
        ("nofs://x", "it.path=nofs://x cannot be read: fsspec has no file system 'nofs'; it has .*s3"),
    ],
)
def test_an_unreadable_url_names_key_and_reason(memory: Any, url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        NodeCopies().place(Weights(path=url), "it")


def test_files_of_a_glob_are_copied_in_order(memory: Any) -> None:
    for name in ("b", "a"):
        memory.pipe_file(f"/data/{name}.jsonl", name.encode())
    found = fetch_files(["memory://data/*.jsonl", "local/*.jsonl", "memory://data/b.jsonl"])
    assert [Path(each).name for each in found] == ["a.jsonl", "b.jsonl", "*.jsonl", "b.jsonl"]
    assert Path(found[0]).read_text() == "a"
    with pytest.raises(ConfigError, match=r"no file matches data.train_files: memory://data/\*.parquet"):
        fetch_files(["memory://data/*.parquet"], "data.train_files")


def test_a_worker_waits_for_the_copies_of_its_node(memory: Any) -> None:
    copies = NodeCopies()
    placed = copies.place(Weights(path="memory://bucket/model"))
    worker = ClassWithInitArgs(Reader, placed.path).with_options(copies=copies.planned)
    assert worker().text == "{}"


class Reader:
    def __init__(self, path: str) -> None:
        self.text = (Path(path) / "config.json").read_text()


def _copy_beside(copy: NodeCopy, log: str) -> None:
    import logging

    logging.basicConfig(filename=log, level=logging.INFO, force=True)
    copy.make()


def test_one_process_of_a_node_copies(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_bytes(b"w" * BIG)
    copy = NodeCopies().plan(f"file://{tmp_path}/model")
    log = tmp_path / "log"
    spawning = multiprocessing.get_context("fork")
    processes = [spawning.Process(target=_copy_beside, args=(copy, str(log))) for _ in range(4)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(60)
        assert each.exitcode == 0
    assert log.read_text().count("copied file://") == 1
    assert [each.name for each in Path(copy.target).iterdir()] == ["weights.bin"]


def test_a_folder_goes_to_a_url_and_back(memory: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "a.txt").write_text("a")
    (source / "deep" / "b.txt").write_text("b")
    remote = RemoteFolder("memory://runs/one", "key")
    assert remote.names("checkpoints") == []
    assert remote.read_text("latest") is None
    remote.upload(source, "checkpoints/step_1")
    remote.write_text("latest", "step_1")
    assert remote.names("checkpoints") == ["step_1"]
    assert remote.read_text("latest") == "step_1"
    remote.download("checkpoints/step_1", tmp_path / "back")
    assert (tmp_path / "back" / "deep" / "b.txt").read_text() == "b"
    (source / "a.txt").unlink()
    remote.upload(source, "checkpoints/step_1")
    assert sorted(remote.names("checkpoints/step_1")) == ["deep"]
    remote.remove("checkpoints/step_1")
    remote.remove("checkpoints/step_1")
    assert remote.names("checkpoints") == []
    with pytest.raises(ResourceError, match="memory://runs/one/none cannot be copied to"):
        remote.download("none", tmp_path / "none")
