"""Checkpoint formats: full or sharded, and those of other libraries, under transformers' file names."""
