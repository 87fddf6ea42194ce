"""Datasets to batches: order, columns, collation, loading, moving to the device."""
