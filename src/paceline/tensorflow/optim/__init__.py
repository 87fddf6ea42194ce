"""Optimizers by name, learning-rate schedules, and the choice between the arguments and a compiled model."""
