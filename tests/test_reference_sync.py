"""``ref.sync_ref_model``: the reference moves, and a resumed run continues with the reference that it had."""

from __future__ import annotations

from run_commands import SMALL, Commands, read_metrics

KEYS = (
    *(each for each in SMALL if not each.startswith(("trainer.test_freq", "trainer.save_freq"))),
    *("runtime=local", "actor.use_kl_loss=true", "actor.entropy_coeff=0.01", "actor.optim.lr=0.01"),
    *("trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=3"),
    *("ref.sync_ref_model=true", "ref.ref_model_sync_steps=2", "actor.optim.lr_scheduler_type=constant"),
)


def test_a_resumed_run_has_the_reference_of_its_checkpoint(rollcast: Commands) -> None:
    rollcast.must_run("train", *KEYS, "trainer.total_steps=5", "run_dir=whole")
    rollcast.must_run("train", *KEYS, "trainer.total_steps=3", "run_dir=parts")
    rollcast.must_run("train", *KEYS, "trainer.total_steps=5", "run_dir=parts")
    whole, parts = (read_metrics(rollcast.folder / name) for name in ("whole", "parts"))
    assert [row["actor/kl_loss"] for row in whole] == [row["actor/kl_loss"] for row in parts]
    assert [row["actor/reference_moved"] for row in whole] == [0, 1, 0, 1, 0]
    # A reference that stays is further from the policy than one that moved.
    rollcast.must_run("train", *KEYS, "ref.ref_model_mixup_alpha=0", "trainer.total_steps=3", "run_dir=fixed")
    fixed = read_metrics(rollcast.folder / "fixed")
    assert fixed[2]["actor/kl_loss"] > 2 * whole[2]["actor/kl_loss"]


def test_an_adapter_is_refused_by_name(rollcast: Commands) -> None:
    failed = rollcast.run("train", *KEYS, "model.lora_rank=4", "run_dir=adapter")
    assert failed.code == 2
    assert "model.lora_rank=4" in failed.text
