"""Optimizers by name, learning-rate schedules, and the choice between arguments and compiled optimizer."""
