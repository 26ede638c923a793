from rollcast_agents.testing import ToolSuite


class TestMyPlugin(ToolSuite):
    name = "my_plugin"
    cases = (
        ({"value": 2, "source": "km", "target": "m"}, "2000"),
        ({"value": "5", "source": "mm", "target": "m"}, "0.005"),
    )
    bad = ({}, {"value": "five", "source": "m", "target": "m"}, {"value": 1, "source": "inch", "target": "m"})
