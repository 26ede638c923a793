"""Images in prompts: reading them, expanding their placeholder tokens, and the inputs of a vision-language model."""
