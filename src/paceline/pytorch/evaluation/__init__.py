"""Evaluation and prediction: forward passes, mean losses, predictions and metrics."""
