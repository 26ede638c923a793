"""A recipe's samples a second against TRL's GRPOTrainer: same model, task and batch, on a CPU.

TRL gets the settings that suit it: float32, no gradient checkpointing, no logging and no reports, the
KV cache, fused AdamW, no reference model (beta 0), batches of whole mini-batches, and its token-mean
loss. It recomputes log-probs once a step, as rollcast does. What it has no setting for it goes
without: it sends each prompt through the model once a sample, and trains on rows without advantage.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

import torch
from _report import Comparison, write_report
from _side_by_side import PRETRAINED, QUICKSTART, StepReport, Work, parse_options, run_side_by_side
from transformers import TrainerCallback

NAME = "trl"
#: Ratio that is to be reached with each recipe.
GOALS = {QUICKSTART: 1.5, PRETRAINED: 2.0}


class ExactMatch:
    """The recipe's reward as TRL calls it, with texts or with lists of messages; remembers what it saw."""

    __name__ = "exact_match"

    def __init__(self, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = 0.0
        self.mean = 0.0

    def __call__(
        self, completions: list[Any], completion_ids: list[list[int]], ground_truth: list[str], **_: Any
    ) -> list[float]:
        texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
        rewards = [
            float(ids[-1] == self.eos_token_id and text == answer)
            for text, ids, answer in zip(texts, completion_ids, ground_truth, strict=True)
        ]
        self.tokens = float(sum(map(len, completion_ids)))
        self.mean = sum(rewards) / len(rewards)
        return rewards


class Turns(TrainerCallback):
    """Waits for the word before each step, and tells its time after it.

    One of our steps is ``mini_batches`` of TRL's: it generates at the first of them.
    """

    def __init__(self, connection: Connection, work: Work, reward: ExactMatch) -> None:
        self.connection = connection
        self.work = work
        self.reward = reward
        self.start = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say that everything is ready."""
        self.connection.send(True)
        self._wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report after the last mini-batch."""
        if state.global_step % self.work.mini_batches:
            return
        seconds = time.perf_counter() - self.start
        self.connection.send(StepReport(seconds, self.reward.tokens, float(self.work.rows), self.reward.mean))
        self._wait(control)

    def _wait(self, control: Any) -> None:
        if not self.connection.recv():
            control.should_training_stop = True
        self.start = time.perf_counter()


def serve(connection: Connection, work: Work) -> None:
    """TRL at the other end of a pipe."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    torch.set_num_threads(work.threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(work.model, padding_side="left")
    reward = ExactMatch(tokenizer.eos_token_id)
    with tempfile.TemporaryDirectory(prefix="rollcast_bench_trl_") as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32),
            reward_funcs=reward,
            args=_arguments(work, folder),
            train_dataset=load_dataset("json", data_files=work.train_file, split="train", cache_dir=folder),
            processing_class=tokenizer,
            callbacks=[Turns(connection, work, reward)],
        )
        trainer.train()


def _arguments(work: Work, folder: str) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        seed=work.seed,
        bf16=False,
        gradient_checkpointing=False,
        # A step of theirs is a mini-batch of ours.
        per_device_train_batch_size=work.peer_rows,
        gradient_accumulation_steps=work.rows // work.mini_batches // work.peer_rows,
        steps_per_generation=work.rows // work.peer_rows,
        num_iterations=1,
        num_generations=work.samples,
        max_completion_length=work.max_new_tokens,
        temperature=work.temperature,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=work.clip_ratio_low,
        epsilon_high=work.clip_ratio_high,
        delta=work.clip_ratio_c,
        loss_type="dapo",
        scale_rewards="group",
        optim="adamw_torch_fused",
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        adam_beta1=work.betas[0],
        adam_beta2=work.betas[1],
        weight_decay=work.weight_decay,
        max_grad_norm=work.clip_grad,
        max_steps=1_000_000,  # until it is told to stop
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> int:
    """Run the benchmark; 1 if a goal was missed and ``--strict`` asked for it."""
    description = "Samples a second of a recipe of rollcast against TRL's GRPOTrainer."
    options = parse_options(description, NAME, recipes=list(GOALS))
    work, pairs = run_side_by_side(serve, options)
    pairs.check_same_work("tokens")
    ours, other = (
        work.rows / statistics.median(report.seconds for report in side) for side in (pairs.ours, pairs.theirs)
    )
    trl = f"TRL {version('trl')}"
    name = f"samples a second, one worker on runtime {options.runtime} / {trl} GRPOTrainer"
    comparison = Comparison(name, ours, other, at_least=GOALS[options.recipe])
    write_report(f"rollcast against {trl}, {options.recipe}", [comparison], pairs.notes(trl), options.output)
    return int(options.strict and not comparison.holds)


if __name__ == "__main__":
    sys.exit(main())
