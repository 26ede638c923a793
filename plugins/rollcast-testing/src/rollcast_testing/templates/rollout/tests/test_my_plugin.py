from rollcast_testing.rollout import RolloutSuite


class TestMyPlugin(RolloutSuite):
    name = "my_plugin"
    mixtures = False  # a mixture's experts arrive one by one, and its module stacks them
