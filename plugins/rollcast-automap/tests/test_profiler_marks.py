"""A profiler around a run sees every named step, and the workers' calls in it."""

from __future__ import annotations

from pathlib import Path

import torch
from trainer_tools import SmallTask, launch

STEPS = {
    "step 1": "",
    "generate": "actor_rollout_ref.generate_sequences",
    "reward": "",
    "old_log_prob": "actor_rollout_ref.compute_log_prob",
    "ref_log_prob": "actor_rollout_ref.compute_ref_log_prob",
    "values": "critic.compute_values",
    "advantage": "",
    "update_critic": "critic.update_critic",
    "update_actor": "actor_rollout_ref.update_actor",
    "update_weights": "actor_rollout_ref.update_weights",
    "validate": "actor_rollout_ref.generate_sequences",
    "save_checkpoint": "critic.save_checkpoint",
}


def test_every_step_and_call_is_in_the_trace(small_task: SmallTask, tmp_path: Path) -> None:
    changes = ["algorithm.adv_estimator=gae", "actor.use_kl_loss=true", "trainer.total_steps=1"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        launch(small_task.ppo(tmp_path / "run", *changes))
    marks = [event for event in profiler.events() if event.name in STEPS or event.name in STEPS.values()]
    spans = {name: [event.time_range for event in marks if event.name == name] for name in {*STEPS, *STEPS.values()}}
    for step, call in STEPS.items():
        assert spans[step], f"{step} is not in the trace"
        # A step whose call runs beside others has a second span: the wait for it.
        whole = [(span.start, span.end) for span in spans[step]]
        inside = [c for c in spans.get(call, []) if any(start <= c.start and c.end <= end for start, end in whole)]
        assert inside or not call, f"{call} is not in {step}"
    (first,) = spans["step 1"]
    assert all(first.start <= span.start and span.end <= first.end for span in spans["update_actor"])
