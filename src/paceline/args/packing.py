"""Validation of packing (batches without padding) and of micro-batches with a token budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.args.accelerator_config import is_on
from paceline.args.errors import UnsupportedOption
from paceline.args.mesh import Mesh
from paceline.args.redeclared import own_options
from paceline.args.sections import Options

JOINING = ("pack", "flatten")  # values that put several samples into one row


@dataclass(frozen=True)
class TokenBudget:
    """The token budget of a training micro-batch.

    Attributes:
        tokens: the maximum number of tokens, padding included.
        row_length: the tokens of a packed row; None if each sample is a row.
    """

    tokens: int
    row_length: int | None = None


def packing_of(options: Options) -> str | None:
    """Returns the requested packing; None if the arguments' class replaces the option `packing`."""
    return own_options(options).packing


def sampling_of(options: Options) -> str:
    """Returns the sampling strategy: `train_sampling_strategy`, or "group_by_length" for `packing="group"`."""
    return "group_by_length" if packing_of(options) == "group" else str(options.train_sampling_strategy)


def order_of(options: Options) -> str:
    """Returns the order of the training samples: a name in `ORDERS`."""
    if tokens_of(options) is not None:
        return "tokens"
    regularizers: Any = own_options(options).regularizers or ()
    return next((str(each.order) for each in regularizers if each.order), sampling_of(options))


def tokens_of(options: Options) -> int | None:
    """Returns the token budget of a micro-batch; None if micro-batches have a number of samples."""
    return own_options(options).per_device_train_tokens


def row_length_of(options: Options) -> int | None:
    """Returns the tokens of a row for `packing="pack"`; None for the longest sample of each micro-batch."""
    return options.packing_length if options.packing_length is not None else tokens_of(options)


def budget_of(options: Options) -> TokenBudget | None:
    """Returns the token budget; None if micro-batches have a number of samples."""
    tokens, packing = tokens_of(options), packing_of(options)
    if tokens is None:
        return None
    return TokenBudget(tokens, {"pack": row_length_of(options), "flatten": tokens}.get(str(packing)))


def check_packing(options: Options) -> None:
    """Checks the packing options, alone and in combination with others.

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


def check_tokens(options: Options) -> None:
    """Checks the token budget in combination with other options.

    Raises:
        ValueError: they contradict each other.
        UnsupportedOption: a combination that is not supported.
    """
    tokens = tokens_of(options)
    if tokens is None:
        return
    shown, strategy = f"per_device_train_tokens={tokens}", str(options.train_sampling_strategy)
    size, unset = options.per_device_train_batch_size, type(options).__dataclass_fields__["per_device_train_batch_size"]
    if size != unset.default:
        raise ValueError(
            f"{shown} and per_device_train_batch_size={size} are two sizes of the same micro-batches: leave one of "
            "them out."
        )
    if strategy not in ("random", "group_by_length"):
        raise ValueError(
            f"{shown} and train_sampling_strategy={strategy!r} are two orders of the same samples: leave one of them "
            "out."
        )
    if options.packing_length is not None and options.packing_length > tokens:
        raise ValueError(
            f"packing_length={options.packing_length} is above {shown}, and a row is part of a micro-batch: lower "
            "packing_length, or leave it out."
        )
    if options.dataloader_drop_last:
        raise ValueError(
            f"{shown} and dataloader_drop_last=True: micro-batches differ in their number of samples, and none is "
            "incomplete. Leave dataloader_drop_last out."
        )
    refused = {
        "auto_find_batch_size=True": (options.auto_find_batch_size, "lower per_device_train_tokens"),
        "deepspeed": (bool(options.deepspeed), "use parallel='fsdp', or per_device_train_batch_size"),
        "accelerator_config={'split_batches': True}": (
            is_on(options.accelerator_config, "split_batches"),
            "the budget is that of each process; leave split_batches out",
        ),
        "accelerator_config={'dispatch_batches': True}": (
            is_on(options.accelerator_config, "dispatch_batches"),
            "each process reads its own micro-batches; leave dispatch_batches out",
        ),
    }
    for name, (is_asked, remedy) in refused.items():
        if is_asked:
            raise UnsupportedOption(f"{name} with {shown} is not supported: {remedy}.")


def check_packing_on(options: Options, mesh: Mesh) -> None:
    """Checks packing against the device mesh.

    Raises:
        UnsupportedOption: the mesh cuts the model into stages or its matrices into parts.
    """
    axes = [axis for axis in ("pp", "tp") if getattr(mesh, axis) > 1]
    packing = packing_of(options)
    if packing in JOINING and axes:
        raise UnsupportedOption(
            f"packing={packing!r} with parallel={{{axes[0]!r}: {getattr(mesh, axes[0])}}} is not supported: whether a "
            "model keeps documents apart is tried on the whole model. Use packing='group', or parallel='ddp', 'fsdp', "
            "or a mesh of dp_replicate, dp_shard, cp and sp."
        )
