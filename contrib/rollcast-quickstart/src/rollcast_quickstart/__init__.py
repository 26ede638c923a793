"""The quick start of rollcast, in which a tiny model learns to sort digits by reinforcement learning."""
