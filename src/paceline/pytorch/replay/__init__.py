"""Replays a recorded optimizer step, and ranks its samples."""
