"""Compiles the whole model or its repeated blocks in place; classes, names and hooks are unchanged."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.args.errors import UnsupportedOption
from paceline.args.sections import Options
from paceline.core.optional import LateModule
from paceline.pytorch.model.blocks import repeated_blocks

if TYPE_CHECKING:
    from paceline.pytorch.model import compile_cache, cuda_graphs, memory_budget
else:
    compile_cache = LateModule("paceline.pytorch.model.compile_cache")
    cuda_graphs = LateModule("paceline.pytorch.model.cuda_graphs")
    memory_budget = LateModule("paceline.pytorch.model.memory_budget")

logger = logging.getLogger(__name__)

_MARK = "_paceline_compiled"  # attribute of a compiled module: its settings
_UNDO = "_paceline_undo_compilation"  # attribute of a compiled model: what is undone with its compilation


def compile_model(model: nn.Module, args: Options) -> nn.Module:
    """Compiles `model` if `torch_compile` is set, by the options of torch.compile.

    Either the whole model is compiled, or each of its repeated blocks separately (`compile_regions`). Blocks of one
    class share the compilation, which takes a fraction of the time. Compilation happens at the first call.

    Returns:
        `model` itself.

    Raises:
        ValueError: an unknown backend or mode, or `compile_regions` for a model without repeated blocks.
        UnsupportedOption: an option that needs compiled blocks, for a model without them.
    """
    if not args.torch_compile:
        return model
    backend, mode = args.torch_compile_backend or "inductor", args.torch_compile_mode
    check_settings(backend, mode)
    blocks = find_regions(model, args.compile_regions)
    modules = blocks or [model]
    if args.activation_offload and not blocks:
        raise UnsupportedOption(
            f"activation_offload=True with torch_compile=True needs blocks that are compiled by themselves, and "
            f"{type(model).__name__} has none: leave one of them out, or set compile_regions=True."
        )
    settings = settings_of(args, len(modules))
    # a copy of a compiled module has its attributes, and is not compiled
    by_user = [module for module in modules if module._compiled_call_impl and _MARK not in vars(module)]
    if by_user:
        logger.warning("torch_compile: %d modules are compiled already, and keep their own settings.", len(by_user))
    fresh = [
        module
        for module in modules
        if module not in by_user and (vars(module).get(_MARK) != settings or not module._compiled_call_impl)
    ]
    for module in fresh:
        module.compile(**settings)
        setattr(module, _MARK, settings)
    if fresh:
        _surround(model, args, is_whole=not blocks)
        what = f"{len(blocks)} repeated blocks" if blocks else type(model).__name__
        chosen = ", ".join(filter(None, (backend, mode)))
        logger.info("torch.compile of %s (%s) at the first step.", what, chosen)
    return model


def settings_of(args: Options, num_modules: int) -> dict[str, Any]:
    """Returns the keyword arguments of torch.compile.

    Args:
        num_modules: compiled modules. Torch counts recompilations for all modules with the same code, so that blocks
            which differ in more than their weights would use up the limit of one module together.
    """
    backend, mode = args.torch_compile_backend or "inductor", args.torch_compile_mode
    settings: dict[str, Any] = {"backend": backend}
    if args.activation_memory_budget is not None:
        budget = float(args.activation_memory_budget)
        settings["backend"] = memory_budget.Budgeted(backend, mode, args.torch_compile_dynamic, budget)
    elif mode:
        settings["mode"] = mode
    if args.torch_compile_dynamic is not None:
        settings["dynamic"] = args.torch_compile_dynamic
    if num_modules > 1 and "recompile_limit" in inspect.signature(torch.compile).parameters:  # not in older releases
        settings["recompile_limit"] = torch._dynamo.config.recompile_limit * num_modules
    return settings


def find_regions(model: nn.Module, asked: bool | None) -> list[nn.Module]:
    """Returns the blocks to compile separately; none to compile the whole model.

    Args:
        model: the model, as the strategy has prepared it.
        asked: `compile_regions`; None takes the blocks if they are alike and make up most of the model.

    Raises:
        ValueError: blocks are required, and there are none.
    """
    if asked is False:
        return []
    blocks = [block for _, block in repeated_blocks(model)]
    # the layers of a pipeline are called one by one, and those of other processes have no values
    is_cut = any(parameter.is_meta for parameter in model.parameters())
    if (asked or is_cut) and not blocks:
        told = "compile_regions=True" if asked else "torch_compile=True with a pipeline compiles the repeated blocks"
        raise ValueError(
            f"{told}: {type(model).__name__} has no repeated blocks (modules in an nn.ModuleList, or "
            f"of one class in an nn.Sequential); leave {'it' if asked else 'torch_compile'} out"
            f"{' to compile the whole model' if asked else ''}"
        )
    return blocks if asked or is_cut or _are_most_of(model, blocks) else []


def _are_most_of(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Returns True if compiling only the blocks is worth it.

    At least half of them have a twin, with which they share a compilation, and they hold at least half of the modules
    without submodules. Parameters would be no measure: most of a small language model's are in its vocabulary.
    """
    kinds = {(type(block), tuple((name, p.shape) for name, p in block.named_parameters())) for block in blocks}
    inside = sum(_num_leaves(block) for block in blocks)
    return 0 < 2 * len(kinds) <= len(blocks) and 2 * inside >= _num_leaves(model)


def _num_leaves(module: nn.Module) -> int:
    return sum(next(each.children(), None) is None for each in module.modules())


def _surround(model: nn.Module, args: Options, is_whole: bool) -> None:
    """Adds what belongs to the compilation of a model and is undone with it: CUDA graphs and the cache."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model  # evaluations call it directly
    _undo_surroundings(inner)
    undo: list[Callable[[], object]] = []
    is_on_gpu = any(parameter.device.type == "cuda" for parameter in model.parameters())
    if is_on_gpu and records_cuda_graphs(args.torch_compile_mode):
        if is_whole:
            cuda_graphs.keep_outputs(model)
        else:
            undo.append(cuda_graphs.mark_steps(inner).remove)
    if args.compile_cache_dir is not None:
        cache = compile_cache.CompileCache(args.compile_cache_dir, inner)
        cache.load()
        undo.append(cache.save)
    setattr(inner, _UNDO, undo)


def _undo_surroundings(module: nn.Module) -> None:
    for undo in vars(module).pop(_UNDO, ()):
        undo()


def records_cuda_graphs(mode: str | None) -> bool:
    """Returns True if a mode of the backend inductor replays CUDA graphs on a GPU."""
    return mode not in (None, "default") and bool(torch._inductor.list_mode_options(mode).get("triton.cudagraphs"))


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
        _undo_surroundings(module)
        if _MARK in vars(module):
            delattr(module, _MARK)
            module._compiled_call_impl = None
