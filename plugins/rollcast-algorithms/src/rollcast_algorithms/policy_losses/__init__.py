"""Policy losses, per-token surrogates whose gradient improves the policy."""

from rollcast_algorithms.policy_losses._tokens import MAX_LOG_RATIO
from rollcast_algorithms.policy_losses.clipped import cispo, geo_mean, gspo, sapo, vanilla
from rollcast_algorithms.policy_losses.covariance import clip_cov, kl_cov
from rollcast_algorithms.policy_losses.gradients import dppo_kl, dppo_tv, dro, gpg, icepop, topr, vespo

__all__ = [
    "MAX_LOG_RATIO",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gpg",
    "gspo",
    "icepop",
    "kl_cov",
    "sapo",
    "topr",
    "vanilla",
    "vespo",
]
