"""Generation with transformers in the trainer's own process."""
