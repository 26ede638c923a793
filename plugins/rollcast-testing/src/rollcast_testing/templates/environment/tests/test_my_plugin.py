from rollcast_agents.testing import EnvironmentSuite
from rollcast_my_plugin import MyPlugin


class TestMyPlugin(EnvironmentSuite):
    name = "my_plugin"
    tasks = ({"prompt": [], "budget": 7}, {"prompt": [], "budget": 11})


def test_spending_all_is_rewarded():
    environment = MyPlugin()
    environment.reset(budget=7)
    assert environment.buy("cheese") == "You have 2 coins left."
    assert environment.get_reward() == 0.0
    environment.buy("apple")
    assert environment.get_reward() == 1.0
