from rollcast_testing.rollout import RolloutSuite


class TestMyPlugin(RolloutSuite):
    name = "my_plugin"
