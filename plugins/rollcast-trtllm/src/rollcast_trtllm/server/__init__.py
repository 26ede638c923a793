"""Code that runs in the processes of TensorRT-LLM."""
