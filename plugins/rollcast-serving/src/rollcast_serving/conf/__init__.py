"""The registry of weight syncs, declared with the configuration, which checks ``rollout.weight_sync`` against it."""

from rollcast_serving.weight_sync import weight_syncs

__all__ = ["SCHEMAS", "weight_syncs"]

SCHEMAS = ()
