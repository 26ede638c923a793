"""Replicas of rollout engines: their processes, request routing, and weight syncs."""
