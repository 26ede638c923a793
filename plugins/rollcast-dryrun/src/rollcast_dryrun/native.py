"""The part of the mock that is C++: compiled once for each version of torch, and loaded before torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rollcast.errors import CapabilityError

__all__ = ["find_compiler", "load_mock", "require_compiler"]

_SOURCE = Path(__file__).with_name("mock_cuda.cpp")


def find_compiler() -> str | None:
    """Return the command of a C++ compiler, ``CXX`` or the first that is installed; None if there is none."""
    return os.environ.get("CXX") or next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)


def require_compiler() -> str:
    """Return the command of a C++ compiler; raises CapabilityError if there is none."""
    compiler = find_compiler()
    if compiler is None:
        raise CapabilityError(
            "a dry run compiles 50 lines of C++ against the installed torch, and finds no compiler; install g++, or "
            "set CXX to one"
        )
    return compiler


def load_mock() -> None:
    """Make torch believe in CUDA devices for the rest of this process; compiles the mock at the first call.

    Raises:
        CapabilityError: torch was imported before, is not a CPU build, or there is no C++ compiler.
    """
    if "torch" in sys.modules:
        raise CapabilityError("a dry run has to start in a process that has not imported torch")
    ctypes.CDLL(str(_library()), ctypes.RTLD_GLOBAL)


def _library() -> Path:
    """Return the compiled mock of the installed torch."""
    torch = _torch_folder()
    version = importlib.metadata.version("torch")
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise CapabilityError(
            f"the dry run needs torch's CPU build, and torch {version} is one for CUDA; install it into an "
            "environment with --index-url https://download.pytorch.org/whl/cpu"
        )
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollcast" / "dryrun"
    library = folder / f"mock_cuda-{version}-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(torch, library)
    return library


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise CapabilityError("a dry run needs torch, which is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _compile(torch: Path, library: Path) -> None:
    """Compile the mock next to ``library``, and put it there whole."""
    compiler = require_compiler()
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        links = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        command = [
            *shlex.split(compiler),
            "-shared",
            "-fPIC",
            "-O1",
            "-std=c++20",
            *includes,
            str(_SOURCE),
            "-o",
            str(built),
            *links,
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # the user's
        except OSError as error:
            raise CapabilityError(f"a dry run cannot start the C++ compiler {compiler}: {error}") from error
        if done.returncode:
            raise CapabilityError(
                f"a dry run's {_SOURCE.name} does not compile with {compiler}:\n{done.stderr[-2000:]}"
            )
        built.replace(library)
