"""Health checks of torch, of compiled extensions beside it, of devices, and of a run's model folder."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from rollcast.contracts.device import CPU, current_device
from rollcast.contracts.gguf import GGUF_INSTALLATION, find_gguf, missing_packages
from rollcast.contracts.health import BaseHealthCheck, Finding, HealthSetup, ok, problem, warning
from rollcast.errors import ConfigError

__all__ = ["ModelCheck", "TorchCheck"]

_REINSTALL = "reinstall torch for this machine by https://pytorch.org/get-started/locally/"


class TorchCheck(BaseHealthCheck):
    """Torch, what was compiled against it, the devices that it sees, and its collectives."""

    subject = "torch"
    timeout_s = 180.0

    def run(self, setup: HealthSetup) -> Iterator[Finding]:
        """Import torch, load compiled extensions, list devices and reduce a tensor with gloo."""
        try:
            import torch
        except (ImportError, OSError) as error:
            yield problem("import", f"torch cannot be imported: {error}", _REINSTALL)
            return
        abi = int(torch.compiled_with_cxx11_abi())
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        yield ok("import", f"{torch.__version__} ({build}, C++11 ABI {abi})")
        yield from check_extensions(str(torch.__version__))
        yield self._devices(torch, str(setup.get("placement.device", "auto")))
        yield self._gloo()

    def _devices(self, torch: Any, wanted: str) -> Finding:
        present = [str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
        device = current_device()
        if device is not CPU:
            module = device.torch_module()
            names = [str(module.get_device_name(index)) for index in range(module.device_count())]
            return ok("devices", f"{len(names)} x {', '.join(sorted(set(names)))}")
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "" and present:
            fix = "unset CUDA_VISIBLE_DEVICES"
            return warning("devices", f"CUDA_VISIBLE_DEVICES is empty and hides {', '.join(present)}", fix)
        if present:
            reason = "torch is built without CUDA" if not torch.version.cuda else "the driver does not fit the build"
            message = f"{', '.join(present)} cannot be used: {reason}"
            return problem("devices", message, f"compare with nvidia-smi, then {_REINSTALL}")
        if wanted not in ("auto", CPU.name):
            message = f"placement.device={wanted}, and torch sees no such device"
            return problem(
                "devices", message, f"placement.device=auto or cpu; or run on a machine with a device {wanted}"
            )
        return ok("devices", "no accelerator; workers run on the CPU")

    def _gloo(self) -> Finding:
        import torch
        import torch.distributed as dist

        stores: Any = dist  # the stubs lack the stores
        try:
            dist.init_process_group("gloo", store=stores.HashStore(), rank=0, world_size=1)
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            dist.destroy_process_group()
        except Exception as error:  # noqa: BLE001  # torch raises RuntimeError and kinds of its own
            interface = os.environ.get("GLOO_SOCKET_IFNAME")
            fix = (
                "unset GLOO_SOCKET_IFNAME, or name an interface that ip -br addr lists"
                if interface
                else "export GLOO_SOCKET_IFNAME=lo (one node), or the interface between the nodes"
            )
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            return problem("gloo", f"a process group of the backend gloo cannot be made: {reason}", fix)
        return ok("gloo", "a process group can be made")


def check_extensions(torch_version: str) -> Iterator[Finding]:
    """Yield a finding for each distribution that does not fit the installed torch, by metadata or by its symbols.

    A shared library is loaded with all symbols resolved, so that one compiled against another ABI is found before a
    call into it; none of the distribution's Python is run.

    Args:
        torch_version: version of the torch that this process has imported.
    """
    plain, checked, is_sound = torch_version.partition("+")[0], 0, True
    for distribution in importlib.metadata.distributions():
        name = str(distribution.metadata["Name"])
        needs = _need_of_torch(distribution)
        if needs is None or name == "torch":
            continue
        checked += 1
        fault = _judge(distribution, name, needs, plain)
        if fault is not None:
            is_sound = False
            yield fault
    if is_sound:
        yield ok("extensions", f"{checked} distributions that require torch fit it")


def _judge(
    distribution: importlib.metadata.Distribution, name: str, needs: Requirement, torch_version: str
) -> Finding | None:
    asked = f"torch{needs.specifier}"
    if not needs.specifier.contains(torch_version, prereleases=True):
        message = f"version {distribution.version} is built for {asked}; torch {torch_version} is installed"
        return problem(name, message, f"pip install --upgrade {name}, or pip install '{asked}'")
    fault = next(filter(None, map(_load, _libraries(distribution))), None)
    if fault is None:
        return None
    fix = f"rebuild it against torch {torch_version}: pip install --force-reinstall --no-cache-dir {name}"
    return problem(name, f"version {distribution.version} does not fit torch {torch_version}: {fault}", fix)


def _need_of_torch(distribution: importlib.metadata.Distribution) -> Requirement | None:
    for line in distribution.requires or ():
        if not re.match(r"torch(?![\w.-])", line):
            continue
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # another tool's concern: it was installed all the same
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            return requirement
    return None


def _libraries(distribution: importlib.metadata.Distribution) -> Iterator[Path]:
    """Yield the compiled extension modules of a distribution that its record lists."""
    for file in distribution.files or ():
        if file.name.endswith(".so"):
            path = Path(str(distribution.locate_file(file)))
            if path.is_file():
                yield path


def _load(library: Path) -> str | None:
    """Return why a library's symbols do not fit; None if they do, or if another library of its is not found here."""
    try:
        ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        return str(error) if "undefined symbol" in str(error) else None
    return None


