"""Adapters to common experiment trackers.

Importing this package or one of its modules imports none of their libraries; each library is imported at the
start of a run that names its tracker.

- :mod:`rollcast_trackers.background`: the base class, which calls the library in a separate thread.
- ``tensorboard_tracker``, ``wandb_tracker``, ``mlflow_tracker``, ``swanlab_tracker``, ``trackio_tracker``,
  ``clearml_tracker``: one tracker each.
"""
