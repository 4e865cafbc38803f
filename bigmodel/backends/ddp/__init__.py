"""Data parallel with equal weights on every rank: torch's DistributedDataParallel."""
