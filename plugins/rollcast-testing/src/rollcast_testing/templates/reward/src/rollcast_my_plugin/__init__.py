"""The reward ``my_plugin``: the share of the answer that is right before the first mistake, less if it is too long."""

from rollcast.contracts.reward import RewardSample


def my_plugin(sample: RewardSample) -> float:
    """Return the number of right characters before the first mistake, divided by the length of the longer text."""
    right = 0
    for digit, wanted in zip(sample.response, sample.ground_truth, strict=False):
        if digit != wanted:
            break
        right += 1
    return right / max(len(sample.ground_truth), len(sample.response), 1)
