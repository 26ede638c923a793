"""In place of SGLang's CPU kernels, which exist for few CPUs: SGLang imports their names, and computes with torch."""

from rollcast_sglang.stand_in import stand_in

__getattr__ = stand_in(__name__)
