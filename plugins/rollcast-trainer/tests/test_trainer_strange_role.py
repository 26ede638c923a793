"""A stranger's package with a role, its worker class, a pool and an engine of its own, beside an actor of FSDP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainer_tools import SmallTask, run_stages, set_up

from rollcast.config import compose
from rollcast.errors import ConfigError, PluginNotFoundError
from rollcast.plugins import discovery
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.settings import check_run

SCHEMAS = '''
from dataclasses import field
from typing import Annotated, Any

from rollcast.contracts.config import ConfigSchema, Hosts, Positive, config


@config
class TinyConfig:
    name: str = "tiny"
    """Registry name of the engine."""
    factor: Positive = 2
    """Factor of each value."""


@config
class GraderConfig:
    engine: Annotated[dict[str, Any], Hosts("engine", like="actor.engine")] = field(default_factory=dict)
    """The grader's engine."""


SCHEMAS = (
    ConfigSchema(path="grader", schema=GraderConfig),
    ConfigSchema(schema=TinyConfig, group="engine", option="tiny"),
)
'''
ENGINE = '''
from contextlib import nullcontext

from rollcast.contracts.engine import BaseEngine
from rollcast.errors import CapabilityError
from rollcast.protocol import DataProto
from tp_grader.conf import TinyConfig


def _untrained(self, *args, **options):
    raise CapabilityError("the tiny engine holds nothing to train or save")


class TinyEngine(BaseEngine):
    """Each response token's id times a factor, as its value."""

    config_schema = TinyConfig

    def initialize(self):
        self.factor = self.setup.engine.factor

    def train_mode(self):
        return nullcontext()

    eval_mode = train_mode

    def forward_backward_batch(self, data, loss_function, settings, forward_only=False):
        values = (data["responses"] * data["response_mask"]).float() * self.factor
        return DataProto.from_dict({"values": values}), {}

    def to(self, device, *, model=True, optimizer=True, grad=True):
        pass

    def get_data_parallel_rank(self):
        return self.setup.context.rank

    def get_data_parallel_size(self):
        return self.setup.context.world_size

    def get_data_parallel_group(self):
        return None

    optimizer_zero_grad = optimizer_step = lr_scheduler_step = current_lr = get_per_tensor_param = _untrained
    save_checkpoint = load_checkpoint = export = _untrained
    export_checkpoint = classmethod(_untrained)
'''
ROLE = """
from rollcast import Worker, register
from rollcast.contracts.engine import EngineSetup, ForwardSettings, engines
from rollcast.contracts.stage import Stage, StageSpec
from rollcast.protocol import DataProto
from rollcast_dispatch import make_nd_compute_dataproto_dispatch_fn


class Grader(Worker):
    mesh = "bench"

    def __init__(self, setup):
        self.setup = setup
        engine = engines.get(setup.engine.name, requested_by=f"{setup.key}.engine.name")
        self.engine = engine(
            EngineSetup("value_model", setup.model, setup.engine, None, self.context, setup.seed, setup.key)
        )

    @register(dispatch_mode="one_to_all")
    def init_model(self):
        self.engine.initialize()
        self.register_mesh("bench", self.engine.get_data_parallel_rank(), True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("bench"))
    def grader(self, data):
        output, _ = self.engine.infer_batch(data, ForwardSettings())
        return DataProto.from_dict({"graded": output["values"].sum(-1)})


class Grading(Stage):
    spec = StageSpec(reads=("responses", "response_mask"), writes=("graded",), roles=("grader",))

    def __call__(self, batch):
        return batch.joined(self.run.call("grader", Grader.grader, batch.select(["prompts", "responses", "response_mask"])))
"""
ENTRY_POINTS = """
[rollcast.configs]
tp_grader = tp_grader.conf
[rollcast.engines]
tiny = tp_grader.engine:TinyEngine
[rollcast.roles]
grader = tp_grader.role:Grader
[rollcast.stages]
grading = tp_grader.role:Grading
"""


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package on ``sys.path``, with its metadata."""
    site = tmp_path_factory.mktemp("site")
    info, package = site / "tp_grader-1.0.dist-info", site / "tp_grader"
    (package / "conf").mkdir(parents=True)
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tp-grader\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (package / "__init__.py").touch()
    for name, source in (("conf/__init__.py", SCHEMAS), ("engine.py", ENGINE), ("role.py", ROLE)):
        (package / name).write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        discovery.refresh()
        yield
    discovery.refresh()


POOL = ["placement.pools={bench: [1]}", "placement.mapping={grader: bench}"]


@pytest.mark.usefixtures("stranger")
def test_a_strangers_role_runs_on_its_engine_in_its_pool(small_task: SmallTask, tmp_path: Path) -> None:
    changes = ["trainer.stages.insert=[grading]", "grader.engine.name=tiny", "grader.engine.factor=3", *POOL]
    with set_up(small_task.ppo(tmp_path, *changes)) as trainer:
        batch = run_stages(trainer, until="grading")
        assert torch.equal(batch["graded"], 3.0 * (batch["responses"] * batch["response_mask"]).sum(-1))
        graders, actors = trainer.run.groups["grader"], trainer.run.groups["actor_rollout"]
        assert graders.name != actors.name
        assert graders.workers[0].handle.workers["grader"].setup.key == "grader"
        assert trainer.run.settings.engine.name == "fsdp"


@pytest.mark.usefixtures("stranger")
def test_a_strangers_role_has_the_actors_engine_by_default(small_task: SmallTask, tmp_path: Path) -> None:
    config = compose(small_task.ppo(tmp_path, "actor.engine.model_dtype=bf16")).config
    assert check_run(config, PpoTrainer).role_engine("grader").model_dtype == "bf16"


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            "grader.engine={name: tiny, factr: 3}",
            ConfigError,
            r"'grader\.engine\.factr'; did you mean 'grader\.engine\.fac",
        ),
        ("grader.engine={name: tiny, factor: 0}", ConfigError, r"grader\.engine\.factor must be at least 1, got 0"),
        ("grader.engine={name: tiny, param_offload: true}", ConfigError, r"no key 'grader\.engine\.param_offload'"),
        ("grader.engine.name=tny", PluginNotFoundError, r"'tny'[\s\S]*grader\.engine\.name[\s\S]*mean 'tiny'"),
    ],
)
def test_mistakes_in_a_strangers_section_are_named(
    small_task: SmallTask, tmp_path: Path, change: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        compose(small_task.ppo(tmp_path, change))
