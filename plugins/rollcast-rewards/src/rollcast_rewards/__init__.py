"""Rewards of rollcast: rules, functions from a file of your own, and the manager that applies them.

Importing this package costs nothing; the parts live in its modules:

- :mod:`rollcast_rewards.schemas`: the config's ``reward`` section.
- :mod:`rollcast_rewards.rules`: ``exact_match`` and ``gsm8k``.
- :mod:`rollcast_rewards.function`: ``function``, a reward from a Python file.
- :mod:`rollcast_rewards.managers`: ``naive``.
"""
