import torch

from rollcast.protocol import DataProto
from rollcast_my_plugin import MyPlugin
from rollcast_testing import DispatchSuite


class TestMyPlugin(DispatchSuite):
    name = "my_plugin"


class TwoRanks:
    """A group as a dispatch mode without a mesh sees it."""

    world_size = 2


def test_rows_are_dealt_in_turn() -> None:
    calls = MyPlugin().dispatch(TwoRanks(), DataProto.from_dict({"row": torch.arange(5)}))
    shares = [call.args[0]["row"].tolist() for call in calls.per_rank]
    assert shares == [[0, 2, 4], [1, 3]]
