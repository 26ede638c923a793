import torch

from rollcast.protocol import DataProto
from rollcast_my_plugin import MyPlugin
from rollcast_testing import StageSuite
from rollcast_testing.stage import FakeRun


class TestMyPlugin(StageSuite):
    name = "my_plugin"


def test_the_share_of_failures():
    run = FakeRun({})
    scores = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    batch = DataProto.from_dict({"uid": torch.tensor([0, 0, 1, 1]), "token_level_scores": scores})
    assert MyPlugin(run)(batch)["my_plugin"].tolist() == [0.5, 0.5, 1.0, 1.0]
    assert run.recorded == {"reward/my_plugin": 0.75}
