"""The training loss of each source of a mixture: validation of `loss_by_source`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.args.errors import UnsupportedOption
from paceline.args.packing import JOINING, packing_of

if TYPE_CHECKING:
    from paceline.args.sections import Options


def check_source_loss(options: Options) -> None:
    """Checks that the losses of single samples are known.

    Raises:
        UnsupportedOption: another option hides or mixes them.
    """
    losses = "whose loss is not that of single samples"
    excluded = {
        f"packing={options.packing!r}": (packing_of(options) in JOINING, "which joins samples into rows"),
        f"linear_cross_entropy={options.linear_cross_entropy!r}": (
            options.linear_cross_entropy not in (False, "auto"),
            "which saves the logits",
        ),
        "dataloader_in_order=False": (not options.dataloader_in_order, "which reorders the batches"),
        "regularizers": (bool(options.regularizers), losses),
        "deepspeed": (bool(options.deepspeed), "which runs the passes itself"),
    }
    for name, (is_set, reason) in excluded.items():
        if is_set:
            raise UnsupportedOption(
                f"loss_by_source={options.loss_by_source!r} is not supported with {name}, {reason}: leave one of them "
                "out."
            )
