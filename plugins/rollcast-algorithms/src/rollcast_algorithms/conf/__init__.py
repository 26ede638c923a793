"""The config group ``algorithm``: one option per built-in advantage estimator."""

from rollcast.contracts.config import ConfigSchema
from rollcast_algorithms.schemas import AlgorithmConfig

__all__ = ["SCHEMAS"]

SCHEMAS = (ConfigSchema(path="algorithm", schema=AlgorithmConfig, group="algorithm"),)
