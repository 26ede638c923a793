"""Weight syncs: transports of weights from a trainer to replicas."""
