"""Framework-independent core: events, state, the training loop, schedules. Standard library and numpy only."""
