"""Generation with TensorRT-LLM."""
