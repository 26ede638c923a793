"""Stand-in for SGLang's CPU kernels, which few CPUs support: SGLang imports their names, and computes with torch."""

from rollcast_sglang.stand_in import stand_in

__getattr__ = stand_in(__name__)
