"""A pretrained language model, SmolLM2-135M, learns on a CPU to answer with one word."""
