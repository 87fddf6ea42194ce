"""Undocumented members that subclasses of transformers' Trainer use, and their warnings.

Libraries read the attributes; runs call the methods. Methods that no run calls are in `paceline.compat.private_names`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from paceline.args.redeclared import own_options
from paceline.callbacks.memory_stages import MemoryTracker
from paceline.compat.private_names import UNCALLED, PrivateNames
from paceline.core.optional import LateModule
from paceline.pytorch.model.compilation import compile_model
from paceline.pytorch.model.signature import shifts_labels

if TYPE_CHECKING:
    from paceline.args.training import TrainingArguments
    from paceline.compat import accelerate_view
    from paceline.compat.trial_runs import TrialRuns
    from paceline.core.state import TrainerState
    from paceline.pytorch.engine import Engine
    from paceline.pytorch.model.objective import Objective
    from paceline.pytorch.model.signature import ForwardSignature
    from paceline.pytorch.session import Run
    from paceline.pytorch.trainer import Trainer
else:
    accelerate_view = LateModule("paceline.compat.accelerate_view")

logger = logging.getLogger(__name__)


class ForSubclasses(PrivateNames):
    """Attributes and methods of the Trainer that only code written for transformers uses, or other modules.

    Attributes:
        ensemble_host: see `paceline.predictions.ensemble.HasHost`.
        hp_name, hp_search_backend, hp_space, compute_objective: settings of a hyperparameter search.
        use_apex, use_cuda_amp, use_cpu_amp: unused precision flags of version 4.
        sharded_ddp, fsdp, is_fsdp_xla_v1_enabled: unused sharding flags of version 4.
        neftune_hook_handle: always None; the noise is removed with the other changes to the model.
        model_preparation_time: always None; it is not measured.
    """

    _total_loss_scalar = 0.0  # an overridden `_maybe_log_save_evaluate` adds to it; nothing here reads it
    ensemble_host = "paceline.pytorch.ensembles.host"
    hp_name: Any = None
    hp_search_backend: Any = None
    hp_space: Any = None
    compute_objective: Any = None
    _trial_runs: TrialRuns | None = None  # of the search in progress
    _trial_name: str | None = None  # of the current trial
    use_apex = use_cuda_amp = use_cpu_amp = False
    sharded_ddp: Any = None
    fsdp: Any = None
    is_fsdp_xla_v1_enabled = False
    neftune_hook_handle: Any = None
    model_preparation_time: float | None = None
    args: TrainingArguments
    state: TrainerState
    run: Run | None
    signature: ForwardSignature
    objective: Objective
    _view: accelerate_view.AcceleratorView | None = None
    _gather: Any = None

    def _meet_subclass(self) -> None:
        """Initializes accelerate's states for a library's trainer, and warns of its methods that no run calls."""
        self._tell_of_uncalled()
        if "accelerate" in sys.modules and not type(self).__module__.startswith("paceline."):
            assert self.accelerator is not None  # accelerate's functions may be called before the view is used

    @property
    def is_fsdp_enabled(self) -> bool:
        """True if the model is sharded across ranks without DeepSpeed."""
        return bool(cast("Trainer", self).strategy.is_sharded) and not self.is_deepspeed_enabled

    @property
    def is_deepspeed_enabled(self) -> bool:
        """True if DeepSpeed's engine runs the optimizer steps."""
        return bool(self.args.deepspeed)

    @property
    def deepspeed(self) -> Any:
        """Returns DeepSpeed's engine once a run has created it, else None."""
        return getattr(cast("Trainer", self).strategy, "engine", None)

    @property
    def is_fsdp_xla_enabled(self) -> bool:
        """True if the model is sharded over XLA devices."""
        strategy = cast("Trainer", self).strategy
        return bool(strategy.is_sharded and strategy.is_spmd)

    @property
    def is_fsdp_xla_v2_enabled(self) -> bool:
        """True if the model is sharded over XLA devices; version 2 is the only one supported."""
        return self.is_fsdp_xla_enabled

    @property
    def accelerator(self) -> accelerate_view.AcceleratorView:
        """Returns a view with the members of accelerate's Accelerator that subclasses use."""
        if self._view is None:
            self._view = accelerate_view.AcceleratorView(cast("Trainer", self))
        return self._view

    @accelerator.setter
    def accelerator(self, value: Any) -> None:
        self._view = value

    @property
    def scaler(self) -> Any:
        """Returns the GradScaler of float16 training; None in other precisions."""
        return self.accelerator.scaler

    @property
    def do_grad_scaling(self) -> bool:
        """True if there is a `scaler`."""
        return self.scaler is not None

    def is_local_master(self) -> bool:
        """Returns `is_local_process_zero` under its older name."""
        return cast("Trainer", self).is_local_process_zero()

    def is_world_master(self) -> bool:
        """Returns `is_world_process_zero` under its older name."""
        return cast("Trainer", self).is_world_process_zero()

    @property
    def _memory_tracker(self) -> MemoryTracker:
        """Returns a tracker of a stage's memory, which copies of `evaluate` and `predict` start and stop."""
        return MemoryTracker(cast("Trainer", self).memory_stages)

    @property
    def _trial(self) -> Any:
        """Returns the run's trial of a hyperparameter search, or None."""
        return self.run.trial if self.run is not None else None

    @property
    def _initial_global_step(self) -> int:
        """Returns the step at which the run in progress began."""
        return self.run.first_step if self.run is not None else 0

    @property
    def _initial_num_input_tokens_seen(self) -> int:
        """Returns the input tokens seen before the run in progress."""
        return self.run.first_tokens if self.run is not None else 0

    @property
    def _loss_shifts_labels(self) -> bool:
        """True if the model's own loss compares the output at i with the label at i + 1."""
        return shifts_labels(cast("Trainer", self).model)

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """True if transformers has sharded the model while loading it."""
        return bool(getattr(cast("Trainer", self).model, "is_distributed_loading_by_transformers", False))

    @property
    def gather_function(self) -> Any:
        """Returns the function that gathers tensors in evaluation. An overridden `evaluation_loop` may set it."""
        return self.accelerator.gather_for_metrics if self._gather is None else self._gather

    @gather_function.setter
    def gather_function(self, value: Any) -> None:
        self._gather = value

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """Returns the micro-batches of the optimizer step in progress.

        Setting it during an optimizer step divides the losses of the step's remaining micro-batches by that number
        instead, if they are means (not with `loss_is_scaled_for_ga`). The next step uses its own count again.
        """
        if self.run is None:
            return self.args.gradient_accumulation_steps
        engine: Engine = self.run.engine
        return engine.num_micro_steps if engine.own_divisor is None else engine.own_divisor

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, value: int) -> None:
        if self.run is not None:
            self.run.engine.own_divisor = value

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """True if the loss is divided by `num_items_in_batch`, which is then counted and passed on.

        The value is inferred from the model; setting it overrides this for this Trainer.
        """
        return self.signature.takes_num_items

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, value: bool) -> None:
        self.signature = replace(self.signature, takes_num_items=bool(value))
        self.objective.read(self.signature)

    @property
    def _train_batch_size(self) -> int:
        """Returns the samples per micro-batch on this rank; `auto_find_batch_size` may have lowered it."""
        return self.run.plan.micro_batch_size if self.run is not None else self.args.train_batch_size

    @_train_batch_size.setter
    def _train_batch_size(self, value: int) -> None:
        if self.run is not None:
            raise ValueError(
                f"_train_batch_size={value} cannot be set while a run is in progress, whose samples are sharded "
                "already: set it before train(), or set auto_find_batch_size=True."
            )
        self.args.per_device_train_batch_size = value

    @property
    def _globalstep_last_logged(self) -> int:
        """Returns the step of the last logged loss; an overridden `_maybe_log_save_evaluate` sets it."""
        loop = self.run.loop if self.run is not None else None
        return self.state.global_step - (loop.unlogged.num_updates if loop is not None else 0)

    @_globalstep_last_logged.setter
    def _globalstep_last_logged(self, value: int) -> None:
        if self.run is not None and self.run.loop is not None:
            self.run.loop.summarise()

    @property
    def neftune_noise_alpha(self) -> float | None:
        """Returns the argument of that name."""
        return self.args.neftune_noise_alpha

    @neftune_noise_alpha.setter
    def neftune_noise_alpha(self, value: float | None) -> None:
        self.args.neftune_noise_alpha = value

    if not TYPE_CHECKING:  # otherwise a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            """Raises for missing names; the error for a method that no run calls names its replacement."""
            if name in UNCALLED:
                raise AttributeError(f"{type(self).__name__}.{name} does not exist: no run calls it; {UNCALLED[name]}.")
            return object.__getattribute__(self, name)  # raises the original error, also if a property raised it

    @staticmethod
    def num_tokens(train_dl: Iterable[Mapping[str, Any]], max_steps: int | None = None) -> int:
        """Returns the input tokens, padding included, in one pass of a loader.

        Args:
            train_dl: a loader whose batches hold `input_ids`. All are read, or only the first one with `max_steps`.
            max_steps: if given, returns the tokens of this many batches of the first one's size.
        """
        if max_steps is not None:
            return max_steps * next((batch["input_ids"].numel() for batch in train_dl), 0)
        return sum(batch["input_ids"].numel() for batch in train_dl)

    def end(self) -> None:
        """Destroys the process group, if there is one. No collective may follow."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def get_sp_size(self) -> int:
        """Returns the size of the sequence-parallel axis (all-to-all of heads)."""
        return int(cast("Trainer", self).strategy.mesh.sp)

    def get_cp_size(self) -> int:
        """Returns the size of the context-parallel axis (all-gather of keys and values)."""
        return int(cast("Trainer", self).strategy.mesh.cp)

    def get_tp_size(self) -> int:
        """Returns the size of the tensor-parallel axis."""
        return int(cast("Trainer", self).strategy.mesh.tp)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Returns the prepared model with its wrapper: torch.compile, if requested."""
        return compile_model(model, own_options(self.args)) if training else model
