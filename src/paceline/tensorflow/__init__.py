"""TensorFlow: the same loop, arguments, events, records and checkpoints as the torch side, and no torch."""
