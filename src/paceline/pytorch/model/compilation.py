"""Compiles the whole model or its repeated blocks in place; classes, names and hooks are unchanged."""

from __future__ import annotations

import logging

import torch
from torch import nn

from paceline.args.sections import Options
from paceline.pytorch.model.blocks import repeated_blocks

logger = logging.getLogger(__name__)

_MARK = "_paceline_compiled"  # attribute of a compiled module: its settings


def compile_model(model: nn.Module, args: Options) -> nn.Module:
    """Compiles `model` if `torch_compile` is set, with `torch_compile_backend` and `torch_compile_mode`.

    With `compile_regions`, each repeated block is compiled separately. Blocks of one class share the compilation, which
    takes a fraction of the time. Compilation happens at the first call.

    Returns:
        `model` itself.

    Raises:
        ValueError: `compile_regions` for a model without repeated blocks.
    """
    if not args.torch_compile:
        return model
    settings = {"backend": args.torch_compile_backend or "inductor"}
    if args.torch_compile_mode:
        settings["mode"] = args.torch_compile_mode
    check_settings(**settings)
    modules = [model]
    if getattr(args, "compile_regions", False):
        modules = [block for _, block in repeated_blocks(model)]
        if not modules:
            raise ValueError(
                f"compile_regions=True: {type(model).__name__} has no repeated blocks (modules in an nn.ModuleList, or "
                "of one class in an nn.Sequential); leave it out to compile the whole model"
            )
    for module in modules:
        if vars(module).get(_MARK) != settings:
            module.compile(**settings)
            setattr(module, _MARK, settings)
    what = f"{len(modules)} repeated blocks" if modules != [model] else type(model).__name__
    logger.info("torch.compile of %s (%s) at the first step.", what, ", ".join(settings.values()))
    return model


def check_settings(backend: str, mode: str | None = None) -> None:
    """Checks before the first step that torch.compile knows the backend and the mode.

    Raises:
        ValueError: there is no such backend or mode; the message lists the known ones.
    """
    modes = sorted({"default", *torch._inductor.list_mode_options()})
    if mode is not None and mode not in modes:
        raise ValueError(f"torch_compile_mode={mode!r} is unknown: use one of {', '.join(modes)}.")
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        usual = ", ".join(sorted(torch.compiler.list_backends()))
        raise ValueError(f"torch_compile_backend={backend!r} is unknown: use one of {usual}.")


def undo_compilation(model: nn.Module) -> None:
    """Removes the compilation that `compile_model` applied to `model` and its modules."""
    for module in model.modules():
        if _MARK in vars(module):
            delattr(module, _MARK)
            module._compiled_call_impl = None
