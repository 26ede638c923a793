from rollcast_testing import DispatchSuite


class TestMyPlugin(DispatchSuite):
    name = "my_plugin"
