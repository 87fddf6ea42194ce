"""Private methods of the Hugging Face Trainer that no run of paceline calls.

Libraries reference them on the class (`functools.wraps(Trainer._inner_training_loop)`), call them from their own copies
of the Hugging Face Trainer's methods, override them, and replace them on the class. So the class defines each of them.
A call does the equivalent work, or raises an error with the remedy. Overriding or replacing a method logs a warning
that no run calls it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from paceline.args.plan import check, resolve_duration
from paceline.args.redeclared import own_options
from paceline.args.warmups import resolve_batch_warmup
from paceline.checkpoint import folders
from paceline.checkpoint.resuming import STATE_FILE
from paceline.checkpoint.retention import Retention, rotate
from paceline.core.callback_states import restore_callback_states
from paceline.pytorch.data.loading import loader_length
from paceline.pytorch.distributed.collectives import gather_nest
from paceline.pytorch.distributed.strategy import put_on_device

if TYPE_CHECKING:
    from paceline.args.training import TrainingArguments
    from paceline.core.outputs import EvalLoopOutput, TrainOutput
    from paceline.core.state import TrainerState
    from paceline.pytorch.trainer import Trainer

logger = logging.getLogger(__name__)

LOOP = "override training_step, compute_loss, get_batch_samples or log, or use a TrainerCallback"
FILES = "override _save_checkpoint, _save or _load_from_checkpoint"
# methods of the Hugging Face Trainer (4.57 and 5.x) that no run of paceline calls -> their replacements
UNCALLED: dict[str, str] = {
    "_activate_neftune": "set neftune_noise_alpha",
    "_add_sm_patterns_to_gitignore": "override create_model_card, or push_to_hub",
    "_build_accelerator_args": "the device and precision follow from TrainingArguments",
    "_clip_grad_norm": "set max_grad_norm, or use on_pre_optimizer_step",
    "_deactivate_neftune": "set neftune_noise_alpha",
    "_defer_fsdp_gradient_reduction": LOOP,
    "_determine_best_metric": "override evaluate, or set metric_for_best_model",
    "_finalize_training": "use on_train_end",
    "_fsdp_qlora_plugin_updates": LOOP,
    "_gather_and_numpify": "override evaluation_loop",
    "_get_grad_norm": "use on_pre_optimizer_step",
    "_get_learning_rate": "override create_scheduler, or log",
    "_has_mixed_mesh_grads": LOOP,
    "_init_training_state": "use on_train_begin",
    "_inner_training_loop": "override train, or use on_train_begin and on_train_end",
    "_issue_warnings_after_load": FILES,
    "_load_callback_state": "give the callback state_dict and load_state_dict",
    "_mixed_mesh_grad_norm": LOOP,
    "_move_model_to_device": "override place_model",
    "_nested_gather": "override prediction_step or evaluation_loop",
    "_pad_across_processes": "override prediction_step or evaluation_loop",
    "_prepare_context_parallel_inputs": "override _prepare_inputs",
    "_prepare_for_training": "override create_optimizer_and_scheduler, or use on_train_begin",
    "_rotate_checkpoints": "set save_total_limit",
    "_run_epoch": LOOP,
    "_save_tpu": FILES,
    "_sorted_checkpoints": "set save_total_limit",
    "_sync_replicated_trainable_parameters": LOOP,
    "_track_num_input_tokens": "set include_num_input_tokens_seen",
    "_tune_save_checkpoint": FILES,
    "_update_auto_batch_size": "set auto_find_batch_size",
    "_validate_args": "override __init__",
    "compare_trainer_and_checkpoint_args": "a resumed run logs changed arguments itself",
    "create_accelerator_and_postprocess": "trainer.accelerator is a view that is made when it is read",
    "ipex_optimize_model": "set torch_compile",
    "prediction_loop": "override evaluation_loop",
    "propagate_args_to_deepspeed": "its config is filled from the arguments when a run starts",
    "set_initial_training_values": "set max_steps or num_train_epochs",
    "torch_jit_model_eval": "set torch_compile",
}


def not_callable(name: str) -> NotImplementedError:
    """Returns the error for a method that is part of the Hugging Face Trainer's loop."""
    return NotImplementedError(f"Trainer.{name} is a part of the Hugging Face Trainer's loop: {UNCALLED[name]}.")


