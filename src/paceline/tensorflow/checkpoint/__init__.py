"""Checkpoints: variables, saved models, and the state of a run beside them."""
