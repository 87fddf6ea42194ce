"""Ensembles: the models that a run saves for one, and their predictions with a Trainer."""
