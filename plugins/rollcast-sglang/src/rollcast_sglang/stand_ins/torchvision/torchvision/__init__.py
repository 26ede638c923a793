"""Stand-in for torchvision, whose packages need CUDA: SGLang imports names of it that only image models use."""

from rollcast_sglang.stand_in import stand_in

__version__ = "0.0.0"
__getattr__ = stand_in(__name__)
