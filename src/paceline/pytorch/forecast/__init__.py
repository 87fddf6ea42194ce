"""A forecast of what a run takes: memory, disk, steps, evaluations and, if asked, time."""
