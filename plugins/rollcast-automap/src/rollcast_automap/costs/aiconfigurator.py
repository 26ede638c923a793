"""The cost model ``aiconfigurator``: generation from measured kernel times, the rest from ``analytical``."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from rollcast.contracts.config import Positive, config
from rollcast.errors import ConfigError
from rollcast_automap.contract import (
    CostModelConfig,
    GenerationSpeed,
    Mode,
    ModelFacts,
    Placement,
    Pool,
    Problem,
    RoleSpec,
    StageCost,
    StageSpec,
)
from rollcast_automap.costs.analytical import AnalyticalConfig, AnalyticalCosts
from rollcast_automap.costs.decoding import read_decoding
from rollcast_automap.costs.length_curve import LengthCurve

__all__ = ["AiconfiguratorConfig", "AiconfiguratorCosts", "KernelTimes"]

#: Backend whose times stand in for rollouts that the database does not know.
_OTHERWISE = "vllm"
#: A layer with more stored weights than this multiple of a dense layer of its width is a mixture of experts.
_DENSE = 1.05
#: Suffixes of the names of operations between devices.
_WIRE = ("_ar", "_ar_1", "_ar_2", "_p2p")


@config
class AiconfiguratorConfig(AnalyticalConfig):
    """Keys of the kernel database. The other keys are those of ``analytical``, which prices all but generation."""

    backend: str = "auto"
    """Engine whose kernel times are used: `vllm`, `sglang` or `trtllm`. `auto` selects the rollout's own engine, or
    `vllm` if the database does not have that engine."""
    backend_version: str = "current"
    """Version of the engine, or `current`, `previous` or `next`."""
    systems: dict[str, str] = field(default_factory=dict)
    """Kind of device → its system in the database, such as `{h800: h100_sxm}`; by default `KIND_sxm` or `KIND`."""
    prefill_tokens: Positive = 8192
    """Prompt tokens of a prefill pass."""


@dataclass(frozen=True)
class KernelSeconds:
    """Duration of a pass.

    Attributes:
        busy: seconds of compute kernels on one device.
        wire: seconds of collectives.
    """

    busy: float
    wire: float


class KernelTimes:
    """Kernel times of a model on one system, engine and tensor-parallel size.

    Args:
        engine: compiled model of ``aiconfigurator_core``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._known: dict[tuple[str, int, int], KernelSeconds] = {}

    def prefill(self, rows: int, length: int) -> KernelSeconds:
        """Return the seconds of a pass over ``rows`` prompts of ``length`` tokens."""
        return self._ask("prefill", max(rows, 1), max(length, 1))

    def decode(self, rows: float, context: float) -> KernelSeconds:
        """Return the seconds of one token for each row; a fractional number of rows is interpolated linearly."""
        low, length = max(math.floor(rows), 1), max(round(context), 1)
        below = self._ask("decode", low, length)
        share = max(rows - low, 0.0)
        if not share:
            return below
        above = self._ask("decode", low + 1, length)
        return KernelSeconds(
            below.busy + share * (above.busy - below.busy), below.wire + share * (above.wire - below.wire)
        )

    def _ask(self, phase: str, rows: int, length: int) -> KernelSeconds:
        key = (phase, rows, length)
        if key not in self._known:
            if phase == "prefill":
                op_times, _ = self._engine.run_static_per_op(batch_size=rows, isl=length, osl=1, mode="static_ctx")
            else:
                op_times = self._engine.decode_step_per_op(rows, length, 2)
            times = {name: milliseconds * 1e-3 for name, milliseconds, *_ in op_times}
            wire = sum(seconds for name, seconds in times.items() if name.endswith(_WIRE))
            self._known[key] = KernelSeconds(sum(times.values()) - wire, wire)
        return self._known[key]


