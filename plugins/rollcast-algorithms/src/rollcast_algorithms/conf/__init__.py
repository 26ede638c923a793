"""The config group ``algorithm``: one option per built-in advantage estimator."""

from rollcast.contracts.config import ConfigSchema
from rollcast_algorithms.kl_controllers import kl_controllers
from rollcast_algorithms.schemas import AlgorithmConfig

__all__ = ["SCHEMAS", "kl_controllers"]  # imported to declare its registry, against which configs are checked

SCHEMAS = (ConfigSchema(path="algorithm", schema=AlgorithmConfig, group="algorithm"),)
