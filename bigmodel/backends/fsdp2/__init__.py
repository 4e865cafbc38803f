"""Weights, gradients and optimizer states sharded by torch's `fully_shard`."""
