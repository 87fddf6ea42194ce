"""What a run will take, before its first step: memory, disk, steps, evaluations and, if asked, time."""
