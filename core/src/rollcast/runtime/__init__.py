"""What hosts workers: Ray actors, or this process."""
