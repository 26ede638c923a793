"""Agent loops in a training run: workers that run them, and the stage that requests rollouts."""
