"""Distributed training: the world of processes, precision, strategies, random state."""
