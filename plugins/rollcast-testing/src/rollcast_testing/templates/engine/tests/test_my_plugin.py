from rollcast_testing import EngineSuite


class TestMyPlugin(EngineSuite):
    name = "my_plugin"
