"""The plan of a run, computed from its configuration: nothing is started, loaded or written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollcast.contracts.config import flatten
from rollcast.contracts.device import find_device
from rollcast.contracts.storage import is_url
from rollcast.errors import ConfigError
from rollcast_algorithms.schemas import AlgorithmConfig
from rollcast_automap.memory.memory_facts import placed_roles, plan_memory
from rollcast_automap.memory.role_specs import largest_pass
from rollcast_automap.memory.splits import check_engine
from rollcast_serving.contracts.admission import AdmissionSettings, admissions
from rollcast_serving.shapes import ReplicaShape, split_nodes
from rollcast_trainer.api import BatchAlgebra, CriticConfig, Role, RunSettings, train_batches

__all__ = ["Fact", "Plan", "plan_run"]


@dataclass(frozen=True)
class Fact:
    """One line of a plan.

    Attributes:
        key: name in JSON; empty for a line that is only in the text output.
        value: number or text; None if not known.
        text: line of the text output, including the value; empty for a fact that is only in JSON.
    """

    key: str
    value: Any
    text: str


@dataclass
class Plan:
    """The sections of a plan by title, and notes about it."""

    sections: dict[str, list[Fact]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_device_defaults(self, config: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
        """Add a section with the keys whose default the run's device decided; none if there are no such keys.

        Args:
            config: the run's config.
            reasons: dotted key → device and reason.
        """
        values = flatten(dict(config))
        facts = [
            Fact(key, values[key], f"{key}={_as_override(values[key])} (on {why})") for key, why in reasons.items()
        ]
        if facts:
            self.sections["defaults of the device"] = facts

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON: section → key → value, and ``notes``."""
        values = {title: {fact.key: fact.value for fact in facts if fact.key} for title, facts in self.sections.items()}
        return {**values, "notes": self.notes}


def plan_run(settings: RunSettings, read_data: bool = True, device_bytes: int | None = None) -> Plan:
    """Return the batch algebra, length, roles and memory of a run.

    Args:
        settings: settings of the run.
        read_data: read existing data files to count their rows.
        device_bytes: memory of each device, against which the run's memory is checked; None for no check.

    Raises:
        ConfigError, DataError: the model folder or the data cannot be used, or the engine rejects its keys.
    """
    check_engine(settings)
    plan = Plan()
    algebra = settings.algebra
    plan.sections["batch"] = _batch(settings, algebra, plan.notes)
    plan.sections["run"] = _run(settings, algebra, read_data, plan.notes)
    plan.sections["stages"] = _stages(settings)
    plan.sections["roles"] = _roles(settings)
    plan.sections["memory"] = [Fact(*fact) for fact in plan_memory(settings, algebra, plan.notes, device_bytes)]
    _note_generation(settings, plan.notes)
    _note_precision(settings, plan.notes)
    warm_start = settings.trainer.warm_start
    if warm_start is not None:
        plan.notes.append(f"recipe {warm_start} is trained first, in {settings.run_dir / 'warm_start'}")
    goal = settings.trainer.stop_at
    if goal.patience is not None:
        plan.notes.append(
            f"trainer.stop_at may end the run before its last step, after {goal.patience} validations without a new "
            f"highest {goal.metric}"
        )
    if goal.value is not None:
        plan.notes.append(f"trainer.stop_at may end the run before its last step, at {goal.metric} >= {goal.value:g}")
    return plan


