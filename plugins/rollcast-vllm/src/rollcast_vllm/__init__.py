"""Generation with vLLM."""
