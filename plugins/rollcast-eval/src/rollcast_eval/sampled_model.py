"""The model of a command that samples: its config sections, and the replicas that serve it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from rollcast import WorkerGroup, build_section, start_groups
from rollcast.contracts.engine import ModelConfig
from rollcast.contracts.rollout import BaseRollout, rollouts
from rollcast.contracts.runtime import Runtime, runtimes
from rollcast.contracts.sections import PlacementConfig
from rollcast.contracts.storage import NodeCopies
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast_data.tokenizer import load_tokenizer, read_stop_token_ids
from rollcast_serving.engines.arguments import check_device_arguments
from rollcast_serving.pools import ROLLOUT, build_pools
from rollcast_serving.replicas import Replicas
from rollcast_serving.requests import check_sampling, check_token_ids, configured_sampling
from rollcast_serving.served import ServedModel, ServedRole
from rollcast_serving.shapes import ReplicaShape, check_shape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SampledModel"]


class SampledModel:
    """A model, and the rollout and placement of its replicas.

    Args:
        config: config composed with ``trainer=sample``.

    Raises:
        RollcastError: a section is not usable; nothing has been started.
    """

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self._copies = NodeCopies()
        self.model: ModelConfig = self.section("model", ModelConfig)
        self._rollout_class: type[BaseRollout] = rollouts.get(config.rollout.name, requested_by="rollout.name")
        self.rollout: Any = self.section("rollout", self._rollout_class.config_schema)
        check_sampling("rollout", configured_sampling(self.rollout, 1), self._rollout_class.capabilities)
        self.placement: PlacementConfig = self.section("placement", PlacementConfig)
        self.pools = build_pools(self.placement)
        self.role = ServedRole(ROLLOUT, "rollout", self.rollout, self._rollout_class)
        check_shape(ReplicaShape.of(self.rollout), self._rollout_class.capabilities, self.rollout.name)
        check_device_arguments(self.rollout)
        self.role.check_nodes(self.pools.get_resource_pool(ROLLOUT).process_on_nodes)

    def section(self, path: str, schema: type) -> Any:
        """Return a section of the config as an instance of its dataclass, with the paths of copies on this node."""
        return self._copies.place(build_section(schema, OmegaConf.select(self._config, path), path), path)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Copy the model to this node if it is remote; check the rollout's token ids, and return the tokenizer."""
        self._copies.make()
        check_token_ids(self.rollout, self.model.path)
        self._tokenizer = load_tokenizer(self.model.path, self.model.trust_remote_code)
        return self._tokenizer

    @contextmanager
    def serve(
        self, seed: int, workers: Mapping[Hashable, ClassWithInitArgs[Any]] | None = None
    ) -> Iterator[tuple[Replicas, Mapping[Hashable, WorkerGroup], Runtime]]:
        """Start a runtime and the replicas, with workers of other roles beside them; stop all when the block ends.

        Call :meth:`load_tokenizer` first.

        Args:
            seed: seed of the first replica's sampler.
            workers: role → worker class.

        Yields:
            The replicas, the groups by role, and the runtime.
        """
        runtime_class = runtimes.get(self._config.runtime.name, requested_by="runtime.name")
        settings = self.section("runtime", runtime_class.config_schema)
        processes = sum(pool.world_size for pool in self.pools.resource_pool_dict.values())
        stop_token_ids = read_stop_token_ids(self.model.path, self._tokenizer)
        model = ServedModel.of(self.model.path, self._tokenizer, stop_token_ids, self.model.trust_remote_code)
        roles = {ROLLOUT: self.role.worker(model, seed, self.placement.device), **(workers or {})}
        copied = {role: worker.with_options(copies=self._copies.planned) for role, worker in roles.items()}
        runtime: Runtime = runtime_class.from_config(settings, processes=processes)
        try:
            groups = start_groups(self.pools, copied, runtime=runtime)
            replicas = self.role.start(groups[ROLLOUT], runtime)
            try:
                yield replicas, groups, runtime
            finally:
                replicas.close()
        finally:
            runtime.shutdown()
