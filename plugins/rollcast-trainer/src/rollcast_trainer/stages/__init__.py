"""The stages of a training step with sampled responses."""
