"""Rewards of rollcast, and the managers that apply them to a batch.

Importing this package imports none of its modules:

- :mod:`rollcast_rewards.schemas`: the config's ``reward`` section.
- :mod:`rollcast_rewards.rules`: ``exact_match`` and ``gsm8k``; :mod:`.choices`: ``multiple_choice`` and ``format``;
  :mod:`.mathematics`: ``math``; :mod:`.code` with :mod:`.sandbox`: ``code``; :mod:`.weighted_sum`; :mod:`.http`.
- :mod:`rollcast_rewards.function`: ``function``, a reward from a Python file; :mod:`.trl`: ``trl``, TRL's functions;
  :mod:`.user_code` finds both.
- :mod:`rollcast_rewards.policy`: treatment of bad samples, for all managers.
- :mod:`rollcast_rewards.managers`: ``naive`` and ``batch``; :mod:`.processes` with :mod:`.worker`: ``prime``;
  :mod:`.remote`; :mod:`.overlong`: ``dapo``.
"""
