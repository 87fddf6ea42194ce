"""Data sets to batches: sources with a position, collation, columns, the feed of a run."""
