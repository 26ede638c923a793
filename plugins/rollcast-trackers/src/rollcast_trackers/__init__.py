"""Trackers that hand a run's metrics to the usual experiment trackers.

Importing this package, or one of its modules, imports none of their libraries; each is imported when a
run starts that names its tracker.

- :mod:`rollcast_trackers.background`: what they share: a thread that a slow or broken library cannot leave.
- ``tensorboard_tracker``, ``wandb_tracker``, ``mlflow_tracker``, ``swanlab_tracker``, ``trackio_tracker``,
  ``clearml_tracker``: one each.
"""
