from rollcast_serving.testing import WeightSyncSuite


class TestMyPlugin(WeightSyncSuite):
    name = "my_plugin"