class AiconfiguratorCosts(AnalyticalCosts):
    """Prices of generation from measured kernels.

    The database gets a model's sizes, as those of a dense decoder in Llama's architecture; the model's name is not
    needed. The analytical price is used, and ``StageCost.note`` says so, in two cases: the database has no kernels for
    these sizes, or the model is a mixture of experts, whose experts a problem does not describe.

    Raises:
        ConfigError: the package is not installed, or has no such engine, version or system.
    """

    config_schema: ClassVar[type[CostModelConfig]] = AiconfiguratorConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.options: AiconfiguratorConfig = config
        self._times: dict[tuple[str, str, ModelFacts, int], KernelTimes | str] = {}
        try:
            import aiconfigurator_core.sdk  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "the cost model aiconfigurator needs the package aiconfigurator-core: "
                f'pip install "rollcast-automap[aiconfigurator]" ({error})'
            ) from error

    def stage_cost(self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode) -> StageCost:
        """Return the cost of a stage of one step, without its waits for other stages."""
        analytical = super().stage_cost(problem, stage, placement, pool, mode)
        if stage.kind != "generate":
            return analytical
        role = problem.role(stage.role)
        backend, note = self._backend(role)
        costs = [
            self._generation(problem, role, placement, analytical, system, backend)
            for system in sorted({self._system(problem, node, backend) for node, _ in pool.places})
        ]
        cost = max(costs, key=lambda candidate: candidate.seconds)
        return replace(cost, note="; ".join(filter(None, (note, cost.note))))

    def times(self, system: str, backend: str, model: ModelFacts, tensor: int) -> KernelTimes | str:
        """Return the kernel times of a model, or the reason why the database has none."""
        key = (system, backend, model, tensor)
        if key not in self._times:
            self._times[key] = self._compile(*key)
        return self._times[key]

    def _generation(
        self, problem: Problem, role: RoleSpec, at: Placement, analytical: StageCost, system: str, backend: str
    ) -> StageCost:
        times = self.times(system, backend, role.model, at.mesh.tensor)
        if isinstance(times, str):
            return replace(analytical, note=f"{times}: analytical")
        prompt, response = LengthCurve.read(problem.prompt_lengths), LengthCurve.read(problem.response_lengths)
        rows = math.ceil(problem.rows / at.mesh.data)
        prefill, together = self._prefill_pass(times, prompt.mean, rows)
        decoding = read_decoding(response, rows, at.micro_batch_rows, problem.rows)
        context = prompt.mean + response.mean_square / (2 * response.mean)
        whole = times.decode(decoding.slots, context)
        busy = prefill.busy * rows / together + decoding.equal * whole.busy
        wire = prefill.wire * rows / together + decoding.equal * whole.wire
        equal = decoding.equal * (whole.busy + whole.wire)
        seconds = 0.0
        for steps, active, done in decoding.phases:
            step = times.decode(active, prompt.mean + done)
            seconds += steps * (step.busy + step.wire)
        # The database does not split kernel times into compute and memory; the analytical price provides the ratio.
        known = analytical.compute + analytical.memory
        share = analytical.compute / known if known else 1.0
        return StageCost(busy * share, busy * (1 - share), wire, tail=max(seconds - equal, 0.0))

    def generation_speed(
        self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode
    ) -> GenerationSpeed | None:
        """Return the prefill and decoding speed of a replica of a generating stage, on the slowest of its devices."""
        role = problem.role(stage.role)
        backend, _ = self._backend(role)
        systems = sorted({self._system(problem, node, backend) for node, _ in pool.places})
        tables = [self.times(system, backend, role.model, placement.mesh.tensor) for system in systems]
        known = [table for table in tables if not isinstance(table, str)]
        if len(known) < len(tables):
            return super().generation_speed(problem, stage, placement, pool, mode)
        prompt = LengthCurve.read(problem.prompt_lengths).mean
        rows = math.ceil(problem.rows / placement.mesh.data)
        passes = [self._prefill_pass(table, prompt, rows) for table in known]

        def decode(active: float, context: float) -> float:
            steps = [table.decode(active, context) for table in known]
            return max(step.busy + step.wire for step in steps)

        return GenerationSpeed(max((cost.busy + cost.wire) / together for cost, together in passes), decode)

    def _prefill_pass(self, times: KernelTimes, prompt: float, rows: int) -> tuple[KernelSeconds, int]:
        """Return the time of a prefill pass over prompts of ``prompt`` tokens, and the prompts in the pass."""
        length = max(round(prompt), 1)
        together = min(max(self.options.prefill_tokens // length, 1), rows)
        return times.prefill(together, length), together

    @cached_property
    def _databases(self) -> dict[str, dict[str, list[str]]]:
        """System → engine → versions."""
        from aiconfigurator_core.sdk.perf_database import get_supported_databases

        return {system: dict(engines) for system, engines in get_supported_databases().items()}

    def _backend(self, role: RoleSpec) -> tuple[str, str]:
        """Return the engine whose kernel times price a role, and a note if it is not the role's own engine."""
        known = sorted({name for engines in self._databases.values() for name in engines})
        if self.options.backend == "auto":
            if role.plugin in known:
                return role.plugin, ""
            return _OTHERWISE, f"priced as {_OTHERWISE}: the database has no {role.plugin}"
        if self.options.backend not in known:
            raise ConfigError(f"cost_model.backend is {self.options.backend!r}; valid: auto, {', '.join(known)}")
        return self.options.backend, ""

    def _system(self, problem: Problem, node: int, backend: str) -> str:
        """Return the system of a node's devices.

        Raises:
            ConfigError: the database has no system for the devices, or none with measurements of the engine.
        """
        kind = problem.cluster.nodes[node].kind.name.partition("#")[0]
        known = sorted(system for system, engines in self._databases.items() if backend in engines)
        asked = self.options.systems.get(kind)
        system = asked or next((name for name in (f"{kind}_sxm", kind) if name in known), None)
        if system not in known:
            reason = f"cost_model.systems.{kind} is {asked!r}" if asked else f"the database has no system for {kind!r}"
            raise ConfigError(
                f"{reason}; {backend} was measured on {', '.join(known)}; choose the closest by "
                f"cost_model.systems.{kind}=SYSTEM, or the cost model analytical"
            )
        return system

    def _compile(self, system: str, backend: str, model: ModelFacts, tensor: int) -> KernelTimes | str:
        from aiconfigurator_core.sdk import EngineHandle
        from aiconfigurator_core.sdk.errors import InterpolationDataNotAvailableError, PerfDataNotAvailableError

        embeddings = model.hidden * model.vocab * (1 if model.tied else 2)
        stored = (model.parameters - embeddings) / model.layers
        attention = model.hidden * model.head_size * (2 * model.heads + 2 * model.kv_heads)
        if stored > _DENSE * (attention + 3 * model.hidden * model.ffn):
            return "a mixture of experts cannot be described to aiconfigurator by its sizes"
        try:
            version = self._version(system, backend)
            # The database assumes three feed-forward matrices. For models with two, choose the width that keeps the
            # number of weights.
            width = max(round((stored - attention) / (3 * model.hidden)), tensor)
            with TemporaryDirectory() as folder, _quiet():
                Path(folder, "config.json").write_text(json.dumps(_describe(model, width)))
                engine = EngineHandle.compile(folder, system, backend, backend_version=version, tp_size=tensor)
                times = KernelTimes(engine)
                # The database rejects sizes without measured kernels only at the first query, so query both phases now.
                times.prefill(1, 1)
                times.decode(1, 1)
        except (PerfDataNotAvailableError, InterpolationDataNotAvailableError):
            sizes = f"{model.heads} heads of {model.head_size}, {model.kv_heads} for keys, on {tensor} devices"
            return f"aiconfigurator has no kernels of {backend} on {system} for {sizes}"
        return times

    def _version(self, system: str, backend: str) -> str:
        from aiconfigurator_core.sdk.perf_database import resolve_query_version

        try:
            return str(resolve_query_version(system, backend, self.options.backend_version))
        except ValueError as error:
            raise ConfigError(
                f"cost_model.backend_version is {self.options.backend_version!r}; {backend} on {system} was measured "
                f"in the versions {', '.join(self._databases[system][backend])}; `current` is the default"
            ) from error


def _describe(model: ModelFacts, width: int) -> dict[str, Any]:
    """Return the ``config.json`` of a dense decoder with these sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": width,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "vocab_size": model.vocab,
        "max_position_embeddings": 1 << 20,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": model.tied,
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the database's warnings, which are about tables of models that are not priced here."""
    theirs = logging.getLogger("aiconfigurator_core")
    level = theirs.level
    theirs.setLevel(logging.ERROR)
    try:
        yield
    finally:
        theirs.setLevel(level)
