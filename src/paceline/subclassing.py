"""What code that subclasses transformers' Trainer finds beside the documented methods, and what it is told.

The attributes here are read by libraries; the methods are on the path that a run takes. Private methods of the
reference that paceline never calls are in one table: who overrides one is told so.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from paceline.accelerate_view import AcceleratorView
from paceline.args.plan import resolve_duration
from paceline.data.loading import loader_length
from paceline.model.compilation import compile_model

if TYPE_CHECKING:
    from paceline.args.training import TrainingArguments
    from paceline.core.outputs import EvalLoopOutput
    from paceline.core.state import TrainerState
    from paceline.model.objective import Objective
    from paceline.model.signature import ForwardSignature
    from paceline.trainer import Trainer
    from paceline.training import Run

logger = logging.getLogger(__name__)

LOOP = "override training_step, compute_loss, get_batch_samples or log, or use a TrainerCallback"
FILES = "override _save_checkpoint, _save or _load_from_checkpoint"
# methods of the reference (4.57 and 5.x) that no run of paceline calls -> what serves instead
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
    "_hp_search_setup": "use model_init",
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
    "_report_to_hp_search": "use on_evaluate",
    "_rotate_checkpoints": "set save_total_limit",
    "_run_epoch": LOOP,
    "_save_tpu": FILES,
    "_sorted_checkpoints": "set save_total_limit",
    "_sync_replicated_trainable_parameters": LOOP,
    "_track_num_input_tokens": "set include_num_input_tokens_seen",
    "_tune_save_checkpoint": FILES,
    "_update_auto_batch_size": "set auto_find_batch_size",
    "_validate_args": "override __init__",
    "compare_trainer_and_checkpoint_args": "a run that goes on with other arguments says which, without being asked",
    "create_accelerator_and_postprocess": "trainer.accelerator is a view that is made when it is read",
    "ipex_optimize_model": "set torch_compile",
    "prediction_loop": "override evaluation_loop",
    "propagate_args_to_deepspeed": "its config is filled from the arguments when a run starts",
    "set_initial_training_values": "set max_steps or num_train_epochs",
    "torch_jit_model_eval": "set torch_compile",
}


class ForSubclasses:
    """Attributes and methods of the Trainer that only code written against transformers' asks for.

    Attributes:
        hub_model_id: the repository that is pushed to, once there is one.
        push_in_progress: a push that is under way, or None.
        hp_name, hp_search_backend: of a hyper-parameter search.
    """

    _total_loss_scalar = 0.0  # an own `_maybe_log_save_evaluate` adds to it; nothing here reads it
    hub_model_id: str | None = None
    push_in_progress: Any = None
    hp_name: Any = None
    hp_search_backend: Any = None
    args: TrainingArguments
    state: TrainerState
    signature: ForwardSignature
    objective: Objective
    run: Run | None
    _view: AcceleratorView | None = None
    _gather: Any = None

    @property
    def is_fsdp_enabled(self) -> bool:
        """Whether processes hold shards of the model, by `fully_shard`."""
        return bool(cast("Trainer", self).strategy.is_sharded) and not self.is_deepspeed_enabled

    @property
    def is_deepspeed_enabled(self) -> bool:
        """Whether DeepSpeed's engine makes the updates."""
        return bool(self.args.deepspeed)

    @property
    def deepspeed(self) -> Any:
        """DeepSpeed's engine, once a run has made it; else None."""
        return getattr(cast("Trainer", self).strategy, "engine", None)

    @property
    def is_fsdp_xla_enabled(self) -> bool:
        """Whether XLA devices hold shards of the model."""
        strategy = cast("Trainer", self).strategy
        return bool(strategy.is_sharded and strategy.is_opaque)

    @property
    def is_fsdp_xla_v2_enabled(self) -> bool:
        """The same: there is no other way here."""
        return self.is_fsdp_xla_enabled

    @property
    def accelerator(self) -> AcceleratorView:
        """A view with the members of accelerate's Accelerator that subclasses use."""
        if self._view is None:
            self._view = AcceleratorView(cast("Trainer", self))
        return self._view

    @accelerator.setter
    def accelerator(self, value: Any) -> None:
        self._view = value

    @property
    def gather_function(self) -> Any:
        """How evaluation gathers tensors from the processes. An own `evaluation_loop` may set its own."""
        return self.accelerator.gather_for_metrics if self._gather is None else self._gather

    @gather_function.setter
    def gather_function(self, value: Any) -> None:
        self._gather = value

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """Micro-batches of the update in progress.

        Setting it while an update is made divides the losses of its remaining micro-batches by that number instead,
        where they are means (not where `loss_is_scaled_for_ga`); the next update counts anew.
        """
        if self.run is None:
            return self.args.gradient_accumulation_steps
        engine = self.run.engine
        return engine.num_micro_steps if engine.own_divisor is None else engine.own_divisor

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, value: int) -> None:
        if self.run is not None:
            self.run.engine.own_divisor = value

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the loss is divided by `num_items_in_batch`, which is then counted and passed on.

        Read off the model; setting it decides, for this Trainer.
        """
        return self.signature.takes_num_items

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, value: bool) -> None:
        self.signature = replace(self.signature, takes_num_items=bool(value))
        self.objective.read(self.signature)

    @property
    def _train_batch_size(self) -> int:
        """Samples of a micro-batch on this process; smaller after an out-of-memory, where that is allowed."""
        return self.run.plan.micro_batch_size if self.run is not None else self.args.train_batch_size

    @_train_batch_size.setter
    def _train_batch_size(self, value: int) -> None:
        if self.run is not None:
            raise ValueError(
                f"_train_batch_size={value} cannot be set while a run is in progress, whose samples are shared out "
                "already: set it before train(), or set auto_find_batch_size=True."
            )
        self.args.per_device_train_batch_size = value

    @property
    def _globalstep_last_logged(self) -> int:
        """The step of the last row of losses; an own `_maybe_log_save_evaluate` sets it where it has logged one."""
        loop = self.run.loop if self.run is not None else None
        return self.state.global_step - (loop.unlogged.num_updates if loop is not None else 0)

    @_globalstep_last_logged.setter
    def _globalstep_last_logged(self, value: int) -> None:
        if self.run is not None and self.run.loop is not None:
            self.run.loop.summarise()

    def _get_learning_rate(self) -> float:
        """The learning rate of the first parameter group. For subclasses: no run asks it."""
        return float(cast("Trainer", self).get_learning_rates()[0])

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Note the best metric, and return whether it is this one. For subclasses: a run decides by itself."""
        loop = self.run.loop if self.run is not None else None
        return loop.note_best(metrics) if loop is not None else False

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The older name of `evaluation_loop`, which it calls. No run calls it."""
        trainer = cast("Trainer", self)
        return trainer.evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[int, int, int, float, int, int, int]:
        """What a run with `args` over the batches of `dataloader` comes to. For subclasses: no run asks it.

        Returns:
            (epochs begun; updates in an epoch; samples in an epoch; samples in the run; samples in an update;
            micro-batches in an epoch; updates in the run). Where the loader has no length, an epoch is the whole run.

        Raises:
            ValueError: the loader is empty, or has no length while `max_steps` is not set.
        """
        trainer = cast("Trainer", self)
        in_update = trainer.get_total_train_batch_size(args)
        in_epoch = loader_length(dataloader)
        duration = resolve_duration(args, in_epoch, args.gradient_accumulation_steps, [])
        in_run, updates = duration.max_steps, duration.updates_per_epoch
        if in_epoch is None or updates is None:
            samples = in_run * in_update
            in_epoch = in_run * args.gradient_accumulation_steps
            return duration.num_epochs, in_run, samples, samples, in_update, in_epoch, in_run
        samples = trainer.num_examples(dataloader)
        all_samples = in_run * in_update if args.max_steps > 0 else samples * args.num_train_epochs
        return duration.num_epochs, updates, samples, all_samples, in_update, in_epoch, in_run

    def compare_trainer_and_checkpoint_args(
        self, training_args: TrainingArguments, trainer_state: TrainerState
    ) -> None:
        """Warn where intervals or the batch size of arguments are not those a state was saved with.

        For subclasses: a run that goes on from a checkpoint compares all of its arguments by itself.
        """
        pairs = [(f"{kind}_steps", f"{kind}_steps") for kind in ("logging", "eval", "save")]
        changes = []
        for option, saved in (*pairs, ("per_device_train_batch_size", "train_batch_size")):
            now, before = getattr(training_args, option), getattr(trainer_state, saved)
            if now is not None and before is not None and now != before:
                changes.append(f"{option} is {now} and was {before}")
        if changes:
            logger.warning("The arguments are not those of the checkpoint: %s.", "; ".join(changes))

    @property
    def neftune_noise_alpha(self) -> float | None:
        """The argument of that name."""
        return self.args.neftune_noise_alpha

    @neftune_noise_alpha.setter
    def neftune_noise_alpha(self, value: float | None) -> None:
        self.args.neftune_noise_alpha = value

    if not TYPE_CHECKING:  # a type checker would take every name for granted

        def __getattr__(self, name: str) -> Any:
            """Reached only where nothing of that name exists: what no run calls is named, with what serves instead."""
            if name in UNCALLED:
                raise AttributeError(f"{type(self).__name__}.{name} is not there: no run calls it; {UNCALLED[name]}.")
            return object.__getattribute__(self, name)  # raises what was raised before, that of a property included

    @staticmethod
    def num_tokens(train_dl: Iterable[Mapping[str, Any]], max_steps: int | None = None) -> int:
        """Input tokens, padding included, in one pass of a loader.

        Args:
            train_dl: its batches hold `input_ids`; they are all read, or one of them with `max_steps`.
            max_steps: count this many batches like the first instead.
        """
        if max_steps is not None:
            return max_steps * next((batch["input_ids"].numel() for batch in train_dl), 0)
        return sum(batch["input_ids"].numel() for batch in train_dl)

    def end(self) -> None:
        """Leave the process group, where there is one. Nothing may ask the other processes for anything after it."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def get_sp_size(self) -> int:
        """Processes that have a part of each sequence, and exchange heads."""
        return int(cast("Trainer", self).strategy.mesh.sp)

    def get_cp_size(self) -> int:
        """Processes that have a part of each sequence, and gather keys and values."""
        return int(cast("Trainer", self).strategy.mesh.cp)

    def get_tp_size(self) -> int:
        """Processes that share each matrix."""
        return int(cast("Trainer", self).strategy.mesh.tp)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """What is put around the model that the strategy prepared: torch.compile, where it is asked for."""
        return compile_model(model, self.args) if training else model


def meet_subclass(trainer: Trainer) -> None:
    """Start accelerate's states for a library's trainer, and name its methods that no run here calls."""
    if type(trainer).__module__.startswith("paceline."):
        return
    if "accelerate" in sys.modules:  # whose functions may be called before the view is read
        assert trainer.accelerator is not None
    for cls in type(trainer).__mro__:
        if cls.__module__.startswith("paceline."):
            continue
        for name in UNCALLED.keys() & vars(cls).keys():
            logger.warning("%s.%s is never called by paceline: %s.", cls.__qualname__, name, UNCALLED[name])
