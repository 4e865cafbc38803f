"""Every backend against one process: the same losses, norms and weights."""
