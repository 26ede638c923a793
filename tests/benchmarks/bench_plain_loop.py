"""The quick start's step time against a plain PyTorch loop that does the same work.

The plain loop is what a practised person writes in an afternoon for one process: transformers'
model, a decode loop over its KV cache (each distinct prompt goes through the model once, and the
cache is repeated for its samples; this beats ``model.generate``), recomputed log-probs with their
entropy, group-relative advantages, clipped mini-batch updates with fused AdamW that leave out rows
without advantage, and the usual metrics. Unlike the quick start's recipe it does not share prompts
in log-probs and updates; ``-- actor.engine.share_prompts=false`` makes the passes alike.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from _report import Comparison, write_report
from _side_by_side import StepReport, Work, parse_options, run_side_by_side
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

NAME = "plain_loop"


class PlainLoop:
    """GRPO on a Hugging Face model, in this process."""

    def __init__(self, work: Work) -> None:
        torch.set_num_threads(work.threads)
        torch.manual_seed(work.seed)
        self.work = work
        self.tokenizer: Any = AutoTokenizer.from_pretrained(work.model, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=work.lr, betas=work.betas, weight_decay=work.weight_decay, fused=True
        )
        self.rows = [json.loads(line) for line in Path(work.train_file).read_text().splitlines()]
        self.queue: list[dict[str, str]] = []
        self.random = random.Random(work.seed)
        self.metrics: dict[str, float] = {}

    def step(self) -> StepReport:
        """Sample, score, and update."""
        start = time.perf_counter()
        rows = self._next_rows()
        prompts = self.tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
        self.model.eval()
        ids, mask, width = self._generate(prompts["input_ids"], prompts["attention_mask"])
        rewards = self._score(ids[:, width:], mask[:, width:], rows)
        with torch.no_grad():
            old, entropy = self._log_probs(ids, mask, width, with_entropy=True)
        advantages = self._advantages(rewards)
        self._update(ids, mask, width, old, advantages)
        tokens = float(mask[:, width:].sum())
        self.metrics["entropy"] = float((entropy * mask[:, width:]).sum()) / tokens
        self.metrics["reward"] = float(rewards.mean())
        trained = float((advantages != 0).sum())
        return StepReport(time.perf_counter() - start, tokens, trained, self.metrics["reward"])

    def _next_rows(self) -> list[dict[str, str]]:
        if len(self.queue) < self.work.prompts:
            self.queue = list(self.rows)
            self.random.shuffle(self.queue)
        return [self.queue.pop() for _ in range(self.work.prompts)]

    @torch.no_grad()
    def _generate(self, prompt_ids: Tensor, prompt_mask: Tensor) -> tuple[Tensor, Tensor, int]:
        """Prompts and responses, int64 ``[B, P + T]`` each with its mask, and ``P``."""
        work, eos, pad = self.work, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        cache = DynamicCache(config=self.model.config)
        positions = (prompt_mask.cumsum(-1) - 1).clamp(min=0)
        inputs = {"input_ids": prompt_ids, "attention_mask": prompt_mask, "position_ids": positions}
        logits = self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        cache.batch_repeat_interleave(work.samples)
        logits, ids, mask, positions = (
            each.repeat_interleave(work.samples, 0) for each in (logits, prompt_ids, prompt_mask, positions[:, -1:])
        )
        running = torch.ones(len(ids), 1, dtype=torch.bool)
        for count in range(1, work.max_new_tokens + 1):
            tokens = torch.multinomial((logits.float() / work.temperature).softmax(-1), 1)
            tokens = tokens.where(running, pad)
            ids, mask = torch.cat([ids, tokens], 1), torch.cat([mask, running.long()], 1)
            running &= tokens != eos
            if count == work.max_new_tokens or not running.any():
                break
            inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions + count}
            logits = self.model(**inputs, past_key_values=cache, use_cache=True).logits[:, -1]
        return ids, mask, prompt_ids.shape[1]

    def _score(self, responses: Tensor, mask: Tensor, rows: list[dict[str, str]]) -> Tensor:
        """1 for a response that ended by itself and is the answer, else 0; float32 ``[B]``."""
        eos = self.tokenizer.eos_token_id
        kept = [row[:length] for row, length in zip(responses.tolist(), mask.sum(-1).tolist(), strict=True)]
        texts = self.tokenizer.batch_decode(kept, skip_special_tokens=True)
        answers = [row["ground_truth"] for row in rows for _ in range(self.work.samples)]
        correct = [
            tokens[-1] == eos and text == answer for tokens, text, answer in zip(kept, texts, answers, strict=True)
        ]
        return torch.tensor(correct, dtype=torch.float32)

    def _advantages(self, rewards: Tensor) -> Tensor:
        """The reward against its group's, ``[B]``."""
        groups = rewards.view(-1, self.work.samples)
        centred = groups - groups.mean(1, keepdim=True)
        return (centred / (groups.std(1, keepdim=True) + 1e-6)).flatten()

    def _log_probs(self, ids: Tensor, mask: Tensor, width: int, with_entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probs of the responses and, where asked for, entropies; ``[B, T]``."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        kept = ids.shape[1] - width + 1
        logits = self.model(**inputs, use_cache=False, logits_to_keep=kept).logits[:, :-1]
        all_log_probs = (logits.float() / self.work.temperature).log_softmax(-1)
        chosen = all_log_probs.gather(-1, ids[:, width:, None])[..., 0]
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1) if with_entropy else torch.zeros(())
        return chosen, entropy

    def _update(self, ids: Tensor, mask: Tensor, width: int, old: Tensor, advantages: Tensor) -> None:
        work = self.work
        self.model.train()
        for rows in torch.randperm(len(ids)).chunk(work.mini_batches):
            tokens = mask[rows, width:].sum()
            # Rows without advantage have no gradient; they count in the mean all the same.
            used = rows[advantages[rows] != 0]
            if not len(used):
                continue
            log_probs, _ = self._log_probs(ids[used], mask[used], width, with_entropy=False)
            chosen, advantage = mask[used, width:], advantages[used, None]
            log_ratio = log_probs - old[used]
            ratio = log_ratio.exp()
            plain = -advantage * ratio
            bounded = -advantage * ratio.clamp(1 - work.clip_ratio_low, 1 + work.clip_ratio_high)
            losses = torch.maximum(plain, bounded)
            losses = torch.where(advantage < 0, torch.minimum(losses, -advantage * work.clip_ratio_c), losses)
            loss = (losses * chosen).sum() / tokens
            self.optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), work.clip_grad)
            self.optimizer.step()
            self.metrics |= {
                "loss": float(loss.detach()),
                "grad_norm": float(norm),
                "kl": float((-log_ratio.detach() * chosen).sum() / tokens),
                "clip_fraction": float(((bounded > plain) * chosen).sum() / tokens),
            }


def serve(connection: Connection, work: Work) -> None:
    """The plain loop at the other end of a pipe."""
    loop = PlainLoop(work)
    connection.send(True)
    while connection.recv():
        connection.send(loop.step())


def main() -> int:
    """Run the benchmark; 1 if a goal was missed and ``--strict`` asked for it."""
    options = parse_options("Step time of rollcast's quick start against a plain PyTorch loop.", NAME)
    _, pairs = run_side_by_side(serve, options)
    pairs.check_same_work("tokens", "trained_rows")
    ours, other = (statistics.median(report.seconds for report in side) for side in (pairs.ours, pairs.theirs))
    name = f"step time, one worker on runtime {options.runtime} / plain PyTorch loop (s)"
    comparison = Comparison(name, ours, other, at_most=1.5)
    write_report("rollcast against a plain loop", [comparison], pairs.notes("plain loop"), options.output)
    return int(options.strict and not comparison.holds)


if __name__ == "__main__":
    sys.exit(main())
