"""Agents for rollcast: sessions that record, renderers, tools, environments, loops, a gateway."""
