"""Data loading: sources with a position, collation, columns, and the feed of a run."""
