import csv

from rollcast.contracts.tracker import trackers
from rollcast_testing import TrackerSuite


class TestMyPlugin(TrackerSuite):
    name = "my_plugin"

    def read(self, run_dir):
        with (run_dir / "my_plugin.csv").open() as stream:
            return [(int(step), float(value)) for step, value in csv.reader(stream)]


def test_the_metric_is_an_option(tmp_path):
    tracker = trackers.get("my_plugin")(tmp_path, {}, metric="time")
    tracker.on_step_end(step=1, metrics={"reward/mean": 0.5, "time": 2.0})
    tracker.close()
    assert (tmp_path / "my_plugin.csv").read_text() == "1,2.0\n"
