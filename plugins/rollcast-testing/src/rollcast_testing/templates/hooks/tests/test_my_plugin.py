from omegaconf import OmegaConf

from rollcast_my_plugin import MyPlugin
from rollcast_testing import HooksSuite


class TestMyPlugin(HooksSuite):
    name = "my_plugin"


def test_the_file_has_the_last_step(tmp_path):
    listener = MyPlugin()
    listener.on_configure(OmegaConf.create({"run_dir": str(tmp_path)}))
    for step in (1, 2):
        listener.on_step_end(step)
    assert (tmp_path / "step.txt").read_text() == "2\n"
