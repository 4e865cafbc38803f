"""fairscale's Pipe: GPipe on the devices of one process."""
