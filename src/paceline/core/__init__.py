"""What every engine shares: events, state, the loop, schedules, folders. Standard library and numpy only."""
