"""Regularizers that run as passes of an optimizer step, in the order of their stages."""
