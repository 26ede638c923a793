"""What runs in the processes of TensorRT-LLM."""
