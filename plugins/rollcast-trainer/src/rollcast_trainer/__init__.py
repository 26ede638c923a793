"""Worker classes, stages and the trainers ``ppo`` and ``sft``; :mod:`rollcast_trainer.api` is the declared surface."""
