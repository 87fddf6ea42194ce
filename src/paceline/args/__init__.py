"""Arguments and the plan made from them. Standard library and PyYAML only."""
