"""Arguments and the plan resolved from them. Standard library and PyYAML only."""
