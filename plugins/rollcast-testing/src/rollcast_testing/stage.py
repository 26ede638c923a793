"""The conformance suite of stages.

Example, in a plugin's tests::

    from rollcast_testing import StageSuite

    class TestDifficulty(StageSuite):
        name = "difficulty"
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from rollcast.contracts.stage import Stage, StageSpec, stages
from rollcast.protocol import DataProto
from rollcast_testing.tiny import jagged_batch

__all__ = ["FakeRun", "StageSuite"]


class FakeRun:
    """A run without workers, with a configuration and a record of the metrics of a stage.

    Args:
        config: configuration as nested mappings.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        from omegaconf import OmegaConf

        self.config = OmegaConf.create(dict(config))
        self.step = 1
        self.recorded: dict[str, float] = {}

    def section(self, path: str, schema: type) -> Any:
        """Return a section as an instance of its dataclass."""
        from omegaconf import OmegaConf

        node = OmegaConf.select(self.config, path)
        values = {} if node is None else OmegaConf.to_container(node)
        return schema(**{str(key): value for key, value in values.items()}) if isinstance(values, dict) else schema()

    def record(self, metrics: Mapping[str, float]) -> None:
        """Record metrics of the step."""
        self.recorded.update(metrics)

    def workers(self, role: str) -> Any:
        """Raise an error; override the fixture ``run`` for a stage that calls workers."""
        raise NotImplementedError(f"the run of StageSuite has no workers; role {role!r} was asked for")

    def call(self, role: str, method: str, batch: DataProto) -> DataProto:
        """Raise an error; override the fixture ``run`` for a stage that calls workers."""
        raise NotImplementedError(f"the run of StageSuite has no workers; {role}.{method} was called")


class StageSuite:
    """Conformance tests of one stage.

    Attributes:
        name: name of the stage in ``rollcast.stages``.
        config: sections of the configuration that the stage reads.
    """

    name: ClassVar[str] = ""
    config: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def run(self) -> Any:
        """Return the run from which the stage is built."""
        return FakeRun(self.config)

    @pytest.fixture
    def stage(self, run: Any) -> Stage:
        """Build the stage under test; by default the plugin :attr:`name`."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name` or override the fixture `stage`")
        return stages.get(self.name, requested_by=f"{type(self).__name__}.name")(run)

    @pytest.fixture
    def spec(self, stage: Stage, run: Any) -> StageSpec:
        """Return the stage's declaration; fail if the stage takes no part in the run."""
        spec = type(stage).declare(run)
        if spec is None:
            pytest.fail("the stage has no part in a run with this configuration; set `config`")
        return spec

    def batch(self) -> DataProto:
        """Return six rows, two per prompt, with the columns of a scored batch; token columns are jagged."""
        generator = torch.Generator().manual_seed(0)
        lengths = torch.tensor([4, 1, 3, 0, 2, 4])
        mask = (torch.arange(4) < lengths.unsqueeze(-1)).long()
        prompts = torch.randint(5, 30, (6, 3), generator=generator)
        responses = torch.randint(5, 30, (6, 4), generator=generator) * mask
        attention = torch.cat([torch.ones_like(prompts), mask], 1)
        scores = torch.zeros(6, 4)
        scores[:, 0] = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5, -1.0])
        log_probs = -torch.rand((6, 4), generator=generator) * mask
        advantages = torch.randn((6, 4), generator=generator) * mask
        tensors = {
            "uid": torch.arange(6) // 2,
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": mask,
            "finished": torch.tensor([True, True, False, True, True, False]),
            **{name: log_probs.clone() for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob")},
            **{name: scores.clone() for name in ("token_level_scores", "token_level_rewards")},
            **{name: advantages.clone() for name in ("values", "advantages", "returns")},
        }
        objects = {"data_source": ["a"] * 6, "ground_truth": ["1"] * 6, "raw_prompt": ["p"] * 6, "extra_info": [{}] * 6}
        return jagged_batch(DataProto.from_dict(tensors, objects))

    def test_the_declaration_is_the_same_each_time(self, stage: Stage, run: Any) -> None:
        assert type(stage).declare(run) == type(stage).declare(run)

    def test_it_writes_what_it_declares(self, stage: Stage, spec: StageSpec) -> None:
        before = self.batch()
        after = stage(before)
        missing = [name for name in spec.writes if not name.endswith("/") and name not in after]
        assert not missing, f"declared, but not written: {', '.join(missing)}"
        new = [name for name in after.keys() if name not in before]  # noqa: SIM118  # a batch is no mapping
        prefixes = tuple(name for name in spec.writes if name.endswith("/"))
        undeclared = [name for name in new if name not in spec.writes and not (prefixes and name.startswith(prefixes))]
        assert not undeclared, f"written, but not declared: {', '.join(undeclared)}"

    def test_it_keeps_the_rows_and_the_other_columns(self, stage: Stage, spec: StageSpec) -> None:
        if spec.changes_rows:
            pytest.skip("the stage changes rows")
        before = self.batch()
        after = stage(before)
        assert len(after) == len(before)
        for name in before.keys():  # noqa: SIM118
            if name not in spec.writes and isinstance(before[name], torch.Tensor):
                assert name in after, f"the column {name!r} is gone"
                assert after.select([name], []).equal(before.select([name], [])), (
                    f"the column {name!r} changed, which is not declared"
                )

    def test_it_leaves_its_batch_as_it_is(self, stage: Stage) -> None:
        before = self.batch()
        copied = before.clone()
        stage(before)
        for name in copied.keys():  # noqa: SIM118
            if isinstance(copied[name], torch.Tensor):
                assert before.select([name], []).equal(copied.select([name], [])), (
                    f"the column {name!r} of the given batch was written into"
                )

    def test_it_reads_only_what_it_declares(self, stage: Stage, spec: StageSpec) -> None:
        before = self.batch()
        declared = {*spec.reads, *spec.optional, *(column for column in spec.after if column in before)}
        unread = [name for name in before.keys() if name not in declared]  # noqa: SIM118
        if len(unread) == len(before.keys()):
            pytest.skip("the stage reads no column of the suite's batch")
        stage(before.drop(unread))

    def test_metrics_are_finite_numbers(self, stage: Stage, run: Any) -> None:
        stage(self.batch())
        recorded = copy.copy(getattr(run, "recorded", {}))
        for name, value in recorded.items():
            assert isinstance(value, float), f"{name} is {value!r}"
            assert value == value and abs(value) != float("inf"), f"{name} is {value}"

    def test_its_state_survives_a_checkpoint(self, stage: Stage) -> None:
        import json

        state = json.loads(json.dumps(stage.state_dict()))
        stage.load_state_dict(state)
        assert stage.state_dict() == state
