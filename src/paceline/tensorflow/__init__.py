"""The TensorFlow side: the same loop, arguments, events and records as the torch side, without importing torch."""
