import pluggy

from rollcast.contracts import hooks
from rollcast.contracts.tracker import trackers


def track(run_dir, steps, start_step=0, **options):
    """Call the tracker as a run calls it; return the file that it wrote."""
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    tracker = trackers.get("my_plugin")(run_dir, {}, start_step, **options)
    manager.register(tracker)  # an unknown argument of a hook is an error here
    manager.check_pending()  # and so is an unknown hook
    for step in steps:
        manager.hook.on_step_end(trainer=None, step=step, metrics={"reward/mean": step / 4, "time": 1.0})
    tracker.close()
    return (run_dir / "my_plugin.csv").read_text()


def test_each_step_is_a_line(tmp_path):
    assert track(tmp_path, (1, 2)) == "1,0.25\n2,0.5\n"


def test_the_metric_is_an_option(tmp_path):
    assert track(tmp_path, (1,), metric="time") == "1,1.0\n"
    assert track(tmp_path / ".", (1,), metric="none", start_step=0) == ""


def test_a_continued_run_drops_what_came_after_its_checkpoint(tmp_path):
    track(tmp_path, (1, 2, 3))
    assert track(tmp_path, (2,), start_step=1) == "1,0.25\n2,0.5\n"
