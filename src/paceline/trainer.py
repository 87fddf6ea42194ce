"""The Trainer: names that users know, each forwarding to the part that does the work.

Who owns what:
    model, args, data, callables   the user's, as given
    memory_stages                  what each stage took, where `skip_memory_metrics=False` asks for it
    state, control                 the loop's, live; replaced by each `train`
    callback_handler               the callbacks and whom each event calls
    loss_rule, objective           what a loss means, and how one is made by default
    strategy                       where tensors live; made anew by each `train`
    optimizer, lr_scheduler        made by `create_optimizer_and_scheduler`, or the user's
    run                            plan, data feed, engine, loop and signals of a run in progress; None outside `train`
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import assembly, loaders, saving, training, uploads
from paceline.args.adopt import adopt, apply_log_level
from paceline.args.plan import Plan, resolve, resolve_update
from paceline.args.training import TrainingArguments
from paceline.callbacks.defaults import with_defaults
from paceline.callbacks.memory_stages import MemoryStages
from paceline.checkpoint import files
from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.core.folders import make_output_folder
from paceline.core.outputs import EvalLoopOutput, PredictionOutput, TrainOutput
from paceline.core.state import TrainerControl, TrainerState
from paceline.core.streaming import StreamingMetric
from paceline.core.trainer_names import TrainerNames
from paceline.data.collators import choose_collator
from paceline.data.columns import (
    RemoveColumnsCollator,
    remove_unused_columns,
    signature_columns,
)
from paceline.data.loading import loader_length, named_dataset, sample_count
from paceline.distributed.random import preserved_rng, set_seed
from paceline.distributed.strategy import put_on_device
from paceline.distributed.world import World, current_world
from paceline.evaluation import in_evaluation_mode, predict_batch, run_evaluation, timed_metrics, warn_of_gaps
from paceline.hub import publishing
from paceline.hub.card import CardOptions, write_card
from paceline.model.factory import check_model, make_model
from paceline.model.loss import LabelSmoother, LossRule
from paceline.model.operations import estimate_operations
from paceline.model.prepare import PreparedModel
from paceline.model.signature import innermost
from paceline.optim import optimizers as optimizer_registry
from paceline.optim.schedulers import follows_metrics, get_scheduler
from paceline.sharded_saving import load_weights, stream_model
from paceline.subclassing import ForSubclasses, meet_subclass

logger = logging.getLogger(__name__)


class Trainer(TrainerNames, ForSubclasses):
    """Trains, evaluates and predicts with any `nn.Module`.

    Args:
        model: the module to train; or give `model_init`.
        args: a `TrainingArguments`; None: all defaults, output in `tmp_trainer`.
        data_collator: a list of samples -> a batch; None: padding by `processing_class` where it can, else stacking.
        train_dataset: map-style or iterable; samples are dicts with the names of forward's parameters, or tuples in
            their order.
        eval_dataset: the same, or a dict of several by name.
        processing_class: a tokenizer or processor; pads batches, and is saved with the model.
        model_init: called without arguments (or with the trial) at each `train` for a fresh model.
        compute_loss_func: `(outputs, labels, num_items_in_batch=None) -> loss`, instead of the model's own.
        compute_metrics: `(EvalPrediction) -> dict` (with `batch_eval_metrics`: also `compute_result: bool`); or a
            `StreamingMetric`, driven batch by batch.
        callbacks: beside the default ones; classes or instances.
        optimizers: (optimizer, scheduler) to use instead of those the arguments name.
        optimizer_cls_and_kwargs: an optimizer class and its arguments, over the default parameter groups.
        preprocess_logits_for_metrics: `(logits, labels) -> what is kept for the metrics`, batch by batch.
        tokenizer: the older name of `processing_class`.

    Raises:
        ValueError, TypeError: an argument contradicts another; the message says what to change.
    """

    loss_is_scaled_for_ga: bool | None = None
    label_names: list[str]  # this and what follows: from `assembly.read_model`
    can_return_loss: bool
    loss_rule: LossRule
    label_smoother: LabelSmoother | None
    args: TrainingArguments
    world: World
    run: training.Run | None = None
    edits: PreparedModel | None = None  # what training changed in the model, while it lasts
    is_in_train = False
    is_prepared = False  # training or an evaluation has prepared the model: it is no news what that takes
    reports_changes = True  # of the arguments since the checkpoint that a run goes on from was written
    current_flos = 0.0
    _created_lr_scheduler = False
    _update_size: int | None = None  # samples of an update, where a run goes on on another number of processes
    _signature_columns: list[str] | None = None

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
    ) -> None:
        self.args = adopt(args) if args is not None else TrainingArguments(output_dir="tmp_trainer")
        apply_log_level(self.args)
        self.processing_class = assembly.choose_processor(processing_class, tokenizer)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.model_init, self.compute_loss_func = model_init, compute_loss_func
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.world = current_world(self.args)
        self.memory_stages = MemoryStages(not self.args.skip_memory_metrics, self.world.device.type)
        self.memory_stages.start("init")
        self.is_model_parallel = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
        self.place_model_on_device = self.args.place_model_on_device is not False and not self.is_model_parallel
        self.model = self._first_model(model)
        assembly.check_arguments(self, optimizers)
        self.strategy = training.make_strategy(self, self._plan())
        self.place_model()
        assembly.read_model(self)
        self.data_collator = data_collator or choose_collator(self.processing_class, self.signature.names)
        self.state, self.control = self._first_state(), TrainerControl()
        self.callback_handler = CallbackHandler(
            with_defaults(callbacks or [], self.args), self.model, self.processing_class, *optimizers
        )
        if self.args.should_save:
            make_output_folder(self._get_output_dir(None))
        meet_subclass(self)
        self.mirror = uploads.begin(self)
        publishing.prepare(self)
        self.memory_stages.stop("init")
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    # ---- what the constructor does

    def _first_model(self, model: nn.Module | None) -> nn.Module:
        if (model is None) == (self.model_init is None):
            raise ValueError("Trainer needs `model` or `model_init`, one of the two.")
        if model is not None:
            return check_model(model, "`model` is")
        with preserved_rng():  # `train` makes the model anew; this one only tells what it looks like
            set_seed(self.args.seed)
            return self.call_model_init()

    def _first_state(self) -> TrainerState:
        return TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )

    def _plan(self) -> Plan:
        """The plan as far as it does not depend on the amount of data."""
        return resolve(
            self.args,
            world_size=self.world.world_size,
            local_size=self.world.local_size,
            micro_batches_per_epoch=1,
        )

    def place_model(self) -> None:
        """Move the model to the device, unless the user said not to, or it is done in parts."""
        quantized = getattr(self.model, "quantization_method", None) is not None
        if self.place_model_on_device and self.strategy.takes_whole_models and not quantized:
            put_on_device(self.model, self.world.device)
        self.model_wrapped = self.model

    @property
    def tokenizer(self) -> Any:
        """The older name of `processing_class`."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self.processing_class = value

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make a model with `model_init`, which takes nothing or the trial."""
        assert self.model_init is not None
        return make_model(self.model_init, trial)

    # ---- data

    def get_train_dataloader(self) -> Any:
        """The loader of the training data: `per_device_train_batch_size` samples a batch."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training needs a `train_dataset`.")
        return self._get_dataloader(
            self.train_dataset, "training", self.args.train_batch_size, self._get_train_sampler, is_training=True
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of an evaluation set: a dataset, the name of one in `self.eval_dataset`, or None for that."""
        dataset = named_dataset(self.eval_dataset, eval_dataset)
        return self._get_dataloader(dataset, "evaluation", self.args.eval_batch_size, self._get_eval_sampler)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader of a test set."""
        return self._get_dataloader(test_dataset, "test", self.args.eval_batch_size, self._get_eval_sampler)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
    ) -> Any:
        return loaders.make_dataloader(self, dataset, description, batch_size, sampler_fn, is_training)

    @property
    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The order of the training samples; None for a dataset without a length."""
        return loaders.train_order(self, train_dataset if train_dataset is not None else self.train_dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """The order of evaluation samples; None for a dataset without a length."""
        return loaders.eval_order(self, eval_dataset)

    @property
    def _model_input_name(self) -> str | None:
        names = getattr(self.processing_class, "model_input_names", None)
        return names[0] if names else None

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = signature_columns(innermost(self.model), self.label_names)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Drop the columns of a `datasets` dataset that the model does not take, as `remove_unused_columns` asks."""
        if not self.args.remove_unused_columns or not self.label_names:
            return dataset  # without a known label, a column may be what an overridden compute_loss needs
        self._set_signature_columns_if_needed()
        return remove_unused_columns(dataset, self._signature_columns, description or "this")

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """The collator, dropping what the model does not take from samples that are dicts."""
        if not self.args.remove_unused_columns or not self.label_names:
            return data_collator
        self._set_signature_columns_if_needed()
        if self._signature_columns is None:
            return data_collator
        return RemoveColumnsCollator(data_collator, self._signature_columns, description or "this")

    def num_examples(self, dataloader: Any) -> int:
        """Number of samples in one pass of a loader: counted by its sampler, else batches times batch size."""
        counted = sample_count(dataloader)
        return counted if counted is not None else len(dataloader) * self.args.train_batch_size

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Draw the micro-batches of one update, and count what its loss is divided by; fewer at the data's end."""
        batches: list[Any] = []
        for batch in epoch_iterator:
            batches.append(batch if type(batch) is dict else self.objective.name_inputs(batch))
            if len(batches) == num_batches:
                break
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Number of targets in an update, a 0-dim tensor on the host; None where nobody divides by it."""
        if not self.objective.wants_num_items or not batch_samples:
            return None
        return self.loss_rule.num_items(batch_samples)

    # ---- optimizer and schedule

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make what was not given: `create_optimizer`, then `create_scheduler`."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Make the optimizer that the arguments name, unless there is one."""
        if self.optimizer is None:
            model = self.model if model is None else model
            self.optimizer = optimizer_registry.create_optimizer(
                self.args,
                model,
                cls_and_kwargs=self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model),
                decay_names=self.get_decay_parameter_names(model),
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule that the arguments name, unless there is one."""
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
        """Class and arguments of the optimizer that the arguments name."""
        return optimizer_registry.resolve_optimizer(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay applies to: no biases, no norms."""
        return optimizer_registry.decay_parameter_names(model)

    def get_num_trainable_parameters(self) -> int:
        """Number of elements that training changes."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        rates = [group["lr"] for group in self._parameter_groups()]
        return [float(rate) for rate in (self.lr_scheduler.get_last_lr() if None in rates else rates)]

    def _parameter_groups(self) -> list[dict[str, Any]]:
        if self.optimizer is None:
            raise ValueError("Trainer: there is no optimizer yet; call `create_optimizer` or `train` first.")
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def get_optimizer_group(self, param: nn.Parameter | None = None) -> Any:
        """The parameter group that holds `param`; None: all groups."""
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
    ) -> TrainOutput:
        """Train as the arguments say.

        Args:
            resume_from_checkpoint: a folder, or True for the newest good one in `output_dir`.
            trial: of a hyper-parameter search.
            ignore_keys_for_eval: keys of the model's output that evaluation leaves out.

        Returns:
            The last step, the mean training loss, and speed metrics.

        Raises:
            KeyboardInterrupt: Ctrl-C, after a checkpoint was written (where saving is on).
        """
        with self.memory_stages.measuring("train"):
            return training.train(self, resume_from_checkpoint, trial, ignore_keys_for_eval)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch; returns its detached contribution to the update's loss."""
        engine = self.run.engine if self.run is not None else training.make_engine(self, self._plan())
        return engine.run_micro_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of one batch: the model's own, smoothed, or `compute_loss_func`'s. Override for another one.

        Returns:
            A 0-dim tensor, or `(loss, outputs)`. A mean over the batch, unless `num_items_in_batch` divided it.
        """
        loss, outputs = self.objective(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """The precision context that losses are computed in."""
        return self.strategy.forward_context()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """The older name of `compute_loss_context_manager`."""
        return self.strategy.forward_context()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device."""
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
        """Do what is due now. An own one that logs by itself is given the sum of the losses that no row has yet."""
        assert self.run is not None
        assert self.run.loop is not None
        self.run.loop.log_evaluate_save()

    # ---- evaluation and prediction

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate and return the metrics; for a dict of datasets, each under `{prefix}_{name}`."""
        given = eval_dataset is not None
        datasets = eval_dataset if given else self.eval_dataset
        if isinstance(datasets, dict):
            metrics: dict[str, float] = {}
            for name, dataset in datasets.items():
                metrics.update(self.evaluate(dataset if given else name, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        return self._evaluate_one(eval_dataset, ignore_keys, metric_key_prefix)

    def _evaluate_one(self, dataset: Any, ignore_keys: list[str] | None, prefix: str) -> dict[str, float]:
        loader = self.get_eval_dataloader(dataset)
        self.callback_handler.eval_dataloader = loader
        start = time.time()
        loss_only = True if self.compute_metrics is None else None
        # in this mode until the row is logged: an own `log` may ask what it is a row of
        with self.memory_stages.measuring("eval"), in_evaluation_mode(self.model):
            output = self.evaluation_loop(loader, "Evaluation", loss_only, ignore_keys, prefix)
            warn_of_gaps(self, output, prefix, self.args.prediction_loss_only)
            metrics = timed_metrics(output, prefix, start, loader_length(loader))
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            metrics.update(self.memory_stages.stop("eval"))
        self._share_control()
        return metrics

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate during training, and step a schedule that follows the metrics."""
        metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
        if follows_metrics(self.lr_scheduler) and not skip_scheduler:
            training.step_by_metric(self.lr_scheduler, metrics, self._plan().metric_for_best_model)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict: one row per sample, in their order; the labels where there are any, and then metrics too."""
        loader = self.get_test_dataloader(test_dataset)
        start = time.time()
        with self.memory_stages.measuring("test"):
            output = self.evaluation_loop(loader, "Prediction", None, ignore_keys, metric_key_prefix)
            metrics = timed_metrics(output, metric_key_prefix, start, loader_length(loader))
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
        """Run the model over a loader once; see `paceline.evaluation.EvaluationLoop`."""
        return run_evaluation(self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """One batch without gradients: (loss, predictions, labels), each None where there is none."""
        return predict_batch(self, model, inputs, prediction_loss_only, ignore_keys)

    # ---- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and the processing class beside it, so that it can be loaded again; pushed if so asked."""
        folder = self._get_output_dir(None) if output_dir is None else output_dir
        is_done = not _internal_call and stream_model(self, Path(folder), saving.save_beside)
        weights = None if is_done else saving.whole_weights(self)
        if self.args.should_save and not is_done:
            self._save(folder, weights) if weights is not None else self._save(folder)
        if self.args.push_to_hub and not _internal_call:
            publishing.push_saved_model(self)

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Tensor] | None = None) -> None:
        folder = Path(self._get_output_dir(None) if output_dir is None else output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        saving.save_weights(self, folder, state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint of this moment."""
        saving.save_checkpoint(self, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        saving.save_optimizer_and_scheduler(self, output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        saving.save_scaler(self, output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        saving.save_rng_state(self, output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint."""
        for note in load_weights(self, self.model if model is None else model, resume_from_checkpoint):
            logger.warning(note)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint."""
        logger.info("Loading the best model, %s (%s).", self.state.best_model_checkpoint, self.state.best_metric)
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        training.load_optimizer_and_scheduler(self, checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and Path(checkpoint, files.SCALER_NAME).is_file():
            files.load_scaler(self.strategy.precision, checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        training.load_rng_state(self, checkpoint)

    # ---- operations

    def floating_point_ops(self, inputs: Any) -> int:
        """Floating-point operations of a forward and backward on this batch, as the model estimates them; else 0."""
        return estimate_operations(innermost(self.model), inputs)

    def store_flos(self) -> None:
        """Add the operations counted since the last call to `state.total_flos`."""
        self.state.total_flos += self.current_flos
        self.current_flos = 0.0

    # ---- processes

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples per update: batch size times accumulation times processes."""
        return resolve_update(args, self.strategy.mesh.data_size, None)[1]

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Not in this version; runs with different arguments can be made one by one with `model_init`."""
        raise NotImplementedError(
            "hyperparameter_search is not in this version of paceline: call train() in a loop over TrainingArguments "
            "with `model_init=`, or drive it from optuna directly."
        )

    # ---- the hub

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository that `hub_model_id` names, where there is none; `self.hub_model_id` is then its full id.

        Raises: HubError, when that fails; the message says what to do.
        """
        publishing.init_repository(self, token, private)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write `README.md` into the output folder: data, hyper-parameters, results and versions of the run.

        Args:
            language, license, tags: metadata of the hub.
            model_name: the title; None: the name of the output folder.
            finetuned_from: the id of the model that training started from; None: as the model's config says.
            tasks: ids of the hub such as "text-classification"; None: read off the model's class.
            dataset_tags: ids of data sets of the hub.
            dataset, dataset_args: names of the data, and what they were loaded with.
        """
        options = CardOptions(
            language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, dataset_args
        )
        write_card(self, options)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model and its card, and upload the output folder without its checkpoints in one commit.

        Args:
            commit_message: of the commit.
            blocking: wait for it; False: behind what comes next, which must leave the folder as it is until then.
            token, revision, private: instead of hub_token, hub_revision and hub_private_repo.
            kwargs: for `create_model_card`.

        Returns: huggingface_hub's CommitInfo, or a Future of it; None on other processes than the first.
        """
        return publishing.push_to_hub(
            self,
            commit_message,
            is_blocking=blocking,
            token=token,
            revision=revision,
            private=private,
            card=kwargs,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push what a published checkpoint holds, as `hub_strategy` says."""
        publishing.push_checkpoint(self, Path(checkpoint_folder))

    def _finish_current_push(self) -> None:
        """Wait for the pushes under way."""
        publishing.finish_push(self)
