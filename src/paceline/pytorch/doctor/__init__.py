"""Checks of model, data, loss and options before a run: a registry of checks, one file for each group."""
