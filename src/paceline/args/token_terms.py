"""Terms beside the cross-entropies of a training loss: validation of `log_token_metrics` and `z_loss_weight`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.args.errors import UnsupportedOption

if TYPE_CHECKING:
    from paceline.args.sections import Options


def name_of(options: Options) -> str:
    """Returns the option that is set, with its value."""
    return f"z_loss_weight={options.z_loss_weight}" if options.z_loss_weight else "log_token_metrics=True"


def check_token_terms(options: Options) -> None:
    """Checks that each cross-entropy of a step is that of its targets.

    Raises:
        ValueError: the weight is negative or not finite.
        UnsupportedOption: another option computes further losses, or hides them.
    """
    weight = options.z_loss_weight
    if not 0 <= weight < math.inf:
        raise ValueError(f"z_loss_weight={weight}: give a weight of 0 or more, such as 1e-4.")
    excluded = {
        "regularizers": (bool(options.regularizers), "which compute other losses in a step"),
        f"loss_by_source={options.loss_by_source!r}": (
            bool(weight and options.loss_by_source),
            "which computes the losses of samples without a z-loss",
        ),
        "use_liger_kernel=True": (options.use_liger_kernel, "whose losses are fused with their logits"),
        "linear_cross_entropy='liger'": (
            options.linear_cross_entropy == "liger",
            "whose kernel returns the losses alone (True computes both in one pass)",
        ),
    }
    for name, (is_set, reason) in excluded.items():
        if is_set:
            raise UnsupportedOption(
                f"{name_of(options)} is not supported with {name}, {reason}: leave one of them out."
            )
