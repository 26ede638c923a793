"""Contracts of the plugins that take part in a rollout of an agent."""
