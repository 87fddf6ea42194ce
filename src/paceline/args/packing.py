"""Validation of packing: batches without padding, and micro-batches of a number of tokens."""

from __future__ import annotations

from paceline.args.errors import UnsupportedOption
from paceline.args.mesh import Mesh
from paceline.args.sections import Options, is_replaced

JOINING = ("pack", "flatten")  # several documents in a row


def packing_of(options: Options) -> str | None:
    """Returns the requested packing; None if the arguments' class has a `packing` of its own."""
    return None if is_replaced(type(options), "packing") else options.packing


def sampling_of(options: Options) -> str:
    """Returns the order of the training samples: `train_sampling_strategy`, or that of `packing="group"`."""
    return "group_by_length" if packing_of(options) == "group" else str(options.train_sampling_strategy)


def check_packing(options: Options) -> None:
    """Checks the options of packing, alone and with others.

    Raises:
        ValueError: they contradict each other.
        UnsupportedOption: a combination that is not supported.
    """
    packing, strategy = packing_of(options), str(options.train_sampling_strategy)
    if options.packing_length is not None and packing != "pack":
        raise ValueError(
            f"packing_length={options.packing_length} is the length of packed rows, and packing={packing!r}: set "
            "packing='pack', or leave packing_length out."
        )
    if packing == "group" and strategy not in ("random", "group_by_length"):
        raise ValueError(
            f"packing='group' and train_sampling_strategy={strategy!r} are two orders of the same samples: leave one "
            "of them out."
        )
    if packing not in JOINING:
        return
    if options.loss_weight == "samples":
        raise ValueError(
            f"loss_weight='samples' and packing={packing!r} contradict each other: the loss of a row of several "
            "samples is a mean over their targets. Set packing='group', or leave loss_weight out."
        )
    if options.use_cache:
        raise UnsupportedOption(
            f"use_cache=True with packing={packing!r} is not supported: a cache of keys belongs to one text. Leave "
            "use_cache out."
        )
    if options.auto_find_batch_size and packing == "flatten":
        raise UnsupportedOption(
            "auto_find_batch_size=True with packing='flatten' is not supported: one row cannot be split. Use "
            "packing='pack', or set per_device_train_batch_size."
        )
    if options.deepspeed:
        raise UnsupportedOption(
            f"packing={packing!r} with deepspeed is not supported: its engine takes the model before it can be tried. "
            "Use packing='group', or parallel='ddp'."
        )


def check_packing_on(options: Options, mesh: Mesh) -> None:
    """Checks packing with the processes of a run.

    Raises:
        UnsupportedOption: the mesh divides the rows or the model.
    """
    axes = [axis for axis in ("pp", "cp", "sp", "tp", "dp_shard") if getattr(mesh, axis) > 1]
    packing = packing_of(options)
    if packing in JOINING and axes:
        raise UnsupportedOption(
            f"packing={packing!r} with parallel={{{axes[0]!r}: {getattr(mesh, axes[0])}}} is not supported: "
            "documents are kept apart in whole rows, by a whole model. Use packing='group', or parallel='ddp'."
        )
