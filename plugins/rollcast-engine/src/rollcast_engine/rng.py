"""A process's random state as plain tensors and numbers, so that loading it runs no code."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rollcast.contracts.device import device_rng_state, set_device_rng_state

__all__ = ["capture_rng", "derive_rng", "kept_rng", "restore_rng"]


def capture_rng() -> dict[str, Any]:
    """Return the random state of torch (host and current accelerator), Python and numpy in this process."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }
    return {**state, **device_rng_state()}


def restore_rng(state: dict[str, Any]) -> None:
    """Restore a random state that :func:`capture_rng` returned."""
    torch.set_rng_state(state["torch"])
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
    numpy = state["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    set_device_rng_state(state)


def derive_rng(rank: int) -> None:
    """Seed a stream of this rank's own from the current state."""
    seed = int(torch.randint(2**31, ())) + rank
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def kept_rng() -> Iterator[None]:
    """Restore torch's random state, that of the current accelerator too, after the block."""
    device = device_rng_state()
    try:
        # torch.manual_seed seeds every accelerator as well, and only named ones are restored here.
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        set_device_rng_state(device)
