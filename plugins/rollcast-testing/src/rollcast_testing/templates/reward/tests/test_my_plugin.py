from rollcast.contracts.reward import RewardSample
from rollcast_testing import RewardSuite


class TestMyPlugin(RewardSuite):
    name = "my_plugin"
    cases = [
        (RewardSample("31=", "13", ground_truth="13"), 1.0),
        (RewardSample("31=", "12", ground_truth="13"), 0.5),
        (RewardSample("31=", "23", ground_truth="13"), 0.0),
    ]
