"""Hyperparameter search: backends that choose the hyperparameters of trials. They know no Trainer and no framework."""
