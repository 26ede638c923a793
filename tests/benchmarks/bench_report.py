"""Time to write, open, filter and search a report of 10,000 samples and 10,000 trajectories in headless Chromium.

    python tests/benchmarks/bench_report.py [--screenshot FILE] [--keep FOLDER]

Chromium is found on the path, or named by ``ROLLCAST_BROWSER``.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "rollcast-report" / "tests"))

from report_browser import Browser, Page, find_browser

from rollcast_report.report import write_report

ROLLOUTS, STEPS, TURNS = 100, 100, 3
VALIDATIONS, PROMPTS = 20, 500
#: What a reader does: control, its value, and what it is.
_ACTIONS = (
    ("search", "result 7 of rollout 42", "search: a phrase"),
    ("search", "no such words in any text", "search: nothing found"),
    ("search", "e", "search: a letter that all have"),
    ("search", "", "search cleared"),
    ("step-low", "50", "filter: from step 50"),
    ("end", "error", "filter: end"),
    ("reward-low", "0.5", "filter: reward from 0.5"),
    ("order", "low", "order: lowest reward first"),
)


def _packed(values: list[float], form: str) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}{form}", *values)).decode()


def _segment(turn: int, sampled: bool, text: str, version: int = 0) -> dict[str, Any]:
    count = max(1, len(text) // 4)
    return {
        "turn": turn,
        "sampled": sampled,
        "token_ids": _packed([7] * count, "i"),
        "log_probs": _packed([-0.5] * count, "f") if sampled else None,
        "weight_versions": [[version, count]] if sampled else [],
        "text": text,
    }


def _line(step: int, rollout: int) -> str:
    """One trajectory of three turns with about 12,000 characters, some of them hostile."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"What is {step} times {rollout}? " + "context " * 60}
    ]
    segments = [_segment(0, False, "<|user|>" + messages[0]["content"])]
    for turn in range(TURNS):
        evil = "</script><script>window.ran = true</script><img src=x onerror='window.ran = true'><!--"
        thought = f"Turn {turn}: {evil} " + "I multiply the numbers step by step. " * 40
        call = {"name": "multiply", "arguments": {"a": step, "b": rollout}}
        last = turn == TURNS - 1
        calls = {} if last else {"tool_calls": [{"id": f"call-{turn}", "type": "function", "function": call}]}
        messages.append({"role": "assistant", "content": thought, **calls})
        segments.append(
            _segment(turn, True, thought + ("" if last else json.dumps(call)), max(0, step - 1 - rollout % 3))
        )
        if not last:
            result = f"result {turn + 6} of rollout {rollout}: " + "0123456789 " * 60
            messages.append({"role": "tool", "name": "multiply", "tool_call_id": f"call-{turn}", "content": result})
            segments.append(_segment(turn + 1, False, result))
    failed = rollout % 25 == 24
    return json.dumps(
        {
            "version": 1,
            "group_id": f"prompt-{rollout // 4}",
            "rollout_id": f"step-{step}-rollout-{rollout}",
            "end": "error" if failed else "done",
            "reward": float(rollout % 3 == 0),
            "turn_rewards": {"0": 0.0, "2": float(rollout % 3 == 0)},
            "reward_components": {"format": 1.0},
            "messages": messages,
            "metrics": {"turns": TURNS, "tool_calls": TURNS - 1, "tool_errors": 0},
            "failure": {"boundary": "tool", "message": "multiply <b>failed</b>"} if failed else None,
            "extra": {},
            "segments": segments,
            "task": {"ground_truth": str(step * rollout)},
            "score": float(rollout % 3 == 0),
        }
    )


def _samples() -> list[str]:
    """Samples of about 1,100 characters of words that do not repeat each other."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    lines = []
    for validation in range(VALIDATIONS):
        for number in range(PROMPTS):
            correct = draw.random() < validation / VALIDATIONS
            lines.append(
                json.dumps(
                    {
                        "step": validation * STEPS // VALIDATIONS,
                        "prompt": f"question {number} " + " ".join(draw.choices(words, k=40)),
                        "response": " ".join(draw.choices(words, k=130)),
                        "ground_truth": str(number),
                        "data_source": ("gsm8k", "math")[number % 2],
                        "finished": draw.random() < 0.9,
                        "score": float(correct),
                        "correct": correct,
                    }
                )
            )
    return lines


def write(run_dir: Path) -> Path:
    folder = run_dir / "trajectories"
    folder.mkdir(parents=True, exist_ok=True)
    for step in range(1, STEPS + 1):
        lines = [_line(step, rollout) for rollout in range(ROLLOUTS)]
        (folder / f"step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
    (run_dir / "samples.jsonl").write_text("\n".join(_samples()) + "\n")
    metrics = [
        {"step": step, "reward/mean": step / STEPS, "rollout/weight_version": step} for step in range(1, STEPS + 1)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    start = time.perf_counter()
    path = write_report(run_dir)
    print(f"written in {time.perf_counter() - start:.2f} s, {path.stat().st_size / 1e6:.1f} MB")
    return path


def _act(page: Page, control: str, value: str) -> tuple[float, str]:
    """Return the milliseconds from the change of a control until the list is laid out, and what is shown."""
    took, count = page.run(
        f"""(() => {{
          const control = document.getElementById("explorer-{control}");
          const start = performance.now();
          control.value = {json.dumps(value)};
          control.dispatchEvent(new Event("input", {{ bubbles: true }}));
          document.getElementById("explorer-list").getBoundingClientRect();
          return [performance.now() - start, document.getElementById("explorer-count").textContent];
        }})()"""
    )
    return float(took), str(count)


def measure(path: Path, program: str, screenshot: Path | None) -> None:
    with Browser.started(program) as browser:
        print(browser.call("Browser.getVersion", {})["product"])
        page = browser.new_page()
        page.emulate(1280, 1000)
        page.open(path)
        page.wait("performance.getEntriesByName('explorer-texts').length")
        ready, texts = (
            page.run(f"performance.getEntriesByName('explorer-{name}')[0].startTime") for name in ("ready", "texts")
        )
        print(f"list shown after {ready / 1000:.2f} s, all texts can be searched after {texts / 1000:.2f} s")
        for control, value, name in _ACTIONS:
            took, count = _act(page, control, value)
            print(f"{name}: {took:.0f} ms, {count}")
        heap = page.call("Runtime.getHeapUsage")
        print(f"memory of the script: {heap['usedSize'] / 1e6:.0f} MB")
        if screenshot is not None:
            page.run("document.querySelector('.explorer').scrollIntoView()")
            page.screenshot(screenshot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--screenshot", type=Path, metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run directory there")
    arguments = parser.parse_args()
    program = find_browser()
    if program is None:
        parser.error("there is no Chromium on the path; ROLLCAST_BROWSER may name one")
    with tempfile.TemporaryDirectory() as folder:
        measure(write(arguments.keep or Path(folder)), program, arguments.screenshot)


if __name__ == "__main__":
    main()
