"""Knowledge distillation: a student is trained with the outputs of a teacher, computed each step or read from disk."""
