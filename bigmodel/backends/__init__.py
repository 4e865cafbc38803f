"""Backends: who trains. One folder each, and none knows another."""
