"""Naive model parallel: the layers of one process on several devices, in turn."""
