"""Names of metrics, from which their direction follows.

By the rule of transformers a metric is maximized unless its name ends in "loss", and the best model by `eval_wer` is
the worst one. The names here tell where the rule seems wrong.
"""

from __future__ import annotations

import re

# the last word of a name, as in recall@5
HIGHER_IS_BETTER = frozenset({"acc", "accuracy", "ap", "auc", "auprc", "auroc", "bleu", "f1", "kappa", "map", "match"})
HIGHER_IS_BETTER |= {"mcc", "ndcg", "precision", "r2", "recall", "rouge"}
GAINS = frozenset({"correlation", "drop", "gain", "improvement", "reduction"})  # as the last word, even of an error
LOWER_IS_BETTER = re.compile(
    r"(?<![a-z])(error_rate|errors?|loss|wer|cer|mer|ter|eer|r?msle|r?mse|mae|mase|s?mape|perplexity|ppl|nll|bpb"
    r"|bits_per_byte|brier|ece|crps|kl|distance|fid)(?![a-z])(?P<end>$)?"
)
NEGATED = re.compile(r"(^|[^a-z])neg(ative)?([^a-z]|$)")  # as in scikit-learn's neg_mean_squared_error


def is_maximized(metric: str) -> bool:
    """Returns True if a metric is maximized by default."""
    return not metric.endswith("loss")


def seems_higher_better(metric: str) -> bool:
    """Returns True if a metric has a name of those whose larger values are better."""
    return _last_word(metric) in HIGHER_IS_BETTER


def seems_lower_better(metric: str, at_end: bool = False) -> bool:
    """Returns True if a metric is named after an error, whose smaller values are better, and is maximized by default.

    Args:
        metric: the name.
        at_end: the error must be the end of the name. False: a word of it, as in `eval_wer_clean`.
    """
    name = metric.lower()
    is_gain = _last_word(name) in HIGHER_IS_BETTER | GAINS or NEGATED.search(name) is not None
    if is_gain or not is_maximized(metric):
        return False
    return any(not at_end or found["end"] is not None for found in LOWER_IS_BETTER.finditer(name))


def _last_word(metric: str) -> str:
    words = re.findall(r"[a-z]+[0-9]*", metric.lower())
    return str(words[-1]) if words else ""