def _batch(settings: RunSettings, algebra: BatchAlgebra, notes: list[str]) -> list[Fact]:
    data, ranks = settings.data, algebra.dp_size
    longest = data.max_prompt_length + data.max_response_length
    mini_rows = algebra.mini_batch_prompts * algebra.samples
    passes = -(-algebra.rows_per_rank // largest_pass(algebra, longest))
    steps = algebra.mini_batches * algebra.epochs
    _note_remainders(algebra, mini_rows, notes)
    most = "at most " if algebra.micro_batch_tokens is not None else ""
    has_critic = Role.CRITIC in settings.roles
    critic = settings.section("critic", CriticConfig) if has_critic else None
    per_mini = f"{_count(mini_rows, 'row')} ({_count(algebra.mini_batch_prompts, 'prompt')})"
    return [
        Fact("prompts", algebra.prompts, f"{_count(algebra.prompts, 'prompt')} a step"),
        Fact("samples", algebra.samples, f"{_count(algebra.samples, 'sample')} a prompt"),
        Fact("rows", algebra.rows, f"{_count(algebra.rows, 'row')} a step"),
        Fact("row_tokens", longest, f"{_count(longest, 'token')} a row at most"),
        Fact("tokens", algebra.rows * longest, f"{_count(algebra.rows * longest, 'token')} a step at most"),
        Fact("mini_batches", algebra.mini_batches, f"{_count(algebra.mini_batches, 'mini-batch')} of {per_mini}"),
        Fact("epochs", algebra.epochs, f"{_count(algebra.epochs, 'pass')} over them"),
        Fact("optimizer_steps", steps, f"{_count(steps, 'optimizer step')} a step"),
        Fact("ranks", ranks, _count(ranks, "data-parallel rank")),
        Fact("rows_per_rank", algebra.rows_per_rank, f"{_count(algebra.rows_per_rank, 'row')} of a mini-batch on each"),
        Fact("micro_batches_per_rank", passes, f"{most}{_count(passes, 'micro-batch')} of a mini-batch on each"),
        *_critic_facts(algebra, critic),
        *_staleness_facts(settings, algebra),
    ]


def _critic_facts(algebra: BatchAlgebra, critic: Any) -> list[Fact]:
    if critic is None:
        return []
    prompts = critic.ppo_mini_batch_size or algebra.mini_batch_prompts
    steps = max(algebra.prompts // prompts, 1) * critic.ppo_epochs
    return [Fact("critic_optimizer_steps", steps, f"{_count(steps, 'optimizer step')} of the critic a step")]


def _staleness_facts(settings: RunSettings, algebra: BatchAlgebra) -> list[Fact]:
    """Return the facts about rollouts that start ahead; none if generation and training take turns."""
    staleness = settings.max_staleness
    if not staleness:
        return []
    name = settings.trainer.admission
    age = admissions.get(name)(AdmissionSettings(staleness, algebra.prompts)).max_age
    promised = "no bound" if age is None else f"at most {_count(age, 'version')}"
    return [
        Fact("max_staleness", staleness, f"rollouts start up to {_count(staleness, 'step')} ahead of training"),
        Fact("max_age", age, f"age of a trained token: {promised} (trainer.admission={name})"),
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else _plural(noun)}"


def _as_override(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


def _plural(noun: str) -> str:
    return f"{noun}{'es' if noun.endswith(('ch', 'ss')) else 's'}"


def _note_remainders(algebra: BatchAlgebra, mini_rows: int, notes: list[str]) -> None:
    filler = algebra.rows_per_rank * algebra.dp_size - mini_rows
    if filler:
        valid = [
            size
            for size in range(1, algebra.prompts + 1)
            if algebra.prompts % size == 0 and size * algebra.samples % algebra.dp_size == 0
        ]
        near = nearest(algebra.mini_batch_prompts, valid)
        better = f"nearest without: actor.ppo_mini_batch_size={near}" if near else "no mini-batch of this batch would"
        over = f"{mini_rows} rows of a mini-batch do not divide over {algebra.dp_size} ranks"
        notes.append(f"{over}: {_count(filler, 'row')} more to fill up; {better}")
    rows = algebra.micro_batch_rows
    if algebra.micro_batch_tokens is None and rows and algebra.rows_per_rank > rows and algebra.rows_per_rank % rows:
        valid = [size for size in range(1, algebra.rows_per_rank + 1) if algebra.rows_per_rank % size == 0]
        notes.append(
            f"{algebra.rows_per_rank} rows on a rank do not divide into micro-batches of {rows}: the last is smaller; "
            f"nearest that do: actor.ppo_micro_batch_size_per_gpu={nearest(rows, valid)}"
        )


def _note_precision(settings: RunSettings, notes: list[str]) -> None:
    """Add a note if the actor computes in float32 on a GPU, which then runs at a fraction of its speed."""
    on_gpu = find_device(settings.placement.device).name != "cpu"
    if not on_gpu or settings.engine_class.compute_dtype(settings.engine) != "float32":
        return
    fitting = {"param_dtype": "bf16", "use_remove_padding": True, "use_fused_kernels": True}
    missing = {key: value for key, value in fitting.items() if key in vars(settings.engine)}
    advice = " ".join(f"actor.engine.{key}={str(value).lower()}" for key, value in missing.items())
    advice = advice or "actor.engine.dtype=bf16"
    notes.append(
        f"actor.engine computes in float32, which is slow on {settings.placement.device} and takes twice bf16's memory "
        f"for activations; try {advice}"
    )


def _note_generation(settings: RunSettings, notes: list[str]) -> None:
    """Add notes about responses that a step generates beyond its rows."""
    names = [place.name for place in settings.places]
    if not {"filter_groups", "reward_baselines"} & set(names):
        return
    algorithm = settings.section("algorithm", AlgorithmConfig)
    if "filter_groups" in names:
        groups = algorithm.filter_groups
        most = _count(groups.max_num_gen_batches, "batch")
        notes.append(
            f"algorithm.filter_groups: up to {most} of {_count(settings.data.train_batch_size, 'prompt')} "
            "are read and answered in a step, so the data last for fewer steps"
        )
    if "reward_baselines" in names:
        notes.append(
            f"algorithm.adv_estimator={algorithm.adv_estimator}: one additional greedy response to each prompt"
        )


def _stages(settings: RunSettings) -> list[Fact]:
    """Return the stages of a step in their order, with the role that computes each and the reason for it."""
    return [
        Fact(
            place.name,
            {"reason": place.reason, "roles": list(place.spec.roles), "reads": list(place.spec.reads)},
            f"{place.name} ({place.spec.roles[0] if place.spec.roles else 'driver'}): {place.reason}",
        )
        for place in settings.places
    ]


def nearest(wanted: int, valid: Sequence[int]) -> str:
    """Return the valid sizes next below and above ``wanted``, joined by "or"; empty if there are none."""
    below, above = [size for size in valid if size < wanted], [size for size in valid if size > wanted]
    return " or ".join(str(size) for size in (*below[-1:], *above[:1]))


# -- the length of the run ------------------------------------------------------------------------


def _run(settings: RunSettings, algebra: BatchAlgebra, read_data: bool, notes: list[str]) -> list[Fact]:
    keys = settings.trainer
    batches, rows = _count_rows(settings, read_data, notes)
    steps = keys.total_steps
    if steps is None and batches is not None:
        steps = keys.steps(batches)
    facts = [
        _fact("train_batches_per_epoch", batches, "training batch", " an epoch"),
        _fact("steps", steps, "training step"),
        _fact("optimizer_steps", _times(steps, algebra.mini_batches * algebra.epochs), "optimizer step", " in all"),
        _fact("rows", _times(steps, algebra.rows), "row", " in all"),
    ]
    validations: int | None = 0
    if settings.data.val_files:
        before = int(keys.val_before_train)
        validations = _add(_events(steps, keys.test_freq), before)
    samples = settings.rollout.val_kwargs.n
    facts += [
        _fact("validations", validations, "validation"),
        _fact("validation_samples", _times(rows, samples), "validation sample", f" each time, {samples} a prompt"),
    ]
    checkpoints = _events(steps, keys.save_freq)
    has_best = keys.keep_best_ckpt and bool(settings.data.val_files) and keys.test_freq > 0
    count = checkpoints if keys.max_ckpt_to_keep < 0 else keys.max_ckpt_to_keep + has_best
    if checkpoints is not None and count is not None:
        count = min(count, checkpoints)
    return [
        *facts,
        _fact("checkpoints", checkpoints, "checkpoint"),
        _fact("checkpoints_kept", count, "kept checkpoint", " at most"),
    ]


def _count_rows(settings: RunSettings, read_data: bool, notes: list[str]) -> tuple[int | None, int | None]:
    """Return the training batches of an epoch and the validation prompts, each None if not known."""
    data = settings.data
    if not data.train_files:
        raise ConfigError("data.train_files is empty; give at least one JSONL or Parquet file")
    unread = None if data.val_files else 0
    if not read_data:
        notes.append("the data files were not read")
        return None, unread
    files = [*data.train_files, *data.val_files]
    if data.preprocess is not None and not all(is_url(file) or Path(file).exists() for file in files):
        notes.append(f"the rows are not known yet: data.preprocess={data.preprocess} writes them when the run starts")
        return None, unread
    if not Path(settings.model.path).is_dir():
        notes.append("the rows are not known: measuring them needs the model's tokenizer, which does not exist yet")
        return None, unread
    validation = sum(len(batch) for batch in settings.trainer_class.val_batches(settings))
    return train_batches(settings).batches_per_epoch, validation


def _events(steps: int | None, every: int) -> int | None:
    """Return how often something happens that repeats every ``every`` steps and at the end of the run."""
    if every < 0:
        return 0
    return None if steps is None else -(-steps // every)


def _times(count: int | None, factor: int) -> int | None:
    return None if count is None else count * factor


def _add(count: int | None, more: int) -> int | None:
    return None if count is None else count + more


def _fact(key: str, value: int | None, noun: str, more: str = "") -> Fact:
    return Fact(key, value, f"{_plural(noun)}: not known" if value is None else f"{_count(value, noun)}{more}")


# -- the roles of each pool -----------------------------------------------------------------------


def _roles(settings: RunSettings) -> list[Fact]:
    facts = []
    for pool, roles in placed_roles(settings).items():
        counts = list(pool.process_on_nodes)
        device = settings.placement.device
        value = {"processes_on_nodes": counts, "device": device, "roles": roles}
        places = f"{_count(sum(counts), 'process')} on {_count(len(counts), 'node')}, device {device}"
        text = f"{pool.name}: {', '.join(roles)} ({places})"
        facts.append(Fact(pool.name, value, text))
    return [*facts, *_replicas(settings)]


def _replicas(settings: RunSettings) -> list[Fact]:
    """Return the fact about the rollout's replicas; none for a rollout in the actor's processes."""
    if not settings.uses_replicas:
        return []
    shape = ReplicaShape.of(settings.rollout)
    nodes = split_nodes(shape.size, settings.pools.get_resource_pool(Role.ROLLOUT).process_on_nodes)
    sizes = {key: size for key, size in shape.keys().items() if size > 1}
    widest = max(map(len, nodes))
    value = {"count": len(nodes), "devices": shape.size, "nodes": widest, "sizes": sizes}
    how = ", ".join(f"rollout.{key}={size}" for key, size in sizes.items())
    places = f"{_count(shape.size, 'device')} on {_count(widest, 'node')}"
    return [Fact("replicas", value, f"{_count(len(nodes), 'replica')} of {places}{f' ({how})' if how else ''}")]
