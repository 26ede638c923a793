from rollcast_automap.testing import CostModelSuite


class TestMyPlugin(CostModelSuite):
    name = "my_plugin"
