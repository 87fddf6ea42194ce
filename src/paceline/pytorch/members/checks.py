"""Refuses what members cannot do when they are trained at once, before the first step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields

import torch

from paceline.args.errors import UnsupportedOption
from paceline.args.members import Member
from paceline.args.sections import Options
from paceline.callbacks.early_stopping import EarlyStoppingCallback
from paceline.core.methods import is_ours
from paceline.pytorch.checkpoint.tensors import CheckpointError
from paceline.pytorch.distributed.random import preserved_rng
from paceline.pytorch.ensembles.snapshots import SnapshotEnsemble
from paceline.pytorch.evaluation.harness import EvaluationHarness
from paceline.pytorch.evaluation.samples import EvaluationSamples
from paceline.pytorch.members.stack import REMEDY, MemberStack
from paceline.pytorch.pruning.callback import Pruning

logger = logging.getLogger(__name__)

TOLERANCE = 1e-3  # relative, between losses computed at once and one by one; far above rounding in float32
NAMES = "MembersTrainer"
REFUSED = {
    **dict.fromkeys(("fsdp", "deepspeed", "parallel"), "members are neither sharded nor distributed; use one process"),
    **dict.fromkeys(("ema_decay", "swa_start"), "leave it out, or train the members one by one"),
    **dict.fromkeys(
        (
            *("gradient_checkpointing", "activation_checkpointing", "activation_offload", "torch_compile", "fp8"),
            *("neftune_noise_alpha", "use_liger_kernel", "linear_cross_entropy", "optimizer_in_backward"),
            *("optimizer_state_dtype", "gradient_noise_scale", "log_flops", "batch_size_warmup"),
            *("sequence_length_warmup", "packing", "predict_with_generate", "regularizers"),
            *("teacher", "phases", "eval_samples", "eval_harness", "snapshot_ensemble", "data_map"),
            *("pruning", "loss_by_source"),
            *("log_token_metrics", "z_loss_weight"),
        ),
        "leave it out",
    ),
    "fp16": "its loss scale is one for all members; use bf16, or full precision",
    "nonfinite_policy": "set 'warn'; a member that diverges harms no other",
    "push_to_hub": "push the folder of a member after training",
}

OF_ONE_MODEL: dict[type, str] = {
    Pruning: "chooses weights",
    SnapshotEnsemble: "saves the weights",
    EvaluationHarness: "evaluates the model",
    EvaluationSamples: "shows the predictions",
}


def check_arguments(args: Options, members: Sequence[Member]) -> None:
    """Checks the options of a run.

    Raises:
        UnsupportedOption: one cannot be honoured for each member.
    """
    defaults = {field.name: field.default for field in fields(args)}
    for name, remedy in REFUSED.items():
        value = getattr(args, name, None)
        if value and value != defaults.get(name):
            raise UnsupportedOption(f"{NAMES}: {name}={value!r} is not supported: {remedy}.")
    check_own_data(args, members)


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Checks that no callback needs a single model.

    Raises:
        UnsupportedOption: one does.
    """
    for each in callbacks:
        given = each if isinstance(each, type) else type(each)
        for kind, use in OF_ONE_MODEL.items():
            if issubclass(given, kind):
                raise UnsupportedOption(f"{NAMES}: the callback {given.__name__} {use} of one model: leave it out.")


def check_stopping(stopping: EarlyStoppingCallback, former: EarlyStoppingCallback | None) -> None:
    """Checks early stopping, of which patience and threshold are applied to each member.

    Args:
        stopping: the callback.
        former: the one that was given before, or None.

    Raises:
        UnsupportedOption: it is the second one, or a subclass with methods of its own.
    """
    own = [name for name in ("on_evaluate", "check_metric_value") if not is_ours(getattr(stopping, name))]
    if own:
        raise UnsupportedOption(
            f"{NAMES}: {own[0]} of {type(stopping).__name__} is not called for each member: use EarlyStoppingCallback."
        )
    if former is not None:
        raise UnsupportedOption(f"{NAMES}: members stop by one EarlyStoppingCallback: leave the others out.")


