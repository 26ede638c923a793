"""Replicas of rollout engines: processes, routing, and the weights' way to them."""
