"""Pruning while a model trains, by a callback, and the conversion of a pruned model to 2:4 sparse weights."""

from paceline.pytorch.pruning.callback import Pruning as Pruning
from paceline.pytorch.pruning.callback import to_semi_structured as to_semi_structured
