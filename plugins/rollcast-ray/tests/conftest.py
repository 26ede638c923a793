"""Workers of the tests in modules that Ray's workers can import too: these, and those of the controller's tests."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "core" / "tests" / "controller")]