class ModelCheck(BaseHealthCheck):
    """The folder in ``model.path``: configuration, weights and tokenizer."""

    subject = "model"

    def run(self, setup: HealthSetup) -> Iterator[Finding]:
        """Look for the files; nothing is loaded."""
        path = setup.get("model.path")
        if path is None:
            return
        folder = Path(str(path))
        try:
            file = self._find_gguf(folder)
        except ConfigError as error:
            yield problem("gguf", str(error), "model.path=FILE, with one of them")
            return
        if file is not None:
            yield self._gguf(file)
            return
        if not folder.is_dir():
            if setup.get("data.preprocess"):
                yield ok("folder", f"{folder} is made by data.preprocess={setup.get('data.preprocess')}")
                return
            yield problem("folder", f"model.path={folder} is not a folder", "model.path=FOLDER of a downloaded model")
            return
        try:
            kind = json.loads((folder / "config.json").read_text("utf-8")).get("architectures")
        except (OSError, ValueError) as error:
            fix = f"copy config.json of the model into {folder}, or give another model.path"
            yield problem("config.json", f"{folder / 'config.json'} cannot be read: {error}", fix)
            return
        yield ok("config.json", f"{', '.join(kind or ['no architecture named'])}")
        yield self._weights(folder, bool(setup.get("model.random_init", False)))
        if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            fix = f"copy the tokenizer's files into {folder}"
            yield problem("tokenizer", f"{folder} has none of tokenizer.json, tokenizer.model, vocab.json", fix)

    def _find_gguf(self, path: Path) -> Path | None:
        """Return the GGUF file that a run would convert."""
        if not path.is_dir():
            return path if path.is_file() and path.suffix.lower() == ".gguf" else None
        name = find_gguf((file.name for file in path.iterdir()), str(path), "model.path")
        return None if name is None else path / name

    def _gguf(self, file: Path) -> Finding:
        missing = missing_packages()
        message = f"{file.name}, {file.stat().st_size / 2**30:.2f} GiB, is converted to a Hugging Face folder"
        if missing:
            return problem("gguf", f"{message}, which needs {' and '.join(missing)}", GGUF_INSTALLATION)
        return ok("gguf", message)

    def _weights(self, folder: Path, random_init: bool) -> Finding:
        from rollcast_engine.hf import WEIGHT_PATTERNS

        files = {file for pattern in WEIGHT_PATTERNS for file in folder.glob(pattern)}
        missing: set[str] = set()
        for index in (file for file in files if file.name.endswith(".index.json")):
            try:
                listed = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
            except (OSError, ValueError, KeyError) as error:
                return problem("weights", f"{index} cannot be read: {error!r}", "download the file again")
            missing |= {name for name in listed if not (folder / name).is_file()}
        if missing:
            message = f"{folder} lacks {len(missing)} of its weight files, such as {min(missing)}"
            return problem("weights", message, "download the missing files again")
        size = sum(file.stat().st_size for file in files)
        if not files and not random_init:
            return problem("weights", f"{folder} has no weights", "download them, or model.random_init=true")
        return ok("weights", f"{size / 2**30:.2f} GiB in {len(files)} files" if files else "drawn at random")
