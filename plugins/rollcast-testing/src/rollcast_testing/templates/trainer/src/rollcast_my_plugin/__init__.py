"""The trainer ``my_plugin``: supervised fine-tuning in one process, in plain PyTorch.

It has the keys of ``trainer=sft``, some of which it reads: ``model.path``, ``data.train_files``,
``data.train_batch_size``, ``actor.optim.lr``, ``trainer.total_steps``, ``trainer.save_freq`` and ``trainer.seed``.
"""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rollcast.contracts.hooks import build_hook_manager
from rollcast.contracts.trainer import BaseTrainer, RunResult
from rollcast.errors import ConfigError
from rollcast_data.files import read_files
from rollcast_data.tokenizer import read_tokenizer
from rollcast_report.tracker_set import TrackerSet


class MyPlugin(BaseTrainer):
    """A trainer that maximises the likelihood of each row's ``response`` after its ``prompt``."""

    @classmethod
    def launch(cls, config: Any) -> RunResult:
        """Train to ``trainer.total_steps``; continue from ``state.pt`` if the run directory has one."""
        if config.trainer_kwargs:
            raise ConfigError(
                f"trainer_kwargs.{next(iter(config.trainer_kwargs))} is set, but my_plugin has no options"
            )
        trackers = TrackerSet(list(config.trackers), config.tracker_kwargs)  # refuses before anything is written
        run_dir = Path(config.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self = cls(config, run_dir)
        hooks = build_hook_manager()
        trackers.start(hooks, run_dir, {"trainer": dict(config.trainer)}, self.step)
        try:
            return self.fit(hooks.hook)
        finally:
            trackers.close()

    def __init__(self, config: Any, run_dir: Path) -> None:
        self.config, self.run_dir, self.step = config, run_dir, 0
        self.tokenizer = read_tokenizer(config.model.path)
        self.model = AutoModelForCausalLM.from_pretrained(config.model.path).float()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.actor.optim.lr)
        self.rows = [(str(row.get("prompt")), str(row.get("response"))) for row in read_files(config.data.train_files)]
        state = run_dir / "state.pt"
        if state.exists():
            saved = torch.load(state, weights_only=True)
            self.step = saved["step"]
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])

    def fit(self, call: Any) -> RunResult:
        """Run the steps, and call the hooks of a run."""
        error: BaseException | None = None
        metrics: dict[str, float] = {}
        trainer = self.config.trainer
        call.on_fit_start(trainer=self)
        try:
            while self.step < trainer.total_steps:
                step = self.step + 1
                call.on_step_start(trainer=self, step=step)
                metrics = {"train/loss": self.update(step)}
                self.step = step
                if trainer.save_freq > 0 and step % trainer.save_freq == 0:
                    call.on_checkpoint_saved(trainer=self, step=step, path=str(self.save()))
                call.on_metrics(trainer=self, step=step, metrics=metrics)
                call.on_step_end(trainer=self, step=step, metrics=metrics)
        except BaseException as raised:
            error = raised
            call.on_exception(trainer=self, error=raised)
            raise
        finally:
            call.on_fit_end(trainer=self, error=error)
        return RunResult(self.step, self.run_dir, metrics)

    def update(self, step: int) -> float:
        """Take one optimizer step on rows that seed and step decide, and return the loss."""
        chosen = random.Random(f"{self.config.trainer.seed}:{step}").sample(
            self.rows, self.config.data.train_batch_size
        )
        losses = []
        for prompt, response in chosen:
            ids = self.tokenizer.encode(prompt, add_special_tokens=False)
            wanted = self.tokenizer.encode(response, add_special_tokens=False)
            labels = torch.tensor([[-100] * len(ids) + wanted])
            losses.append(self.model(input_ids=torch.tensor([ids + wanted]), labels=labels).loss)
        loss = torch.stack(losses).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def save(self) -> Path:
        """Write the state of the run; return the file."""
        file = self.run_dir / "state.pt"
        state = {"step": self.step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)  # a run that is killed meanwhile keeps the old state
        return file
