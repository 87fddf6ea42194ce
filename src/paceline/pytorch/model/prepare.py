"""Edits a model before the strategy prepares it, and undoes the edits after training.

The order is: Liger kernels (never undone), fused norms, 8-bit linear layers, key-value cache, activation checkpointing,
activations in host memory, noise on the embeddings, detection of inf and NaN.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.args.sections import Options
from paceline.core.optional import LateModule, require
from paceline.core.spelling import nearest
from paceline.pytorch.model.checkpointing import enable_checkpointing
from paceline.pytorch.model.compilation import check_settings, compile_model, undo_compilation
from paceline.pytorch.model.fused_norms import fuse_norms
from paceline.pytorch.model.overflow import DebugUnderflowOverflow

if TYPE_CHECKING:
    from paceline.pytorch.model import compile_watch, fp8, offload
else:
    compile_watch = LateModule("paceline.pytorch.model.compile_watch")
    fp8 = LateModule("paceline.pytorch.model.fp8")
    offload = LateModule("paceline.pytorch.model.offload")

__all__ = [
    "PreparedModel",
    "add_embedding_noise",
    "compile_model",
    "edited_for_evaluation",
    "prepare_model",
    "undo_compilation",
]


class PreparedModel:
    """The edits made to a model.

    Fields:
        notes: one sentence per edit.
        meters: add entries to the log rows of the run.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.meters: list[compile_watch.CompileWatch] = []
        self._undo: list[Callable[[], None]] = []
        self._configured: list[tuple[Any, str, Any, Any]] = []

    def _did(self, note: str, undo: Callable[[], None] | None = None) -> None:
        self.notes.append(note)
        if undo is not None:
            self._undo.append(undo)

    def _configure(self, config: object, name: str, value: object) -> None:
        self._configured.append((config, name, getattr(config, name), value))
        setattr(config, name, value)

    def undo(self) -> None:
        """Undoes the edits in reverse order. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
        for config, name, before, _ in reversed(self._configured):
            setattr(config, name, before)
        self._configured.clear()

    @contextmanager
    def as_given(self) -> Iterator[None]:
        """Restores the model's original config while entered, so that it is saved without the training settings."""
        for config, name, before, _ in reversed(self._configured):
            setattr(config, name, before)
        try:
            yield
        finally:
            for config, name, _, during in self._configured:
                setattr(config, name, during)


def prepare_model(model: nn.Module, args: Any) -> PreparedModel:
    """Edits `model` in place according to the arguments.

    Args:
        model: the model to edit.
        args: provides use_liger_kernel, liger_kernel_config, half_precision_backend, use_cache,
            activation_checkpointing, activation_checkpointing_kwargs, activation_offload, fp8, neftune_noise_alpha,
            debug, and torch_compile, with which recompilations are counted and `undo` removes the compilation.

    Raises:
        ValueError, TypeError: the model does not support an option; earlier edits are undone.
        ImportError: the package for `use_liger_kernel` is missing.
    """
    if args.torch_compile:
        check_settings(args.torch_compile_backend or "inductor", args.torch_compile_mode)
    prepared = PreparedModel()
    try:
        if args.use_liger_kernel:
            prepared._did(_apply_liger(model, args.liger_kernel_config))
        if getattr(args, "half_precision_backend", "auto") == "apex":
            prepared._did(*fuse_norms(model))
        if args.fp8:
            prepared._did(*fp8.use_fp8(model))
        _set_cache(model, bool(args.use_cache), prepared)
        if args.activation_checkpointing:
            prepared._did(*enable_checkpointing(model, args.activation_checkpointing_kwargs))
        if args.activation_offload:
            prepared._did(*offload.offload_activations(model))
        if args.neftune_noise_alpha:
            prepared._did(*add_embedding_noise(model, args.neftune_noise_alpha))
        if "underflow_overflow" in map(str, args.debug or ()):
            watch = DebugUnderflowOverflow(model)
            prepared._did("Every module is watched for inf and NaN, which is slow.", watch.remove)
    except BaseException:
        prepared.undo()
        raise
    if args.torch_compile:
        prepared._undo.append(lambda: undo_compilation(model))
        counter = compile_watch.CompileWatch(args.torch_compile_mode)
        prepared.meters.append(counter)
        prepared._undo.append(counter.close)
    return prepared


