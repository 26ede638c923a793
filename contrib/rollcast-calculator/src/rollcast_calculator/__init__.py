"""A worked example of agents: a tiny model learns to ask a calculator and to pass on its result."""
