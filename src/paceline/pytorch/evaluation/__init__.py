"""Evaluation and prediction: forward passes, sums of losses, rows of predictions, metrics."""
