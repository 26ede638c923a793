"""Time to open, search and filter a report of 1,000 trajectories in Chromium, without a screen.

    pip install PyQt6-WebEngine
    QT_QPA_PLATFORM=offscreen QTWEBENGINE_DISABLE_SANDBOX=1 python tests/benchmarks/bench_report.py [SCREENSHOT]

The report is written by the Python that has rollcast-report; with another one for the browser, write it first:
``python tests/benchmarks/bench_report.py --write RUN_DIR``, then ``--open RUN_DIR/report.html``.
"""

from __future__ import annotations

import argparse
import base64
import json
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROLLOUTS, STEPS, TURNS = 100, 10, 3
_READ = """(() => {
  const entry = performance.getEntriesByType("navigation")[0];
  return JSON.stringify({
    loaded: entry.loadEventEnd, parsed: entry.domInteractive,
    items: document.querySelectorAll("#trajectory-list .item").length,
    messages: document.querySelectorAll("#trajectory article").length,
    marked: (() => { [...document.querySelectorAll("#trajectory .tabs button")].at(-1).click();
      const found = document.querySelectorAll("#trajectory mark").length;
      document.querySelector("#trajectory .tabs button").click(); return found; })(),
    foreign: document.querySelectorAll("#trajectory img, #trajectory script, #trajectory-list img").length,
    ran: window.ran === true, count: document.getElementById("trajectory-count").textContent,
  });
})()"""
_USE = """(() => {
  const timed = (id, value) => {
    const control = document.getElementById("trajectory-" + id);
    const start = performance.now();
    control.value = value;
    control.dispatchEvent(new Event("input"));
    document.getElementById("trajectory-list").getBoundingClientRect();
    const took = performance.now() - start;
    return [took, document.getElementById("trajectory-count").textContent];
  };
  return JSON.stringify({
    search: timed("search", "result 7 of rollout 42"), again: timed("search", "result 7 of rollout 4"),
    clear: timed("search", ""), step: timed("step", "3"), end: timed("end", "error"), reset: timed("end", ""),
    kind: timed("kind", "positive"), order: timed("order", "low"),
  });
})()"""


def _packed(values: list[float], form: str) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}{form}", *values)).decode()


def _segment(turn: int, sampled: bool, text: str) -> dict[str, Any]:
    count = max(1, len(text) // 4)
    return {
        "turn": turn,
        "sampled": sampled,
        "token_ids": _packed([7] * count, "i"),
        "log_probs": _packed([-0.5] * count, "f") if sampled else None,
        "weight_versions": [[turn, count]] if sampled else [],
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
        segments.append(_segment(turn, True, thought + ("" if last else json.dumps(call))))
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


def write(run_dir: Path) -> Path:
    from rollcast_report.report import write_report

    folder = run_dir / "trajectories"
    folder.mkdir(parents=True, exist_ok=True)
    for step in range(1, STEPS + 1):
        lines = [_line(step, rollout) for rollout in range(ROLLOUTS)]
        (folder / f"step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
    metrics = [json.dumps({"step": step, "reward/mean": step / STEPS}) for step in range(1, STEPS + 1)]
    (run_dir / "metrics.jsonl").write_text("\n".join(metrics) + "\n")
    start = time.perf_counter()
    path = write_report(run_dir)
    took = time.perf_counter() - start
    print(f"written in {took:.2f} s: {path}, {path.stat().st_size / 1e6:.1f} MB")
    return path


def open_in_browser(path: Path, screenshot: str | None) -> None:
    from PyQt6.QtCore import QTimer, QUrl
    from PyQt6.QtWebEngineCore import qWebEngineChromiumVersion
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication

    app = QApplication(sys.argv[:1])
    view = QWebEngineView()
    view.resize(1280, 1100)
    view.show()
    start = time.perf_counter()

    def picture() -> None:
        if screenshot:
            view.grab().save(screenshot)
        app.quit()

    def used(answer: str) -> None:
        for name, (milliseconds, count) in json.loads(answer).items():
            print(f"{name}: {milliseconds:.0f} ms, {count}")
        view.page().runJavaScript("document.querySelector('.trajectories').scrollIntoView()")
        QTimer.singleShot(1500, picture)

    def read(answer: str) -> None:
        print(answer)
        view.page().runJavaScript(_USE, used)

    def loaded(ok: bool) -> None:
        wall = time.perf_counter() - start
        print(f"Chromium {qWebEngineChromiumVersion()}: loaded {ok}, {wall:.2f} s with the start of its processes")
        QTimer.singleShot(200, lambda: view.page().runJavaScript(_READ, read))

    view.loadFinished.connect(loaded)
    view.load(QUrl.fromLocalFile(str(path.resolve())))
    QTimer.singleShot(60_000, app.quit)
    app.exec()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("screenshot", nargs="?")
    parser.add_argument("--write", type=Path, metavar="RUN_DIR")
    parser.add_argument("--open", type=Path, metavar="REPORT")
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write)
    elif arguments.open:
        open_in_browser(arguments.open, arguments.screenshot)
    else:
        with tempfile.TemporaryDirectory() as folder:
            open_in_browser(write(Path(folder)), arguments.screenshot)


if __name__ == "__main__":
    main()