@contextmanager
def edited_for_evaluation(model: nn.Module, args: Options) -> Iterator[None]:
    """Applies `use_cache` and `torch_compile` while entered, for evaluation and prediction outside of training.

    A model that is compiled again with the same settings reuses the compiler's cache.
    """
    prepared = PreparedModel()
    if args.torch_compile:
        prepared._undo.append(lambda: undo_compilation(model))
    _set_cache(model, bool(args.use_cache), prepared)
    try:
        compile_model(model, args)
        yield
    finally:
        prepared.undo()


def _set_cache(model: nn.Module, use_cache: bool, prepared: PreparedModel) -> None:
    """Sets the key-value cache, which only generation needs; in training it wastes memory."""
    config = getattr(model, "config", None)
    configs = [config, getattr(config, "text_config", None), getattr(config, "decoder", None)]
    changed = [each for each in configs if getattr(each, "use_cache", use_cache) not in (use_cache, None)]
    for each in changed:
        prepared._configure(each, "use_cache", use_cache)
    if changed:
        prepared._did(f"The model's key-value cache is {'on' if use_cache else 'off'} while it trains.")


def add_embedding_noise(model: nn.Module, alpha: float) -> tuple[str, Callable[[], None]]:
    """Adds uniform noise to the output of the input embedding in training mode: NEFTune (arXiv:2310.05914).

    The noise is at most alpha / sqrt(length * width) in magnitude, for embeddings of shape (..., length, width). Of a
    sequence in shards, the length is that of the whole.

    Returns:
        A note, and the function that removes the noise.

    Raises:
        ValueError: the model has no input embedding.
    """
    name, embedding = input_embedding(model, "neftune_noise_alpha")

    def add_noise(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        if not module.training:
            return output
        bound = alpha / math.sqrt(whole_length(model, output.shape[-2]) * output.shape[-1])
        return output + torch.empty_like(output).uniform_(-bound, bound)

    handle = embedding.register_forward_hook(add_noise)
    return f"NEFTune noise (alpha={alpha}) on {name}.", handle.remove


def whole_length(model: nn.Module, own: int) -> int:
    """Returns the tokens of the sequences in a pass, of which the modules of this process may see a shard, of `own`."""
    link: Any = getattr(model, "paceline_context", None)
    context = link.find() if link is not None else None
    return own if context is None else int(context.whole_length(own))


def input_embedding(model: nn.Module, option: str) -> tuple[str, nn.Module]:
    """Returns (name, embedding): the embedding that the model names, else the `nn.Embedding` with the most rows.

    A vocabulary has more rows than a position embedding.

    Args:
        model: the model.
        option: the option that needs it, for the error.

    Raises:
        ValueError: there is none.
    """
    ask = getattr(model, "get_input_embeddings", None)
    if callable(ask):
        try:
            named = ask()
        except (NotImplementedError, AttributeError):
            named = None
        if isinstance(named, nn.Module):
            return next((name for name, module in model.named_modules() if module is named), "embeddings"), named
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    if not found:
        raise ValueError(
            f"{option}: {type(model).__name__} has no nn.Embedding; give the model a method "
            "get_input_embeddings() that returns it, or leave the option out"
        )
    return max(found, key=lambda entry: entry[1].num_embeddings)


def _apply_liger(model: nn.Module, config: dict[str, Any] | None) -> str:
    """Replaces layers of a transformers model by Liger kernels, and returns a note. This cannot be undone."""
    kernels = require("liger_kernel.transformers", "liger")
    patches = require("liger_kernel.transformers.monkey_patch", "liger").MODEL_TYPE_TO_APPLY_LIGER_FN
    is_adapted = hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None))
    base: Any = model.get_base_model() if is_adapted else model  # type: ignore[operator]
    model_type = getattr(getattr(base, "config", None), "model_type", None)
    if model_type not in patches:
        raise ValueError(
            f"use_liger_kernel=True: Liger has no kernels for {type(base).__name__} (model type {model_type!r}); "
            "leave it out"
        )
    options = dict(config or {})
    known = [name for name in inspect.signature(patches[model_type]).parameters if name != "model"]
    for option in options:
        if option not in known:
            raise TypeError(f"liger_kernel_config for {model_type} has no {option!r}; {nearest(option, known)}")
    kernels._apply_liger_kernel_to_instance(model=base, **options)
    chosen = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"Liger kernels in {type(base).__name__}{f' ({chosen})' if chosen else ''}."
