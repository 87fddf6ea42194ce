"""Compatibility with code for the Hugging Face Trainer: its accelerator, private names, older names and imports."""
