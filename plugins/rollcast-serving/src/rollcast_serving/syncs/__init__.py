"""How weights travel from a trainer to replicas."""
