from rollcast_testing import CostModelSuite


class TestMyPlugin(CostModelSuite):
    name = "my_plugin"
