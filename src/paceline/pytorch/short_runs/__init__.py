"""Short runs on the Trainer's own model and data, whose effects are undone: searches and measurements."""
