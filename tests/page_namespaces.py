"""Namespaces in which the untitled Python of a page runs: what the page takes for granted.

Worker groups of these pages run on the simulated cluster, whose sizes are free: a pool of sixteen processes starts in
a moment, and the controller is the same. A statement whose comment begins with the name of an error has to raise it.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rollcast
from rollcast import ClassWithInitArgs, DataProto, Dispatch, ResourcePool, Worker, WorkerGroup, register
from rollcast.protocol import Jagged
from rollcast_testing import SimulatedRuntime

Namespace = dict[str, Any]
#: Key of the names that every block of a page finds anew, whatever the blocks before it did to them.
EACH = "for each block"


def run_block(text: str, page: str, line: int, namespace: Namespace) -> None:
    """Run a block statement by statement."""
    namespace.update(namespace.get(EACH, {}))
    source = textwrap.dedent(text)
    lines = source.splitlines()
    for node in ast.parse(source).body:
        comment = re.search(r"#\s*(\w+Error)\b", lines[(node.end_lineno or 1) - 1])
        ast.increment_lineno(node, line)
        code = compile(ast.Module([node], []), page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if comment is None:
            execute(code, namespace)
            continue
        with pytest.raises(Exception, match="") as caught:
            execute(code, namespace)
        assert comment[1] in {kind.__name__ for kind in type(caught.value).__mro__}, repr(caught.value)


def execute(code: Any, namespace: Namespace) -> None:
    """Run code that may await at its top level."""
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, namespace))
    else:
        exec(code, namespace)


class Policy(Worker):
    """Plays every worker that the pages call by name."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.register_mesh("actor", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, rows="same")
    def generate_sequences(self, data: DataProto) -> DataProto:
        mask = torch.ones(len(data), 3, dtype=torch.bool)
        columns = {"responses": torch.ones(len(data), 3), "response_mask": mask}
        return data.with_columns({**columns, "token_level_scores": torch.rand(len(data), 3)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, rows="same")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"old_log_probs": -torch.rand(len(data), 3)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, rows="same")
    def f(self, data: DataProto) -> DataProto:
        return data.with_columns({"y": data["x"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def g(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, data: Any) -> Any:
        return data

    def describe(self) -> int:
        return self.rank


@contextmanager
def cluster_of(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[SimulatedRuntime]:
    """A simulated cluster in the place of Ray."""
    import rollcast_ray
    import rollcast_ray.runtime
    from rollcast.protocol import meta_rules

    # A page registers this rule, which other tests of the process must not find.
    rule = meta_rules.temporarily("timing", None)
    with rule, SimulatedRuntime(nodes=4, processes_per_node=8, **options) as cluster:

        def group(pool: Any, roles: Any, *, detached: bool = False, **given: Any) -> WorkerGroup:
            made[given.get("name", "")] = WorkerGroup(pool, roles, runtime=cluster, **given)
            return made[given.get("name", "")]

        made: dict[str, WorkerGroup] = {}
        group.attach = made.__getitem__
        monkeypatch.setattr(rollcast_ray, "RayWorkerGroup", group)
        monkeypatch.setattr(rollcast_ray.runtime, "RayRuntime", lambda **_: cluster)
        yield cluster


def names() -> Namespace:
    """What the pages have imported somewhere before."""
    import pandas as pd

    from rollcast.contracts.dispatch import BatchType, batch_types
    from rollcast.errors import WorkerError

    known = {name: getattr(rollcast, name) for name in rollcast.__all__}
    known |= {"pandas": pd, "frame": pd.DataFrame({"x": [1, 2, 3, 4]}), "BatchType": BatchType}
    known |= {"batch_types": batch_types}
    return {**known, "torch": torch, "WorkerError": WorkerError, "__name__": "__main__"}


@contextmanager
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    yield {"__name__": "page"}


@contextmanager
def on_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    import rollcast_ray

    with cluster_of(monkeypatch, call_s={"worker.update": 5.0}) as cluster:
        actor, critic, group = (
            WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Policy), runtime=cluster, name=name)
            for name in ("actor", "critic", "group")
        )
        nodes = [replace(node, others={"accelerator_type:H100": 8.0}, free=None) for node in cluster.nodes()]
        h100s = SimpleNamespace(nodes=lambda: nodes)
        tokens = Jagged.from_lengths(torch.rand(10), torch.tensor([1, 2, 3, 4])).column()
        mask = Jagged.from_lengths(torch.ones(10, dtype=torch.bool), torch.tensor([1, 2, 3, 4])).column()
        batch = DataProto.from_dict({"x": torch.arange(8).view(4, 2), "response_mask": mask, "old_log_probs": tokens})
        namespace = names()
        namespace |= {"actor": actor, "critic": critic, "group": group, "batch": batch, "runtime": h100s}
        namespace |= {
            "config": {},
            "a": batch.select(["x"]),
            "prompts": DataProto.from_dict({"prompts": torch.ones(4, 2)}),
        }
        namespace |= {"MyWorker": Policy, "Server": Policy, "Actor": Configured, "Reference": Configured}
        namespace |= {"estimate": lambda scores, mask: scores, "function": lambda worker, argument: argument}
        namespace |= {"argument": 1, "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "is_last_stage": True}
        namespace["RayWorkerGroup"] = rollcast_ray.RayWorkerGroup
        nothing = SimpleNamespace(stages=[lambda batch: batch], register_mesh=lambda *_, **__: None)
        yield {
            **namespace,
            "self": nothing,
            "run": nothing,
            EACH: {"batch": batch, "group": group, "actor": actor, "critic": critic},
        }


class Configured(Policy):
    """A worker with a constructor argument."""

    def __init__(self, config: Any) -> None:
        self.config = config


SETUPS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "README.md": plain,
    "core/README.md": on_cluster,
    "docs/architecture.md": on_cluster,
    "docs/controller.md": on_cluster,
    "docs/debugging.md": plain,
    "docs/dispatch-modes.md": on_cluster,
    "docs/doctor.md": plain,
    "docs/engine-megatron.md": plain,
    "docs/engines.md": plain,
    "docs/placement.md": on_cluster,
    "docs/report.md": plain,
    "plugins/rollcast-algorithms/README.md": plain,
    "plugins/rollcast-dispatch/README.md": on_cluster,
    "plugins/rollcast-ray/README.md": on_cluster,
    "plugins/rollcast-rewards/README.md": plain,
    "plugins/rollcast-testing/README.md": plain,
    "plugins/rollcast-trainer/README.md": plain,
}


def setup(page: str) -> Callable[[Callable[[pytest.MonkeyPatch], Any]], Any]:
    """Add a page's own setup to ``SETUPS``."""

    def add(function: Callable[[pytest.MonkeyPatch], Any]) -> Any:
        SETUPS[page] = contextmanager(function)
        return function

    return add


@setup("docs/dry-runs.md")
@setup("plugins/rollcast-dryrun/README.md")
def dry_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    from rollcast_dryrun.native import find_compiler

    if find_compiler() is None:
        pytest.skip("a dry run needs a C++ compiler")
    yield {}


@setup("docs/conformance.md")
def conformance_page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    import rollcast_testing

    suites = {name: getattr(rollcast_testing, name) for name in dir(rollcast_testing) if name.endswith("Suite")}
    yield {**names(), **suites, "pytest": pytest, "half_k2": None, "__name__": "page"}


@setup("docs/stages.md")
def stages_page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    from dataclasses import field
    from typing import Annotated

    from rollcast.contracts.config import Hosts

    # As on the page, but for the two that read a class's documented fields from its source file.
    namespace = {"config": lambda cls: cls, "ConfigSchema": lambda path, schema: (path, schema)}
    yield {**namespace, "Annotated": Annotated, "Any": Any, "Hosts": Hosts, "field": field}


@setup("docs/profiling.md")
def profiling_page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    from code_blocks import blocks

    (table,) = (block.text for block in blocks("docs/profiling.md") if block.language == "json")
    assert json.loads(table)
    Path("costs.json").write_text(table)
    yield {}


@setup("docs/rollouts.md")
def rollouts_page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    openai = pytest.importorskip("openai")
    seen: dict[str, Any] = {}

    class Client:
        def __init__(self, base_url: str, api_key: str) -> None:
            seen["url"] = base_url
            create = lambda **given: seen.update(given)  # noqa: E731
            self.chat = SimpleNamespace(completions=SimpleNamespace(create=create))

    monkeypatch.setattr(openai, "OpenAI", Client)
    address = SimpleNamespace(openai_port=8000, token="secret")
    yield {"trainer": SimpleNamespace(sampler=SimpleNamespace(replicas=SimpleNamespace(addresses=[address])))}
    assert seen["url"] == "http://127.0.0.1:8000/v1"
    assert seen["messages"]


@setup("plugins/rollcast-agents/README.md")
def agents_readme(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    from rollcast_agents import records, session

    async def sample(messages: Any, tools: Any) -> Any:
        return SimpleNamespace(message=SimpleNamespace(tool_calls=[]), token_ids=[1], log_probs=[0.0])

    class Recording:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.sample, self.trajectories = sample, list

    monkeypatch.setattr(session, "RecordingSession", Recording)
    monkeypatch.setattr(records, "load_records", lambda path: [])
    engine, box = SimpleNamespace(generate=None), SimpleNamespace(schemas=[])
    yield {"engine": engine, "renderer": None, "sampling": None, "box": box}


@setup("plugins/rollcast-data/README.md")
def data_readme(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    from rollcast_testing.tiny import tiny_model_folder

    tiny_model_folder(Path("my-model"), weights=False)
    rows = [json.dumps({"prompt": f"{n}+1=", "ground_truth": str(n + 1)}) for n in range(128)]
    Path("train.jsonl").write_text("\n".join(rows) + "\n")
    yield {}


@contextmanager
def enter(page: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """The namespace of a page."""
    with SETUPS[page](monkeypatch) as namespace:
        yield namespace
