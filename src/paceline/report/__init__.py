"""The report of a run: one HTML file with curves, tables, configuration and checkpoints, readable offline."""
