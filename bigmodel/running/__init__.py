"""Running a plan: processes, the training loop, data and progress."""
