"""A rollout for rollcast: transformers, one token at a time."""
