"""Workers of the tests in a module that Ray's workers can import too, and one Ray for all of them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
