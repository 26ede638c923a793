"""The policy loss ``my_plugin``: the policy gradient with a capped importance weight."""

import torch

from rollcast.contracts.algorithm import PolicyLossInputs, PolicyLossOutput, policy_loss


@policy_loss(scales_with_advantage=True, options={"cap"})
def my_plugin(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """loss = -min(ratio, cap) * A * log_prob, without a gradient through the weight; ``cap`` is 2 by default."""
    chosen = inputs.response_mask != 0
    # Whatever stands under the mask, also NaN, reaches neither the loss nor the gradient.
    log_probs = torch.where(chosen, inputs.log_probs.float(), 0.0)
    old_log_probs = torch.where(chosen, inputs.old_log_probs.float(), 0.0)
    advantages = torch.where(chosen, inputs.advantages.float(), 0.0)
    # At most exp(20), which float32 holds with room for a product.
    ratio = (log_probs - old_log_probs).detach().clamp(max=20.0).exp()
    cap = inputs.options.get("cap", 2.0)
    return PolicyLossOutput(-ratio.clamp(max=cap) * advantages * log_probs, {"capped": (ratio > cap).float()})
