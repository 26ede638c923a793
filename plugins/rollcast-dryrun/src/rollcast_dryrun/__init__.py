"""Dry runs: code of CUDA ranks on a machine without a device, counted and checked."""
