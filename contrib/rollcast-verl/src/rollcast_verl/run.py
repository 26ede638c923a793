"""``python -m rollcast_verl.run SCRIPT [ARG ...]``: run a script of verl with its worker groups on rollcast.

``-m MODULE`` in place of ``SCRIPT`` runs a module: ``python -m rollcast_verl.run -m verl.trainer.main_ppo …``.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

_USAGE = "usage: python -m rollcast_verl.run SCRIPT [ARG ...], or -m MODULE [ARG ...]"


def main(argv: list[str]) -> None:
    """Install the hook and run the script or module as ``__main__``."""
    is_module = argv[:1] == ["-m"]
    rest = argv[1:] if is_module else argv
    if not rest or rest[0].startswith("-"):
        raise SystemExit(_USAGE)
    importlib.import_module("rollcast_verl.hook")
    sys.argv = rest
    if is_module:
        sys.path.insert(0, "")
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