class PrivateNames:
    """Methods for code that was written for the Hugging Face Trainer. No run calls them."""

    _told_of: frozenset[tuple[int, str]] = frozenset()  # (id of a class, method) of the warnings already logged

    def _tell_of_uncalled(self) -> None:
        """Warns once per Trainer of each overridden method that no run calls."""
        members = [(cls, cls.__qualname__, vars(cls)) for cls in type(self).__mro__]
        for cls, place, names in [(self, f"{type(self).__qualname__} object", vars(self)), *members]:
            for name in sorted(UNCALLED.keys() & names.keys()):
                if names[name] is not _OWN[name] and (id(cls), name) not in self._told_of:
                    self._told_of |= {(id(cls), name)}
                    logger.warning("%s.%s is never called by paceline: %s.", place, name, UNCALLED[name])

    # ---- training

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> Any:
        """Trains. Copies of the Hugging Face Trainer's `train` call this method.

        Args:
            batch_size: samples per micro-batch on this rank; None takes the arguments' value.
            args: the Trainer's own arguments, or None.
            resume_from_checkpoint, trial, ignore_keys_for_eval: see `train`.

        Raises:
            ValueError: `args` are not the Trainer's.
        """
        trainer = cast("Trainer", self)
        if args is not None and args is not trainer.args:
            raise ValueError("_inner_training_loop(args=...) takes trainer.args only: set trainer.args first.")
        if batch_size is not None and batch_size != trainer._train_batch_size:
            trainer._train_batch_size = batch_size
        return trainer._run_training(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        raise not_callable("_init_training_state")

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        raise not_callable("_prepare_for_training")

    def _run_epoch(
        self,
        model: nn.Module,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        trial: Any,
        ignore_keys_for_eval: Any,
        start_time: float,
        resume_from_checkpoint: Any,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
    ) -> None:
        raise not_callable("_run_epoch")

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> TrainOutput:
        raise not_callable("_finalize_training")

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        raise not_callable("_build_accelerator_args")

    def create_accelerator_and_postprocess(self) -> None:
        """Discards the view `trainer.accelerator`; the next access creates a new one."""
        cast("Trainer", self).accelerator = None

    def _validate_args(self) -> None:
        """Checks the rules between options, as the start of a run does."""
        check(cast("Trainer", self).args)

    def _update_auto_batch_size(self, batch_size: int) -> None:
        """Sets the samples per micro-batch on this rank."""
        cast("Trainer", self)._train_batch_size = batch_size

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Does nothing, because a run counts the tokens of every batch itself."""

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Moves a model to the device unless its parts are placed already; tied parameters stay tied."""
        if getattr(model, "hf_device_map", None) is None:
            put_on_device(model, device)

    def _prepare_context_parallel_inputs(
        self,
        model: nn.Module,
        inputs: Any,
    ) -> tuple[Callable[[], AbstractContextManager[Any]], Any]:
        """Returns (a function that makes an empty context, the inputs), because the model shards sequences itself."""
        return contextlib.nullcontext, inputs

    # ---- gradients

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clips the gradients of a model to `max_grad_norm`. Returns the norm before clipping."""
        trainer = cast("Trainer", self)
        return trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Returns the given norm, or else the norm of the model's gradients."""
        if grad_norm is not None:
            return grad_norm
        return cast("Trainer", self).accelerator.clip_grad_norm_(model.parameters(), float("inf"))

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """Returns True if gradients are on different device meshes, or only some of them are on a mesh."""
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return len({getattr(gradient, "device_mesh", None) for gradient in gradients}) > 1

    def _mixed_mesh_grad_norm(self, model: nn.Module, max_norm: float) -> Any:
        """Clips the gradients of the trained model to `max_norm`. Returns the norm before clipping."""
        return cast("Trainer", self).strategy.clip(max_norm)

    def _defer_fsdp_gradient_reduction(self) -> AbstractContextManager[Any]:
        """Returns the context without gradient synchronization."""
        return cast("Trainer", self).accelerator.no_sync()

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Does nothing, because the strategy keeps replicated parameters equal on all ranks."""

    # ---- tensors of several ranks

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Gathers tensors from all ranks, concatenated along the first dimension; None stays None."""
        return None if tensors is None else gather_nest(cast("Trainer", self).world, tensors)

    def _pad_across_processes(self, tensor: Any, pad_index: int = -100) -> Any:
        """Pads along the second dimension to the largest size on any rank."""
        return cast("Trainer", self).accelerator.pad_across_processes(tensor, dim=1, pad_index=pad_index)

    # ---- numbers and logs

    def _get_learning_rate(self) -> float:
        """Returns the learning rate of the first parameter group. For subclasses; no run calls this method."""
        return float(cast("Trainer", self).get_learning_rates()[0])

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Records the best metric. Returns True if it is this one. For subclasses; no run calls this method."""
        run = cast("Trainer", self).run
        loop = run.loop if run is not None else None
        return loop.note_best(metrics) if loop is not None else False

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Calls `evaluation_loop` under its older name. No run calls this method."""
        trainer = cast("Trainer", self)
        return trainer.evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def set_initial_training_values(
        self,
        args: TrainingArguments,
        dataloader: Any,
    ) -> tuple[int, int, int, float, int, int, int]:
        """Returns the length of a run with `args` over the batches of `dataloader`. For subclasses; no run calls this.

        Returns: (number of epochs, rounded up; optimizer steps per epoch; samples per epoch; samples in the run;
            samples per optimizer step; micro-batches per epoch; optimizer steps in the run). If the loader has no
            length, the whole run counts as one epoch.

        Raises:
            ValueError: the loader is empty, or has no length while `max_steps` is not set.
        """
        trainer = cast("Trainer", self)
        in_update = trainer.get_total_train_batch_size(args)
        in_epoch = loader_length(dataloader)
        warmup = resolve_batch_warmup(own_options(args), args.gradient_accumulation_steps, in_update)
        duration = resolve_duration(args, in_epoch, args.gradient_accumulation_steps, [], warmup)
        in_run, updates = duration.max_steps, duration.updates_per_epoch
        micro_batches = in_run * args.gradient_accumulation_steps if warmup is None else warmup.total(in_run)
        in_steps = micro_batches * in_update // args.gradient_accumulation_steps
        if in_epoch is None or updates is None:
            return duration.num_epochs, in_run, in_steps, in_steps, in_update, micro_batches, in_run
        samples = trainer.num_examples(dataloader)
        all_samples = in_steps if args.max_steps > 0 else samples * args.num_train_epochs
        return duration.num_epochs, updates, samples, all_samples, in_update, in_epoch, in_run

    def compare_trainer_and_checkpoint_args(
        self,
        training_args: TrainingArguments,
        trainer_state: TrainerState,
    ) -> None:
        """Warns if intervals or the batch size of the arguments differ from those of a saved state.

        This method is for subclasses. A resumed run compares all its arguments itself.
        """
        pairs = [(f"{kind}_steps", f"{kind}_steps") for kind in ("logging", "eval", "save")]
        changes = []
        for option, saved in (*pairs, ("per_device_train_batch_size", "train_batch_size")):
            now, before = getattr(training_args, option), getattr(trainer_state, saved)
            if now is not None and before is not None and now != before:
                changes.append(f"{option} is {now} and was {before}")
        if changes:
            logger.warning("The arguments differ from the checkpoint's: %s.", "; ".join(changes))

    # ---- checkpoints

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warns of names that `load_state_dict` found missing or unexpected.

        If exactly the names are missing that the model never saves, its weights are tied again without a warning.
        """
        model: Any = cast("Trainer", self).model
        missing, unsaved = load_result.missing_keys, getattr(model, "_keys_to_ignore_on_save", None) or ()
        if missing and set(missing) == set(unsaved):
            model.tie_weights()
        elif missing:
            logger.warning("There were missing keys in the checkpoint model loaded: %s.", missing)
        if unexpected := load_result.unexpected_keys:
            logger.warning("There were unexpected keys in the checkpoint model loaded: %s.", unexpected)

    def _load_callback_state(self) -> None:
        """Restores the callbacks' states from `state.stateful_callbacks` if the arguments request it."""
        trainer = cast("Trainer", self)
        if trainer.args.restore_callback_states_from_checkpoint:
            states: Mapping[str, Any] = trainer.state.stateful_callbacks
            restore_callback_states(trainer.callback_handler, states, with_arguments=True)

    def _sorted_checkpoints(
        self,
        output_dir: str | None = None,
        checkpoint_prefix: str = folders.PREFIX_CHECKPOINT_DIR,
        use_mtime: bool = False,
    ) -> list[str]:
        """Returns the paths of the checkpoints in a folder, oldest first."""
        trainer = cast("Trainer", self)
        folder = str(trainer._output_folder()) if output_dir is None else output_dir
        return folders.sort_checkpoints(folder, checkpoint_prefix, use_mtime, trainer.state.best_model_checkpoint)

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
        """Deletes the oldest checkpoints of the run, by step, until `save_total_limit` are left."""
        trainer = cast("Trainer", self)
        folder = str(trainer._output_folder()) if output_dir is None else output_dir
        limit, best = trainer.args.save_total_limit, trainer.state.best_model_checkpoint
        rotate(folder, Retention(last=limit), best=best, run=trainer.run_mark)

    def _save_tpu(self, output_dir: str | None = None) -> None:
        """Saves the model."""
        cast("Trainer", self).save_model(output_dir, _internal_call=True)

    # ---- hyperparameter search

    def _hp_search_setup(self, trial: Any) -> None:
        """Sets the arguments of a trial. Does nothing outside of `hyperparameter_search`."""
        runs = cast("Trainer", self)._trial_runs
        if trial is not None and runs is not None:
            runs.set_up(trial)

    def _meet_trial(self, trial: object) -> None:
        """Reads the facts of a trial's model, which may be of another class than that of the trial before."""
        if trial is not None:
            cast("Trainer", self)._read_model()

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Reports an evaluation of a trial to the backend. Does nothing outside of `hyperparameter_search`."""
        runs = cast("Trainer", self)._trial_runs
        if trial is not None and runs is not None:
            runs.report(step, metrics)

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes model, state, optimizer, schedule and random states to `checkpoint-STEP` in a folder."""
        trainer = cast("Trainer", self)
        folder = Path(checkpoint_dir, folders.checkpoint_name(trainer.state.global_step))
        trainer.save_model(str(folder), _internal_call=True)
        if trainer.args.should_save:
            trainer.state.save_to_json(str(folder / STATE_FILE))
            trainer._save_optimizer_and_scheduler(str(folder))
            trainer._save_scaler(str(folder))
            trainer._save_rng_state(str(folder))


# the original attributes of the class, to detect replaced ones
_OWN: Mapping[str, Any] = MappingProxyType({name: vars(PrivateNames).get(name) for name in UNCALLED})
