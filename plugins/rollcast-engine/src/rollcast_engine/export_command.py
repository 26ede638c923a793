"""``rollcast export``: write a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from rollcast.contracts.command import Traceback, hide_library_bars, print_lines, show_progress
from rollcast.contracts.files import find_newest_checkpoint

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["app", "export"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Checkpoint, RUN_DIR/checkpoints/step_N: a folder or its URL.")
    ],
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="Folder to create, or its URL.")],
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The run's resolved config; RUN_DIR/config.yaml by default."),
    ] = None,
    _traceback: Traceback = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder: config, weights and tokenizer."""
    from rollcast.contracts.storage import RemoteFolder, is_url
    from rollcast.errors import CheckpointError

    hide_library_bars()
    with ExitStack() as stack:
        local = Path(checkpoint)
        if is_url(checkpoint):
            local = _fetch(checkpoint, Path(stack.enter_context(TemporaryDirectory())))
        if not is_url(output):
            _export(local, Path(output), config)
        else:
            folder = Path(stack.enter_context(TemporaryDirectory())) / "export"
            remote = RemoteFolder(output, "OUTPUT")
            if remote.names(""):
                raise CheckpointError(f"{output} exists and is not an empty folder; choose another OUTPUT")
            _export(local, folder, config)
            remote.upload(folder, "")
    print_lines(f"exported {checkpoint} to {output}")


def _fetch(url: str, folder: Path) -> Path:
    """Copy a checkpoint and its run's config into a folder; return the checkpoint's path."""
    from rollcast.contracts.storage import RemoteFolder
    from rollcast.errors import CheckpointError

    run, _, name = url.rstrip("/").rpartition("/checkpoints/")
    if not run or "/" in name:
        raise CheckpointError(f"{url} is not the URL of a checkpoint, which ends with /checkpoints/step_N")
    remote = RemoteFolder(run, "CHECKPOINT")
    target = folder / "checkpoints" / name
    target.parent.mkdir()
    remote.download("config.yaml", folder / "config.yaml")
    remote.download(f"checkpoints/{name}", target)
    return target


def _export(checkpoint: Path, output: Path, config: Path | None) -> None:
    from rollcast import build_section
    from rollcast.contracts.engine import ModelConfig, engines
    from rollcast.contracts.storage import NodeCopies
    from rollcast.errors import CheckpointError, ConfigError

    _check_checkpoint(checkpoint)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} exists and is not an empty folder; choose another OUTPUT")
    run_dir = checkpoint.resolve().parent.parent
    file = config or run_dir / "config.yaml"
    settings = _read_config(file)
    engine = _engine_name(settings)
    if engine is None or settings.get("model") is None:
        missing = "actor.engine.name" if engine is None else "model"
        raise ConfigError(f"{file} has no {missing}, which identifies the model; is it a run's config.yaml?")
    engine_class = engines.get(engine, requested_by=f"actor.engine.name ({file})")
    copies = NodeCopies()
    model = copies.place(build_section(ModelConfig, settings.model, "model", {"model": str(file)}), "model")
    copies.make()
    model = replace(model, path=_find_model(model.path, str(settings.get("run_dir", "")), run_dir))
    with show_progress(f"exporting {checkpoint.name}"):
        engine_class.export_checkpoint(checkpoint / "actor", model, output)


def _check_checkpoint(checkpoint: Path) -> None:
    """Check that ``checkpoint`` is the folder of a checkpoint.

    Raises:
        CheckpointError: it is not; the message suggests the checkpoint that may have been meant.
    """
    from rollcast.errors import CheckpointError

    if (checkpoint / "actor").is_dir():
        return
    near = find_newest_checkpoint(checkpoint) or find_newest_checkpoint(checkpoint.parent.parent)
    what = "has no actor/, so it is not a checkpoint" if checkpoint.is_dir() else "does not exist"
    hint = f"; did you mean {near}?" if near else "; a checkpoint is a folder RUN_DIR/checkpoints/step_N"
    raise CheckpointError(f"{checkpoint} {what}{hint}")


def _read_config(file: Path) -> DictConfig:
    from omegaconf import DictConfig, OmegaConf
    from yaml import YAMLError

    from rollcast.errors import ConfigError

    try:
        settings = OmegaConf.load(file)
    except (OSError, YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"{file} cannot be read: {reason}; pass the run's resolved config with --config") from error
    if not isinstance(settings, DictConfig):
        raise ConfigError(f"{file} is not a mapping; pass the run's resolved config with --config")
    return settings


def _engine_name(settings: DictConfig) -> str | None:
    from omegaconf import OmegaConf

    name = OmegaConf.select(settings, "actor.engine.name")
    return None if name is None else str(name)


def _find_model(path: str, old_run_dir: str, run_dir: Path) -> str:
    """Return the model's folder, even if the run has been moved since."""
    if old_run_dir and not Path(path).exists() and Path(path).is_relative_to(old_run_dir):
        return str(run_dir / Path(path).relative_to(old_run_dir))
    return path
