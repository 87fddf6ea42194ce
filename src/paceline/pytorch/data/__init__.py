"""Datasets to batches: sampling, columns, collation, loading, moving to the device."""
