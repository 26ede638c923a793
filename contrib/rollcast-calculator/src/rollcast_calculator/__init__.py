"""A worked example of agents, in which a tiny model learns to call a calculator and report its result."""
