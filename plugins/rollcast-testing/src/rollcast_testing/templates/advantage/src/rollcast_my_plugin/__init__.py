"""The advantage estimator ``my_plugin``: the score less the mean of its group."""

import torch

from rollcast.contracts.algorithm import AdvantageInputs, AdvantageOutputs, advantage


@advantage(compares_samples=True, by_group=True, options={"scale"})
def my_plugin(inputs: AdvantageInputs) -> AdvantageOutputs:
    """A = scale * (s - mean of s over the group), for every token of a response; ``scale`` is 1 by default."""
    # Select with the mask instead of multiplying by it: 0 times NaN is NaN.
    rewards = torch.where(inputs.response_mask != 0, inputs.token_level_rewards, 0.0)
    scores = rewards.double().sum(-1)
    advantages = inputs.options.get("scale", 1.0) * (scores - inputs.group_mean(scores))
    return AdvantageOutputs.from_scores(advantages, inputs.response_mask)
