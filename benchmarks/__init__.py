"""Measurements of the library: run each with `python -m benchmarks.NAME`."""
