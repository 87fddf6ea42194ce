"""TensorFlow checkpoints: variables, saved models, and the state of a run."""
