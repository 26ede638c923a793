"""Code that adapters of rollout engines share, from the engine's start to an update of its weights.

``arguments``, ``schema``: keys of the ``rollout`` section and the engine's own arguments; ``server_process`` and
``http_client``: engines that run as a server; ``job``: a request and its waiting caller; ``weight_state`` and
``updates``: loading new weights into the engine's processes.
"""
