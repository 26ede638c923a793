"""rollcast's quick start: a tiny model learns to sort digits by reinforcement learning."""
