"""Where a run's time and memory go: profilers, floating-point operations, and measured costs."""
