"""Where tensors live: the world of processes, precision, strategies, random state."""
