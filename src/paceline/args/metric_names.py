"""Names of metrics, from which their direction follows.

By the rule of transformers a metric is maximized unless its name ends in "loss", and the best model by `eval_wer` is
the worst one. The names here tell where the rule seems wrong.
"""

from __future__ import annotations

import re

HIGHER_IS_BETTER = frozenset({"accuracy", "f1", "precision", "recall", "auc", "bleu", "match"})  # last word of a name
LOWER_IS_BETTER = re.compile(  # at the end of a name; "Loss" is maximized too
    r"(^|[^a-z])(errors?|error_rate|loss|wer|cer|mer|ter|mse|rmse|mae|s?mape|perplexity|ppl|nll|bpb|bits_per_byte|brier|ece|distance|fid)$"
)
NEGATED = re.compile(r"(^|[^a-z])neg(ative)?([^a-z]|$)")  # as in scikit-learn's neg_mean_squared_error


def is_maximized(metric: str) -> bool:
    """Returns True if a metric is maximized by default."""
    return not metric.endswith("loss")


def seems_higher_better(metric: str) -> bool:
    """Returns True if a metric has a name of those whose larger values are better."""
    return metric.rpartition("_")[2].lower() in HIGHER_IS_BETTER


def seems_lower_better(metric: str) -> bool:
    """Returns True if a metric has a name of those whose smaller values are better, and is maximized by default."""
    name = metric.lower()
    return is_maximized(metric) and LOWER_IS_BETTER.search(name) is not None and NEGATED.search(name) is None
