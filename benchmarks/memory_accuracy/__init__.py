"""Predicted against measured memory, on the CPU."""
