from rollcast_testing import WeightSyncSuite


class TestMyPlugin(WeightSyncSuite):
    name = "my_plugin"
