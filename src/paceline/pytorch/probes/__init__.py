"""Extra calls of user code whose side effects are undone, from which the reduction of a loss is inferred."""
