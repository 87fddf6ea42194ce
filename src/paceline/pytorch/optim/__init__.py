"""Optimizers by name, parameter groups, and learning-rate schedulers."""
