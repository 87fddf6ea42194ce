"""Training phases (`phases`) with TensorFlow."""
