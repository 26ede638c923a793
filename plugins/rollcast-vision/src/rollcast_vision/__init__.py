"""Images in prompts: reading, placeholder tokens and model inputs."""
