"""Data parallel with equal weights on every rank: Horovod's DistributedOptimizer."""
