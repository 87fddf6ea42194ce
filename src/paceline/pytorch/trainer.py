"""The Trainer: the public names of Hugging Face Trainer, each forwarding to the part that does the work.

Owners:
    the Trainer      the user's data and callables, as given; facts read from the model's forward and config
    a session        the parts of one call and their lifecycle; the Trainer keeps the attributes that calls share
    a run            plan, data iterator, engine, loop and signals, during `train`
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.args.adopt import adopt, apply_log_level
from paceline.args.packing import tokens_of
from paceline.args.places import fix_base, placed
from paceline.args.plan import Plan, resolve_update
from paceline.args.redeclared import own_options
from paceline.args.training import TrainingArguments
from paceline.callbacks.defaults import with_defaults
from paceline.callbacks.memory_stages import MemoryStages
from paceline.checkpoint.folders import make_output_folder
from paceline.checkpoint.layout import OPTIMIZER, PRECISION, SCHEDULER
from paceline.compat.hub_names import HubNames
from paceline.compat.subclassing import ForSubclasses
from paceline.core.contracts import StreamingMetric
from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.core.methods import is_ours, texts_in
from paceline.core.metrics import StartTime
from paceline.core.optional import LateModule
from paceline.core.outputs import BestRun, EvalLoopOutput, PredictionOutput, TrainOutput
from paceline.core.state import TrainerControl, TrainerState
from paceline.pytorch import validation
from paceline.pytorch.data import columns
from paceline.pytorch.data.collators import choose_collator
from paceline.pytorch.data.loading import loader_length, named_dataset, sample_count
from paceline.pytorch.distributed.random import preserved_rng, set_seed
from paceline.pytorch.distributed.strategy import put_on_device
from paceline.pytorch.distributed.world import World, current_world
from paceline.pytorch.evaluation.batch_predictor import ignored_keys
from paceline.pytorch.model.factory import check_model, make_model
from paceline.pytorch.model.loss import LabelSmoother, LossNormalizer
from paceline.pytorch.model.operations import estimate_operations
from paceline.pytorch.model.prepare import PreparedModel
from paceline.pytorch.model.signature import innermost
from paceline.pytorch.optim.schedulers import follows_metrics, get_scheduler
from paceline.pytorch.sync import Measure

if TYPE_CHECKING:
    from paceline.compat import trial_runs
    from paceline.core import loop_evaluation
    from paceline.hub import described
    from paceline.predictions import augmentation as test_time
    from paceline.pytorch import packing, parts, session
    from paceline.pytorch.checkpoint import checkpointer
    from paceline.pytorch.doctor import case, findings
    from paceline.pytorch.evaluation import augmentation, predictor
    from paceline.pytorch.forecast import preview, result
    from paceline.pytorch.optim import optimizers as optimizer_registry
    from paceline.pytorch.optim.averages import AveragedWeights
    from paceline.pytorch.short_runs import batch_search, lr_search, module_memory
    from paceline.pytorch.step_parts.registry import StepParts
else:
    batch_search = LateModule("paceline.pytorch.short_runs.batch_search")
    case = LateModule("paceline.pytorch.doctor.case")
    checkpointer = LateModule("paceline.pytorch.checkpoint.checkpointer")
    described = LateModule("paceline.hub.described")
    findings = LateModule("paceline.pytorch.doctor.findings")
    loop_evaluation = LateModule("paceline.core.loop_evaluation")
    lr_search = LateModule("paceline.pytorch.short_runs.lr_search")
    module_memory = LateModule("paceline.pytorch.short_runs.module_memory")
    optimizer_registry = LateModule("paceline.pytorch.optim.optimizers")
    packing = LateModule("paceline.pytorch.packing")
    parts = LateModule("paceline.pytorch.parts")
    preview = LateModule("paceline.pytorch.forecast.preview")
    predictor = LateModule("paceline.pytorch.evaluation.predictor")
    result = LateModule("paceline.pytorch.forecast.result")
    session = LateModule("paceline.pytorch.session")
    test_time = LateModule("paceline.predictions.augmentation")
    trial_runs = LateModule("paceline.compat.trial_runs")

logger = logging.getLogger(__name__)


class Trainer(HubNames, ForSubclasses):
    """Trains, evaluates and predicts with any `nn.Module`.

    Args:
        model: the module to train; alternative to `model_init`.
        args: a `TrainingArguments`; None: all defaults, output in `tmp_trainer`.
        data_collator: `(list of samples) -> batch`; None: pads with `processing_class` if it can, else stacks.
        train_dataset: map-style or iterable; samples are dicts with the names of forward's parameters, or tuples in
            their order.
        eval_dataset: the same, or a dict of several by name.
        processing_class: a tokenizer or processor; pads batches, and is saved with the model.
        model_init: called without arguments (or with the trial) at each `train` for a fresh model.
        compute_loss_func: `(outputs, labels, num_items_in_batch=None) -> loss`, replaces the model's own loss.
        compute_metrics: `(EvalPrediction) -> dict` (with `batch_eval_metrics`: also `compute_result: bool`); or a
            `StreamingMetric`, which is updated batch by batch.
        callbacks: classes or instances, added to the default callbacks.
        optimizers: (optimizer, scheduler); replaces those that the arguments name.
        optimizer_cls_and_kwargs: an optimizer class and its arguments, used with the default parameter groups.
        preprocess_logits_for_metrics: `(logits, labels) -> input of the metrics`, called for each batch.
        tokenizer: the older name of `processing_class`.
        teacher: a module, or the folder of a model of transformers, whose outputs are learned too; see
            docs/distillation.md.

    Raises:
        ValueError, TypeError: an argument contradicts another; the message says what to change.
    """

    loss_is_scaled_for_ga: bool | None = None
    label_names: list[str]  # `_read_model` sets this and the following three
    can_return_loss: bool
    label_smoother: LabelSmoother | None
    _signature_columns: list[str] | None = None

    args: TrainingArguments
    world: World
    run: session.Run | None = None
    loss_normalizer: LossNormalizer
    edits: PreparedModel | None = None  # changes that training made to the model; None outside of training
    averages: AveragedWeights | None = None  # of the training in progress, with ema_decay or swa_start
    step_parts: StepParts | None = None  # the optional parts of the last training
    is_prepared = False  # training or an evaluation has prepared the model: its memory is known
    reports_changes = True  # log arguments that changed since the checkpoint that a run is resumed from
    current_flos = 0.0
    augmented: augmentation.TensorSteps | None = None  # of the evaluation in progress
    _created_lr_scheduler = False
    _packing: packing.Packing | None = None  # packing of training batches, as determined for this model
    _resumed_batch_size: int | None = None  # global batch size, if a run is resumed on another number of processes

    def _make_session(self) -> session.Session:
        return session.session_of(self, self._own_options.phases)

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | StreamingMetric | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
        teacher: nn.Module | str | Path | None = None,
    ) -> None:
        self.args = fix_base(adopt(args) if args is not None else TrainingArguments(output_dir="tmp_trainer"))
        apply_log_level(self.args)
        self.processing_class = validation.choose_processor(processing_class, tokenizer)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.model_init = model_init
        self.compute_loss_func = compute_loss_func
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs, self.teacher = optimizer_cls_and_kwargs, teacher
        self.world = current_world(self.args)
        self.memory_stages = MemoryStages(not self.args.skip_memory_metrics, self.world.device.type)
        self.memory_stages.start("init")
        self.is_model_parallel = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
        self.place_model_on_device = self.args.place_model_on_device is not False and not self.is_model_parallel
        self.model = self._first_model(model)
        self._check_arguments(optimizers, data_collator)
        self.strategy = self._make_session().make_strategy(self._plan())
        self.place_model()
        self._read_model()
        self.data_collator = data_collator or choose_collator(self.processing_class, self.signature.names)
        self.state, self.control = self._first_state(), TrainerControl()
        self.callback_handler = CallbackHandler(
            with_defaults(callbacks or [], self._own_options), self.model, self.processing_class, *optimizers
        )
        if self.args.should_save:
            make_output_folder(self._get_output_dir(None))
        self._meet_subclass()
        self.remote_sync = parts.remote_sync_of(self)
        self._make_publisher().prepare()
        self.memory_stages.stop("init")
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    # ---- steps of the constructor

    def _first_model(self, model: nn.Module | None) -> nn.Module:
        validation.check_model_given(model, self.model_init)
        if model is not None:
            return check_model(model, "`model` is")
        with preserved_rng():  # only the structure of this model is used: `train` creates a new one
            set_seed(self.args.seed)
            return self.call_model_init()

    def _check_arguments(self, optimizers: tuple[Any, Any], data_collator: Any) -> None:
        validation.check_arguments(
            model=self.model,
            model_init=self.model_init,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            data_collator=data_collator,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=self.optimizer_cls_and_kwargs,
            compute_metrics=self.compute_metrics,
            options=self._own_options,
        )

    def _first_state(self) -> TrainerState:
        return TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )

    def _read_model(self) -> None:
        facts = parts.model_facts_of(self)
        self.model_wrapped = self.model
        self.signature = facts.signature
        self.label_names = facts.label_names
        self.can_return_loss = facts.signature.can_return_loss
        self.loss_normalizer, self.label_smoother = facts.loss_normalizer, facts.label_smoother
        self.objective, self.distillation = facts.objective, facts.distillation

    def _plan(self) -> Plan:
        return self._make_session().plan_without_data()

    def place_model(self) -> None:
        """Moves the model to the device, unless the user disabled that, or it is quantized, split or sharded."""
        quantized = getattr(self.model, "quantization_method", None) is not None
        if self.place_model_on_device and self.strategy.accepts_full_model and not quantized:
            put_on_device(self.model, self.world.device)
        self.model_wrapped = self.model

    @property
    def tokenizer(self) -> Any:
        """Returns `processing_class` under its older name."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self.processing_class = value

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Returns a model from `model_init`, which takes no argument or the trial."""
        assert self.model_init is not None
        return make_model(self.model_init, trial)

    # ---- data

    def get_train_dataloader(self) -> Any:
        """Returns the loader of the training data, with `per_device_train_batch_size` samples per batch."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        return self._get_dataloader(
            self.train_dataset, "training", self.args.train_batch_size, self._get_train_sampler, is_training=True
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Returns the loader of an evaluation set.

        Args:
            eval_dataset: a dataset, or a name in `self.eval_dataset`; None: `self.eval_dataset`.
        """
        dataset = named_dataset(self.eval_dataset, eval_dataset)
        return self._get_dataloader(dataset, "evaluation", self.args.eval_batch_size, self._get_eval_sampler)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Returns the loader of a test set."""
        return self._get_dataloader(test_dataset, "test", self.args.eval_batch_size, self._get_eval_sampler)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """Returns a loader; `dataloader_key` is ignored, because evaluation loaders are cached by their dataset."""
        return parts.loaders_of(self).make(dataset, description, batch_size, sampler_fn, is_training)

    def _find_packing(self) -> packing.Packing | None:
        return parts.find_packing(self)

    @property
    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Returns the sampler of the training data; None for a dataset without a length."""
        return parts.loaders_of(self).train_order(train_dataset if train_dataset is not None else self.train_dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Returns the sampler of an evaluation set; None for a dataset without a length."""
        return parts.loaders_of(self).eval_order(eval_dataset)

    @property
    def _model_input_name(self) -> str | None:
        names = getattr(self.processing_class, "model_input_names", None)
        return names[0] if names else None

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            labels = self.label_names or self.objective.label_names
            names = [*labels, *self._named_by_loss(), *self.objective.further_names]
            self._signature_columns = columns.signature_columns(innermost(self.model), names)

    def _named_by_loss(self) -> list[str]:
        """Returns the strings in the code of a user's loss: each may name a column that forward does not take."""
        makers = (self.compute_loss_func, self.compute_loss, self.training_step)
        own = [maker for maker in makers if maker is not None and not is_ours(maker)]
        return sorted({text for maker in own for text in texts_in(maker)})

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Drops the columns of a `datasets` dataset that the model does not take, if `remove_unused_columns` is set."""
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        return columns.remove_unused_columns(dataset, self._signature_columns, description or "this")

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """Returns the collator, wrapped to drop columns that the model does not take from samples that are dicts."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        if self._signature_columns is None:
            return data_collator
        return columns.RemoveColumnsCollator(data_collator, self._signature_columns, description or "this")

    def num_examples(self, dataloader: Any) -> int:
        """Returns the number of samples in one pass of a loader.

        If the loader does not reveal it, this is the number of batches times the batch size.
        """
        counted = sample_count(dataloader)
        return counted if counted is not None else len(dataloader) * self.args.train_batch_size

    def get_batch_samples(
        self,
        epoch_iterator: Iterator[Any],
        num_batches: int,
        device: torch.device | None = None,
    ) -> tuple[list[Any], Any]:
        """Returns the next `num_batches` micro-batches (fewer at the data's end) and their `num_items_in_batch`."""
        batch_samples: list[Any] = []
        for batch in epoch_iterator:
            batch_samples.append(batch if type(batch) is dict else self.objective.name_inputs(batch))
            if len(batch_samples) == num_batches:
                break
        num_items_in_batch = self._get_num_items_in_batch(batch_samples, device)
        # libraries that replace this method look for the next line in its source
        return batch_samples, num_items_in_batch

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device | None = None) -> Any:
        """Returns the number of targets in an optimizer step as a 0-dim host tensor; None if no loss is divided by
        it.
        """
        if not self.objective.wants_num_items or not batch_samples:
            return None
        return self.loss_normalizer.num_items(batch_samples)

    # ---- optimizer and schedule

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Creates the optimizer and the scheduler, unless they exist."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Creates the optimizer that the arguments name, unless there is one."""
        if self.optimizer is None:
            model = self.model if model is None else model
            self.optimizer = optimizer_registry.create_optimizer(
                self._own_options,
                model,
                cls_and_kwargs=self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model),
                decay_names=self.get_decay_parameter_names(model),
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Creates the schedule that the arguments name, unless there is one."""
        if self.lr_scheduler is None:
            self.lr_scheduler = get_scheduler(
                self.args.lr_scheduler_type,
                optimizer=self.optimizer if optimizer is None else optimizer,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                scheduler_specific_kwargs=dict(self.args.lr_scheduler_kwargs or {}),  # type: ignore[arg-type]
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: nn.Module | None = None) -> tuple[Any, dict[str, Any]]:
        """Returns the class and keyword arguments of the optimizer that `args` names."""
        return optimizer_registry.resolve_optimizer(own_options(args), model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Returns the names of the parameters with weight decay: all but biases and norms."""
        return optimizer_registry.decay_parameter_names(model)

    def get_num_trainable_parameters(self) -> int:
        """Returns the number of trainable parameters (elements)."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Returns the learning rate of each parameter group."""
        rates = [group["lr"] for group in self._parameter_groups()]
        return [float(rate) for rate in (self.lr_scheduler.get_last_lr() if None in rates else rates)]

    def _parameter_groups(self) -> list[dict[str, Any]]:
        if self.optimizer is None:
            raise ValueError("Trainer optimizer is None: call `create_optimizer` or `train` first.")
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def get_optimizer_group(self, param: nn.Parameter | None = None) -> Any:
        """Returns the parameter group that contains `param`; None: the parameters of each group."""
        groups = self._parameter_groups()
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(param is p for p in group["params"])), None)

    # ---- training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        *,
        model_path: str | None = None,
    ) -> TrainOutput:
        """Trains as configured by the arguments.

        Args:
            resume_from_checkpoint: a checkpoint folder or its URL; True for the newest valid one in `output_dir`;
                "auto" for that one if there is one; False to start over; None for the option of this name, which starts
                over if unset.
            trial: the trial of a hyperparameter search.
            ignore_keys_for_eval: keys of the model's output that evaluation drops.
            model_path: the older name of `resume_from_checkpoint`.

        Returns:
            The last step, the mean training loss, and speed metrics.

        Raises:
            KeyboardInterrupt: on Ctrl-C, after a checkpoint is saved (if saving is on).
        """
        self._tell_of_uncalled()
        checkpoint = resume_from_checkpoint if model_path is None else model_path
        with self.memory_stages.measuring("train"):
            return self._run_training(checkpoint, trial, ignore_keys_for_eval)

    def _run_training(self, resume: str | bool | None, trial: Any, ignore_keys: list[str] | None) -> TrainOutput:
        self._hp_search_setup(trial)
        return self._make_session().train(self._folder_of_run(trial), resume, trial, ignore_keys)

    def _train_with(
        self, options: dict[str, Any], callbacks: Sequence[TrainerCallback], checkpoint: str | None
    ) -> None:
        """Trains with changed arguments, which are not reported, and extra callbacks; both apply to this run only."""
        original = self.args
        self.args = replace(original, **options)
        for callback in callbacks:
            self.add_callback(callback)
        self.reports_changes = False
        try:
            self.train(resume_from_checkpoint=checkpoint)
        finally:
            for callback in callbacks:
                self.remove_callback(callback)
            self.reports_changes = True
            self.args = original

    def find_lr(
        self, lowest: float = 1e-7, highest: float = 1.0, num_steps: int = 100, divergence: float = 4.0
    ) -> lr_search.RangeTest:
        """Runs a learning rate range test and undoes its effects; see docs/speed.md. A collective.

        Args:
            lowest, highest: learning rates of the first and the last step.
            num_steps: maximum number of optimizer steps.
            divergence: the test ends when the moving average of the loss exceeds `divergence` times its minimum.

        Raises:
            ValueError: the rates do not rise, there are fewer than 10 steps, or the divergence is not above 1.
            UnsupportedOption: the model cannot be restored on several processes, or the optimizer computes its
                learning rate itself.
        """
        search = lr_search.make_search(lowest, highest, num_steps, divergence, self.world)
        lr_search.check_support(self._plan(), self.optimizer)
        parts.try_run(self, {"max_steps": num_steps}, search)
        return search.result()

    def find_batch_size(self, lowest: int = 1, highest: int = 1024, num_steps: int = 3) -> batch_search.BatchSearch:
        """Trains a few steps with each of several micro-batch sizes and undoes their effects; see docs/speed.md.

        Args:
            lowest, highest: the first and the last size in samples; sizes double in between.
            num_steps: optimizer steps with each size; the first does not count for its rate.

        Raises:
            ValueError: the sizes do not rise, or there are fewer than 2 steps.
            UnsupportedOption: micro-batches are not made by a number of samples, or the processes cannot agree.
        """
        batch_search.check_arguments(lowest, highest, num_steps)
        batch_search.check_support(self._own_options, self._plan())
        return parts.search_batch_size(self, lowest, highest, num_steps)

    def measure_memory(self) -> module_memory.StepMemory:
        """Measures the peak memory of an optimizer step by kind and by module, and undoes its effects.

        Raises:
            ValueError: the data has too few samples for two optimizer steps.
            UnsupportedOption: there are several processes, or the model is compiled or on an XLA device.
        """
        args = self._own_options
        module_memory.check_support(self.strategy, args.torch_compile, args.linear_cross_entropy, args.regularizers)
        return module_memory.measure(partial(parts.try_run, self, module_memory.OPTIONS), self.strategy.device)

    def plan(self, time: bool = False) -> result.Forecast:
        """Returns what a run will take: memory, disk, steps, evaluations; see docs/before_a_run.md. Trains nothing.

        Args:
            time: also run two optimizer steps, whose effects are undone, and state the time of the second.

        Raises:
            UnsupportedOption: the training data can be read only once; or `time` with several processes.
        """
        return preview.plan_of(self, time)

    def doctor(self) -> findings.Diagnosis:
        """Checks model, data, loss and options for common mistakes, on copies; see docs/before_a_run.md.

        Raises:
            UnsupportedOption: the training data can be read only once, or the model is sharded already.
        """
        return case.diagnosis_of(self)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs forward and backward of one micro-batch; returns its detached contribution to the step's loss."""
        engine = self.run.engine if self.run is not None else self._make_session().make_lone_engine()
        return engine.run_micro_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Computes the loss of one batch: the model's own, a smoothed one, or `compute_loss_func`'s.

        Override this method to compute another loss.

        Returns:
            The loss, 0-dim, or `(loss, outputs)`. It is a mean over the batch, unless divided by `num_items_in_batch`.
        """
        if return_outputs:
            with self.objective.for_reader():
                return self.objective(model, inputs, num_items_in_batch)
        return self.objective(model, inputs, num_items_in_batch)[0]

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Returns the precision context for computing losses."""
        return self.strategy.forward_context()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Returns `compute_loss_context_manager` under its older name."""
        return self.strategy.forward_context()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Returns the batch, moved to the device."""
        return self._prepare_input(inputs)

    def _prepare_input(self, data: Any) -> Any:
        return self.strategy.place(data)

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Any,
        grad_norm: Any,
        model: nn.Module,
        trial: Any,
        epoch: Any,
        ignore_keys_for_eval: list[str] | None,
        start_time: float | None,
        learning_rate: float | None = None,
    ) -> None:
        """Runs the due actions. An override that logs by itself gets the sum of the losses that are not logged yet."""
        assert self.run is not None
        assert self.run.loop is not None
        self.run.loop.log_evaluate_save()

    # ---- evaluation and prediction

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        *,
        augmentation: test_time.TestTimeAugmentation | None = None,
    ) -> dict[str, float]:
        """Evaluates and returns the metrics; with a dict of datasets, each set's metrics under `{prefix}_{name}`.

        `augmentation` predicts each batch in several ways; see docs/predictions.md.
        """
        if augmentation is not None:
            evaluate = partial(self.evaluate, eval_dataset, ignore_keys, metric_key_prefix)
            return parts.augmented_call(self, augmentation, evaluate)[0]
        datasets = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(datasets, dict):
            chosen = {name: name for name in datasets} if eval_dataset is None else datasets
            evaluate = partial(self.evaluate, ignore_keys=ignore_keys)
            return loop_evaluation.evaluate_each(self.run, chosen, metric_key_prefix, evaluate)
        return self._evaluate_one(eval_dataset, ignore_keys, metric_key_prefix)

    def _evaluate_one(self, dataset: Any, ignore_keys: list[str] | None, prefix: str) -> dict[str, float]:
        loader = self.get_eval_dataloader(dataset)
        self.callback_handler.eval_dataloader = loader
        start = StartTime()
        loss_only = True if self.compute_metrics is None else None
        # evaluation mode lasts until the row is logged, because an overridden `log` may use the model
        with self.memory_stages.measuring("eval"), predictor.in_evaluation_mode(self.model):
            output = self.evaluation_loop(loader, "Evaluation", loss_only, ignore_keys, prefix)
            metrics = parts.metrics_of(self, output, prefix, start, loader, dataset)
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            metrics.update(self.memory_stages.stop("eval"))
        self._share_control()
        return metrics

    def _evaluate(
        self,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
        skip_scheduler: bool = False,
    ) -> dict[str, float]:
        """Evaluates during training, and steps a schedule that follows the metrics."""
        metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if follows_metrics(self.lr_scheduler) and not skip_scheduler:
            session.step_by_metric(self.lr_scheduler, metrics, self._plan().metric_for_best_model)
        return metrics

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        *,
        augmentation: test_time.TestTimeAugmentation | None = None,
    ) -> PredictionOutput:
        """Returns one prediction per sample, in dataset order, and metrics if there are labels.

        With `augmentation`, which predicts each batch in several ways, an `AugmentedOutput`; see docs/predictions.md.
        """
        if augmentation is not None:
            predict = partial(self.predict, test_dataset, ignore_keys, metric_key_prefix)
            return parts.augmented_prediction(self, augmentation, predict)
        loader = self.get_test_dataloader(test_dataset)
        start = StartTime()
        with self.memory_stages.measuring("test"):
            output = self.evaluation_loop(loader, "Prediction", None, ignore_keys, metric_key_prefix)
            metrics = predictor.timed_metrics(output, metric_key_prefix, start, loader_length(loader))
            self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
            metrics.update(self.memory_stages.stop("test"))
        self._share_control()
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Runs the model over a loader once; see `paceline.pytorch.evaluation.predictor.EvaluationLoop`."""
        evaluator = parts.evaluator_of(self)
        output = evaluator.run(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        self.is_prepared = True
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Returns (loss, predictions, labels) of one batch, without gradients; absent ones are None."""
        ignored = ignored_keys(self.model) if ignore_keys is None else ignore_keys
        return parts.batch_predictor_of(self).predict(model, inputs, prediction_loss_only, ignored)

    # ---- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model and the processing class for loading, and pushes them if `push_to_hub` is set."""
        folder = str(self._output_folder()) if output_dir is None else output_dir
        files = parts.model_files_of(self)
        with parts.weights_to_save(self):
            is_done = not _internal_call and is_ours(self._save) and files.stream(Path(folder))
            weights = None if is_done else files.whole_weights()
            if self.args.should_save and not is_done:
                self._save(folder, weights) if weights is not None else self._save(folder)
        if self.args.push_to_hub and not _internal_call:
            self._make_publisher().push_saved_model()

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Tensor] | None = None) -> None:
        folder = str(self._output_folder()) if output_dir is None else output_dir
        parts.model_files_of(self).write(Path(folder), state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: Any, metrics: Any = None) -> None:
        """Saves a checkpoint now. `metrics` is ignored (an argument of transformers 4): the run has already recorded
        the best metric.
        """
        self._make_checkpointer().save(self._output_folder(trial))

    def _make_checkpointer(self) -> checkpointer.Checkpointer:
        return parts.checkpointer_of(self)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._make_checkpointer().write_items(output_dir, (OPTIMIZER, SCHEDULER))

    def _save_scaler(self, output_dir: str) -> None:
        self._make_checkpointer().write_items(output_dir, (PRECISION,))

    def _save_rng_state(self, output_dir: str) -> None:
        self._make_checkpointer().write_random_states(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Loads the weights of a checkpoint."""
        logger.info("Loading model from %s.", resume_from_checkpoint)
        for note in parts.load_weights_of(self, model, resume_from_checkpoint):
            logger.warning(note)

    def _load_best_model(self) -> None:
        """Loads the weights of the best checkpoint."""
        logger.info("Loading best model from %s (score: %s).", self.state.best_model_checkpoint, self.state.best_metric)
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(str(placed(self.args, self.state.best_model_checkpoint)))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._make_checkpointer().load_items(Path(checkpoint), (OPTIMIZER, SCHEDULER))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._make_checkpointer().load_scaler(Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._make_checkpointer().load_random_states(Path(checkpoint))

    # ---- operations

    def _make_measurer(self) -> Measure | None:
        return parts.measurer_of(self)

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns the floating-point operations of forward and backward on this batch, as estimated by the model; 0
        if the model has no estimate.
        """
        return estimate_operations(innermost(self.model), inputs)

    def store_flos(self) -> None:
        """Adds the operations counted since the last call to `state.total_flos`."""
        self.state.total_flos += self.current_flos
        self.current_flos = 0.0

    # ---- processes

    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the global batch size: batch size times accumulation steps times data-parallel ranks.

        With a token budget this is an estimate from the mean micro-batch size of the last run.
        """
        in_update = resolve_update(args, self.strategy.mesh.data_size, None)[1]
        return in_update if tokens_of(args) is None else in_update * (self.state.train_batch_size or 1)

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: str | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Trains with several sets of hyperparameters, and returns the best; see docs/hyperparameter_search.md.

        Each trial has a folder `run-{id}` in `output_dir`. Afterwards the Trainer is as it was before. With optuna the
        study is stored, and the same call continues a search that was interrupted.

        Args:
            hp_space: optuna: `(trial) -> dict` of hyperparameters; ray, wandb: `(None) ->` the space of the search.
                Names that are options replace these; `model_init(trial)` may read others. None: learning rate, epochs,
                seed and batch size.
            compute_objective: `(metrics) -> number`, or a list of numbers for several objectives. None: the sum of
                `compute_metrics`' values, else `eval_loss`.
            n_trials: number of trials.
            direction: "minimize" or "maximize", or a list with one of them for each objective.
            backend: "optuna", "ray" or "wandb"; None: the first that is installed. "members" trains random trials at
                once, with `hp_space(trial)` as for optuna; see docs/ensembles.md.
            hp_name: `(trial) -> name` of the trial and its folder.
            kwargs: options of the backend: of `optuna.create_study` and `Study.optimize`, of `ray.tune.run`, or of a
                sweep.

        Returns:
            The best trial; with several objectives, a list of those that no other trial beats in all of them.

        Raises:
            RuntimeError: there is no `model_init`, no backend is installed, or no trial was completed.
            ValueError: an argument is invalid, or a function returned something else than it must.
            ImportError: the backend is not installed.
            UnsupportedOption: the backend or an option is not supported.
        """
        return trial_runs.search(self, hp_space, compute_objective, n_trials, direction, backend, hp_name, kwargs)

    # ---- the hub, beside the methods of HubNames

    def _card_facts(self) -> described.CardFacts:
        return parts.card_facts_of(self)

    def _checkpoint_form(self) -> described.CheckpointForm:
        return parts.checkpoint_form()