def check_own_data(args: Options, members: Sequence[Member]) -> None:
    """Checks the options of members that read other batches than the others.

    Raises:
        UnsupportedOption: batches cannot be made, or weighed, for each member.
    """
    named = next((m for m in members if m.data_seed is not None or m.bootstrap is not None), None)
    if named is None:
        return
    setting = "data_seed" if named.data_seed is not None else "bootstrap"
    remedies = {
        "gradient_accumulation_steps": (args.gradient_accumulation_steps != 1, "raise per_device_train_batch_size"),
        "per_device_train_tokens": (args.per_device_train_tokens is not None, "set per_device_train_batch_size"),
        "auto_find_batch_size": (bool(args.auto_find_batch_size), "set per_device_train_batch_size"),
        "train_sampling_strategy": (
            str(args.train_sampling_strategy) not in ("random", "sequential"),
            "use 'random' or 'sequential'",
        ),
    }
    for name, (is_set, remedy) in remedies.items():
        if is_set:
            raise UnsupportedOption(
                f"Member({setting}={getattr(named, setting)}) with {name}={getattr(args, name)!r}: {remedy}, or let "
                f"all members read the same batches."
            )


def check_methods(methods: Iterable[Callable[..., object]], optimizers: Sequence[object]) -> None:
    """Checks the methods that a subclass overrides, and what users pass in.

    Args:
        methods: bound methods that a subclass may override.
        optimizers: given optimizer and schedule.

    Raises:
        UnsupportedOption: one of them is for a single model.
    """
    remedies = {
        "compute_loss": "pass compute_loss_func",
        "training_step": "leave it out",
        "create_optimizer": "pass optimizer_cls_and_kwargs",
        "create_scheduler": "set lr_scheduler_type",
    }
    for method in methods:
        name = method.__name__
        if not is_ours(method):
            raise UnsupportedOption(
                f"{NAMES}: {name} is overridden, and would get all members at once: {remedies[name]}."
            )
    if any(each is not None for each in optimizers):
        raise UnsupportedOption(f"{NAMES}: optimizers=... is of one model: pass optimizer_cls_and_kwargs.")


def check_vectorized(
    stack: MemberStack, inputs: object, num_items: object, context: Callable[[], AbstractContextManager[object]]
) -> None:
    """Checks on the first batch that the members' losses and gradients can be computed at once, and are the same.

    Random states, buffers, gradients and modes are left as they were.

    Args:
        stack: the members.
        inputs: a batch.
        num_items: the number of targets of the step, or None.
        context: returns the precision's context.

    Raises:
        UnsupportedOption: a module cannot be vectorized, or its results differ.
    """
    buffers = {name: buffer.clone() for name, buffer in stack.named_buffers()}
    modes = {module: module.training for module in stack.modules()}
    parameters = [p for p in stack.parameters() if p.requires_grad]
    try:
        with preserved_rng(), context():
            try:
                loss = stack.losses(inputs, num_items).sum()
                torch.autograd.grad(loss, parameters, allow_unused=True)
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                if is_out_of_memory_text(error):
                    raise
                raise UnsupportedOption(
                    f"{type(stack.module).__name__} cannot be computed for all members at once with torch.func.vmap: "
                    f"{str(error).splitlines()[0]} {REMEDY}{hint(stack)}"
                ) from error
            stack.eval()
            check_equal(stack, inputs, num_items)
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for name, buffer in stack.named_buffers():
                buffer.copy_(buffers[name])


@torch.no_grad()
def check_equal(stack: MemberStack, inputs: object, num_items: object) -> None:
    """Compares losses computed at once with those computed one by one, in evaluation mode."""
    at_once = stack.losses(inputs, num_items)
    with stack.one_by_one():
        one_by_one = stack.losses(inputs, num_items)
    is_close = torch.isclose(at_once.float(), one_by_one.float(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    if not is_close.all():
        raise UnsupportedOption(
            f"{type(stack.module).__name__}: the losses of the members are {at_once.tolist()} at once and "
            f"{one_by_one.tolist()} one by one, so a module does not treat them alike. {REMEDY}"
        )


def hint(stack: MemberStack) -> str:
    """Returns another remedy for a transformers model whose attention is not the plain one."""
    config = getattr(stack.module, "config", None)
    chosen = getattr(config, "_attn_implementation", None)
    return "" if chosen in (None, "eager") else " Or load the model with attn_implementation='eager'."


def is_out_of_memory_text(error: BaseException) -> bool:
    """True for an out-of-memory of a device."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


@contextmanager
def loading_explained(number: int) -> Iterator[None]:
    """Returns a context in which weights of members are loaded; their errors name the number of members.

    Args:
        number: the number of the members that are there.

    Raises:
        CheckpointError: the checkpoint does not fit.
    """
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. The first dimension counts the members: resume with as many as the checkpoint has, here there "
            f"are {number}, in their order and of the same architecture."
        ) from error
