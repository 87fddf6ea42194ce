"""TFTrainer: the interface that users of TensorFlow know; its methods forward to the parts that do the work.

Owners:
    the TFTrainer    the user's data and callables, as given; the compiled forward pass of evaluations (`predictor`)
    a session        the parts of one call, and their lifecycle; the TFTrainer keeps the attributes that they share
    a run            plan, data, engine, loop and signals, during `train`
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from paceline.args.adopt import apply_log_level
from paceline.args.places import fix_base, output_folder
from paceline.args.rules import check_for_run
from paceline.callbacks.defaults import with_defaults
from paceline.callbacks.memory_stages import MemoryStages
from paceline.callbacks.reporters import find_reporters
from paceline.callbacks.reporters.tensorboard import TensorBoardCallback
from paceline.checkpoint.folders import make_output_folder
from paceline.compat.hub_names import HubNames
from paceline.core.contracts import StreamingMetric
from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.core.loop_evaluation import evaluate_each
from paceline.core.metrics import StartTime, speed_metrics
from paceline.core.outputs import EvalLoopOutput, PredictionOutput, TrainOutput
from paceline.core.session import Run
from paceline.core.state import TrainerControl, TrainerState
from paceline.hub.described import CardFacts, CheckpointForm
from paceline.predictions.augmentation import AugmentedOutput, AugmentedSteps, TestTimeAugmentation
from paceline.tensorflow import parts
from paceline.tensorflow.adapters import adapt_callbacks, adapt_writer
from paceline.tensorflow.arguments import TFTrainingArguments, check_tensorflow
from paceline.tensorflow.checkpoint.model_files import load_model, save_model
from paceline.tensorflow.checkpoint.saving import Checkpointer
from paceline.tensorflow.data.batches import make_padding
from paceline.tensorflow.data.columns import columns_of
from paceline.tensorflow.data.sources import (
    Source,
    as_dataset,
    is_columns,
    lengths_of,
    make_source,
    named_dataset,
    source_of_batches,
)
from paceline.tensorflow.devices import World, choose_strategy, current_world
from paceline.tensorflow.engine import TFEngine
from paceline.tensorflow.evaluation import Predictor, check_metric
from paceline.tensorflow.framework import keras
from paceline.tensorflow.model_card import checkpoint_form
from paceline.tensorflow.objective import Objective, build_by_itself, check_model
from paceline.tensorflow.optim.averages import WeightAverages
from paceline.tensorflow.optim.choose import optimizer_pair
from paceline.tensorflow.optim.following import FollowingSchedule
from paceline.tensorflow.overrides import check_data, check_methods
from paceline.tensorflow.precision import POLICIES
from paceline.tensorflow.session import Session, session_of

logger = logging.getLogger(__name__)


def checked_arguments(args: Any) -> TFTrainingArguments:
    """Checks and returns the arguments of a TFTrainer; None gives all defaults.

    Raises:
        TypeError: `args` is of another class.
        ValueError: an option is invalid, or only torch supports it.
    """
    found = TFTrainingArguments(output_dir="tmp_trainer") if args is None else args
    if not isinstance(found, TFTrainingArguments):
        raise TypeError(f"`args` is {type(args).__name__}; a TFTrainingArguments is needed.")
    check_for_run(found)
    check_tensorflow(found)
    apply_log_level(found)
    fix_base(found)
    return found


class TFTrainer(HubNames):
    """Trains, evaluates and predicts with TensorFlow models: Keras 3, tf_keras, transformers' TF models, tf.Module.

    Data is `(features, labels)` or `(features, labels, sample_weight)` arrays, a dict of arrays, a list of samples, a
    tf.data.Dataset of samples, a `datasets.Dataset`, a Keras PyDataset, or a function that returns an iterator of
    samples.

    The loss of a compiled Keras 3 model is Keras' own. `evaluate` returns what `model.evaluate` returns for batches of
    the same size, including compiled metrics, and an optimizer step equals that of `fit` with all its samples as one
    batch. For any Keras model, `loss` and `eval_loss` include `add_loss` and regularizers.

    Args:
        model: a Keras model or a callable `tf.Module`; its `call` takes features, and may take `labels` (then it
            returns `(loss, predictions)`) and `training`.
        args: a `TFTrainingArguments`; None: all defaults, output in `tmp_trainer`.
        train_dataset: the training data.
        eval_dataset: the evaluation data, or a dict of several by name.
        compute_metrics: `(EvalPrediction) -> dict`, or a `StreamingMetric`, driven batch by batch.
        tb_writer: a result of `tf.summary.create_file_writer`, or an object with `add_scalar`, `add_text`, `flush` and
            `close`, for the TensorBoard reporter.
        optimizers: (Keras optimizer, learning-rate schedule) to use instead of those that the arguments name. Without
            it, the optimizer that the model was compiled with is used, unless it is the default of `compile()`. With
            `model_init`, only a schedule.
        data_collator: a list of samples -> a batch, where a sample of arrays is a row of each; None pads with
            `processing_class` if it can, else stacks. Refused for a tf.data.Dataset and a PyDataset.
        processing_class: a tokenizer or processor, which pads batches and is saved with the model.
        model_init: called without arguments, in the strategy's scope, to create a new model in each `train`.
        compute_loss_func: `(outputs, labels) -> loss`; the loss has one entry per sample or target, or is a scalar
            mean. With a parameter `num_items_in_batch`, it gets the number of targets in `labels`, by which it may
            divide the sum of their losses; with loss_weight="scaled", that of the whole optimizer step, and the loss of
            a training is used as it is.
        callbacks: used in addition to the default ones; classes or instances, also of Keras.
        preprocess_logits_for_metrics: `(predictions, labels) -> predictions to store`, on arrays of one batch.
        strategy: a `tf.distribute.Strategy`; None: that of the scope in which the model was built, else
            `args.strategy`.

    Raises:
        ValueError, TypeError, RuntimeError: an argument is invalid or contradicts another; the message says what to
            change.
    """

    args: TFTrainingArguments
    world: World
    run: Run | None = None
    engine: TFEngine | None = None
    averages: WeightAverages | None = None  # of the weights of the latest run, with ema_decay or swa_start
    augmented: AugmentedSteps | None = None  # of the evaluation in progress
    ensemble_host = "paceline.tensorflow.ensemble"
    has_own_optimizer: bool = False  # the Trainer created the optimizer, and the next `train` recreates it
    has_own_schedule: bool = False  # ... and the schedule

    def _make_session(self) -> Session:
        return session_of(self, self._own_options.phases)

    def __init__(
        self,
        model: Any = None,
        args: TFTrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        compute_metrics: Callable[..., dict[str, Any]] | StreamingMetric | None = None,
        tb_writer: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        *,
        data_collator: Callable[[list[Any]], Any] | None = None,
        processing_class: Any = None,
        model_init: Callable[[], Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        strategy: Any = None,
    ) -> None:
        self.args = checked_arguments(args)
        if (model is None) == (model_init is None):
            raise ValueError("TFTrainer needs `model` or `model_init`, one of the two.")
        self.memory_stages = MemoryStages(not self.args.skip_memory_metrics)  # CPU memory only; does not import torch
        self.memory_stages.start("init")
        check_metric(compute_metrics, self.args.batch_eval_metrics)
        check_model(model)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.data_collator, self.processing_class = data_collator, processing_class
        self.model_init, self.compute_loss_func = model_init, compute_loss_func
        self.optimizer, self.lr_scheduler = optimizer_pair(optimizers, model_init is not None)
        self.world = current_world(self.args)
        build_by_itself(model)
        self.strategy = choose_strategy(strategy, model, lambda: self.args.strategy)
        self.use_model(self.make_model() if model is None else model)
        check_methods(type(self).__name__, dir(self))
        self.state, self.control = TrainerState(), TrainerControl()
        reporters = [] if tb_writer is None else [TensorBoardCallback(adapt_writer(tb_writer))]
        self.callback_handler = CallbackHandler(
            with_defaults([*adapt_callbacks(callbacks or []), *reporters], self.args),
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
        )
        if self.args.should_save:
            make_output_folder(str(self.args.output_dir))
        self._make_publisher().prepare()
        self.memory_stages.stop("init")
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    # ---- the model

    def make_model(self) -> Any:
        """Returns a model that `model_init` creates in the strategy's scope and the precision of the arguments."""
        assert self.model_init is not None
        policy = POLICIES.get(self.args.mixed_precision)
        before = keras.config.dtype_policy()
        with self.strategy.scope():
            if policy is not None:
                keras.config.set_dtype_policy(policy)
            try:
                model = self.model_init()
                build_by_itself(model)
                return model
            finally:
                keras.config.set_dtype_policy(before)

    def use_model(self, model: Any) -> None:
        """Sets the model, and drops functions compiled for another model."""
        self.model = model
        self.objective = Objective(
            model,
            compute_loss_func=self.compute_loss_func,
            loss_weight=self._own_options.loss_weight,
            label_smoothing=self.args.label_smoothing_factor,
        )
        self.predictor = Predictor(
            strategy=self.strategy,
            objective=self.objective,
            prediction_step=self.prediction_step,
            distributed_prediction_steps=self.distributed_prediction_steps,
            xla=self.args.xla,
        )

    def remake_model(self) -> None:
        """Creates a new model with `model_init`, if given, and lets the run create a new optimizer for it."""
        if self.model_init is not None:
            self.use_model(self.make_model())
            self.has_own_optimizer = True

    @property
    def n_replicas(self) -> int:
        """Returns the number of replicas that share an optimizer step, over all workers."""
        return self._make_session().num_replicas

    @property
    def label_names(self) -> list[str] | None:
        """Returns the label columns; None stands for those known from transformers."""
        return self.args.label_names

    # ---- data

    def get_train_tfdataset(self) -> Any:
        """Returns one epoch of training data as a tf.data.Dataset of batches of `args.train_batch_size` samples.

        An override may return any tf.data.Dataset of (features, labels) batches, which is read unchanged.
        """
        if self.train_dataset is None:
            raise ValueError("TFTrainer: training needs a `train_dataset`.")
        args = self.args
        seed = args.seed if args.data_seed is None else args.data_seed
        return as_dataset(
            self._source(
                self.train_dataset,
                args.per_device_train_batch_size,
                seed=None if args.train_sampling_strategy == "sequential" else seed,
                drop_last=args.dataloader_drop_last,
                by_length=args.train_sampling_strategy == "group_by_length",
                is_training=True,
            )
        )

    def get_eval_tfdataset(self, eval_dataset: Any = None) -> Any:
        """Returns an evaluation set as a tf.data.Dataset of batches.

        Args:
            eval_dataset: a dataset, a name in `self.eval_dataset`, or None for `self.eval_dataset`.
        """
        data = named_dataset(self.eval_dataset, eval_dataset)
        return as_dataset(self._source(data, self.args.per_device_eval_batch_size))

    def get_test_tfdataset(self, test_dataset: Any) -> Any:
        """Returns a test set as a tf.data.Dataset of batches."""
        return as_dataset(self._source(test_dataset, self.args.per_device_eval_batch_size))

    def _source(
        self,
        data: Any,
        per_device: int,
        *,
        seed: int | None = None,
        drop_last: bool = False,
        by_length: bool = False,
        is_training: bool = False,
    ) -> Source:
        check_data(data)
        names = getattr(self.processing_class, "model_input_names", None) or [None]
        measure = partial(lengths_of, column=self.args.length_column_name, input_name=names[0])
        return make_source(
            data,
            batch_size=per_device * self.n_replicas,
            seed=seed,
            drop_last=drop_last,
            collator=self.data_collator,
            pad=make_padding(self.processing_class, self.label_names),
            columns=columns_of(self.model, self.label_names) if self.args.remove_unused_columns else None,
            lengths=measure if by_length else None,
            # an evaluation on the training data must not change its order within an epoch
            calls_epoch_methods=is_training or data is not self.train_dataset,
        )

    # ---- optimizer and schedule

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Creates the optimizer and the schedule that the arguments name, if none were given or compiled."""
        if self.optimizer is None and self.lr_scheduler is None:
            self.optimizer = parts.compiled_optimizer_of(self)
        if self.optimizer is not None:
            return
        if self.lr_scheduler is None:
            self.lr_scheduler, self.has_own_schedule = parts.schedule_of(self, num_training_steps), True
        follows = isinstance(self.lr_scheduler, FollowingSchedule)
        rate = self.lr_scheduler.learning_rate if follows else self.lr_scheduler
        self.optimizer = parts.optimizer_of(self, rate)
        self.has_own_optimizer = True

    # ---- training

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Trains the model according to the arguments.

        Args:
            resume_from_checkpoint: a folder; True for the newest intact checkpoint in `output_dir`; False to start
                over; None for the newest intact one if there is any, as the TFTrainer of transformers did.

        Returns: the last step, the mean training loss over the optimizer steps of this call (after a resume, only those
            since then), and speed metrics. The loss is NaN if the weights are not finite.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; a checkpoint was written before, if saving is on.
        """
        parts.check_overrides(self, "train_step")
        with self.memory_stages.measuring("train"):
            return self._make_session().train(self._folder_of_run(), resume_from_checkpoint)

    def run_model(self, features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
        """Returns (loss, predictions) of a batch on one replica, traced. Override this method to change the loss.

        The loss has one entry per sample or target, or is a scalar mean; it is None without labels.
        """
        num_items = self.engine.num_items if training and self.engine is not None else None
        return self.objective.run(features, labels, training, num_items)

    def training_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> list[Any]:
        """Returns this replica's gradients of the step's loss, one per trainable variable; traced.

        Args:
            nb_instances_in_global_batch: labels other than -100 in the whole optimizer step, a float32 scalar.
        """
        assert self.engine is not None
        return self.engine.gradients(features, labels, nb_instances_in_global_batch, self.run_model)

    def apply_gradients(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
        """Runs one optimizer step on one replica, traced: computes, sums over replicas, clips and applies gradients."""
        assert self.engine is not None
        return self.engine.update(features, labels, nb_instances_in_global_batch)

    def distributed_training_steps(self, batch: tuple[Any, Any]) -> Any:
        """Runs one optimizer step on all replicas; traced."""
        assert self.engine is not None
        return self.engine.run_replicas(self.apply_gradients, *batch)

    # ---- evaluation and prediction

    def evaluate(
        self,
        eval_dataset: Any = None,
        metric_key_prefix: str = "eval",
        *,
        augmentation: TestTimeAugmentation | None = None,
    ) -> dict[str, float]:
        """Evaluates every sample once; metrics of each dataset in a dict are named `{prefix}_{name}_*`.

        Args:
            eval_dataset: a dataset, a dict of several, the name of one in `self.eval_dataset`, or None for
                `self.eval_dataset`.
            metric_key_prefix: prefix of the metric names.
            augmentation: predicts each batch in several ways; see docs/predictions.md.

        Raises:
            ValueError: there is no evaluation set, or none of that name.
        """
        if augmentation is not None:
            with self._augmenting(augmentation):
                return self.evaluate(eval_dataset, metric_key_prefix)
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, dict) and not is_columns(data):
            return evaluate_each(self.run, data, metric_key_prefix, self._evaluate_one)
        return self._evaluate_one(data, metric_key_prefix)

    def _evaluate_one(self, data: Any, metric_key_prefix: str) -> dict[str, float]:
        source = source_of_batches(self.get_eval_tfdataset(data))
        start = StartTime()
        loss_only = None if self.compute_metrics is not None else True
        with self.memory_stages.measuring("eval"):
            output = self._predict_all(source, "Evaluation", loss_only, metric_key_prefix)
            metrics = self._timed(output, metric_key_prefix, start, source.num_batches)
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            metrics.update(self.memory_stages.stop("eval"))
        self._share_control()
        return metrics

    def _timed(self, output: EvalLoopOutput, prefix: str, start: float, num_batches: int | None) -> dict[str, float]:
        spent = speed_metrics(prefix, start, num_samples=output.num_samples, num_steps=num_batches)
        return {**(output.metrics or {}), **spent}

    def predict(
        self,
        test_dataset: Any,
        metric_key_prefix: str = "test",
        *,
        augmentation: TestTimeAugmentation | None = None,
    ) -> PredictionOutput:
        """Returns predictions with one row per sample, in the samples' order, and metrics if there are labels.

        With `augmentation`, which predicts each batch in several ways, an `AugmentedOutput`; see docs/predictions.md.
        """
        if augmentation is not None:
            with self._augmenting(augmentation) as steps:
                return AugmentedOutput.of(self.predict(test_dataset, metric_key_prefix), steps)
        source = source_of_batches(self.get_test_tfdataset(test_dataset))
        start = StartTime()
        with self.memory_stages.measuring("test"):
            output = self._predict_all(source, "Prediction", None, metric_key_prefix)
            metrics = self._timed(output, metric_key_prefix, start, source.num_batches)
            self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
            metrics.update(self.memory_stages.stop("test"))
        self._share_control()
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    @contextmanager
    def _augmenting(self, augmentation: TestTimeAugmentation) -> Iterator[AugmentedSteps]:
        """Returns a context in which evaluations predict each batch in several ways."""
        steps = parts.augmented_steps_of(self, augmentation)
        before, self.augmented = self.augmented, steps
        try:
            yield steps
        finally:
            self.augmented = before
        steps.check_was_used("prediction_loop", "TFTrainer")

    def _predict_all(self, source: Source, description: str, loss_only: bool | None, prefix: str) -> EvalLoopOutput:
        parts.check_overrides(self, "predict_step" if description == "Prediction" else "test_step")
        source.check_end()
        steps = -1 if source.num_batches is None else source.num_batches
        num_examples = -1 if source.num_samples is None else source.num_samples
        return self.prediction_loop(source, steps, num_examples, description, loss_only, prefix)

    def prediction_loop(
        self,
        dataset: Any,
        steps: int,
        num_examples: int,
        description: str,
        prediction_loss_only: bool | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Runs the model over batches once.

        Args:
            dataset: yields the batches.
            steps, num_examples: numbers of batches and samples, for the log; -1 if unknown.
            description: for the log; "Prediction" allows missing labels.
            prediction_loss_only: keep only the loss; None: the option of this name decides.
            metric_key_prefix: prefix of the metric names.
        """
        logger.info("%s: %s batches, %s samples", description, *(n if n >= 0 else "?" for n in (steps, num_examples)))
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        evaluator = parts.evaluator_of(self, self._on_prediction_step)
        is_evaluation = description != "Prediction"
        with self._averaged():
            return evaluator.run(dataset, loss_only=loss_only, prefix=metric_key_prefix, is_evaluation=is_evaluation)

    def _averaged(self) -> AbstractContextManager[None]:
        """Returns a context in which the model holds the average of its weights, if the run keeps one."""
        return nullcontext() if self.averages is None else self.averages.applied()

    def _on_prediction_step(self) -> None:
        self.control = self.callback_handler.fire("on_prediction_step", self.args, self.state, self.control)

    def prediction_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
        """Returns the predictions for a batch on one replica, traced; its loss is stored by the predictor."""
        return self.predictor.predict(features, labels, self.run_model)

    def distributed_prediction_steps(self, batch: tuple[Any, Any]) -> Any:
        """Returns the predictions for a batch on all replicas; traced."""
        return self.predictor.run_replicas(*batch)

    # ---- checkpoints

    def _load_from_checkpoint(self, resume_from_checkpoint: str) -> None:
        """Loads the weights of a checkpoint, or of a model written by `save_model`."""
        load_model(self.model, Path(resume_from_checkpoint))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model with `save_pretrained`, as `model.keras`, or as a SavedModel; pushes it if requested."""
        if not self.args.should_save:
            return
        folder = output_folder(self.args) if output_dir is None else Path(output_dir)
        with self._averaged():
            save_model(self.model, folder)
        if callable(getattr(self.processing_class, "save_pretrained", None)):
            self.processing_class.save_pretrained(str(folder))
        if self.args.push_to_hub and not _internal_call:
            self._make_publisher().push_saved_model()

    def _make_checkpointer(self) -> Checkpointer:
        return parts.checkpointer_of(self)

    def _make_token_counter(self) -> Callable[[Sequence[Any]], int] | None:
        return parts.token_counter_of(self)

    def _save_checkpoint(self) -> bool:
        """Writes a checkpoint of the current state; returns False if that failed. An override may return None."""
        run = parts.run_in_progress_of(self)
        with self._averaged():
            saved = self._make_checkpointer().save(self.state, self.control, self.run_mark, run)
        if saved is None:
            return False
        self.state.best_model_checkpoint = saved.best_model_checkpoint
        self.state.stateful_callbacks = saved.stateful_callbacks
        if self.args.push_to_hub and self.is_world_process_zero():
            self._push_from_checkpoint(str(saved.folder))
        return True

    # ---- the hub, in addition to the methods of HubNames

    def _card_facts(self) -> CardFacts:
        return parts.card_facts_of(self)

    def _checkpoint_form(self) -> CheckpointForm:
        return checkpoint_form(self.model)

    def add_callback(self, callback: Any) -> None:
        """Adds a callback or a callback class, also of Keras."""
        for adapted in adapt_callbacks([callback]):
            super().add_callback(adapted)

    # ---- reporters

    def setup_wandb(self) -> None:
        """Adds the W&B reporter now; `report_to="wandb"` adds it from the start."""
        self._add_reporter("wandb")

    def setup_comet(self) -> None:
        """Adds the Comet reporter now; `report_to="comet_ml"` adds it from the start."""
        self._add_reporter("comet_ml")

    def _add_reporter(self, name: str) -> None:
        for callback in find_reporters(name):
            if not any(type(there) is callback for there in self.callback_handler.callbacks):
                self.add_callback(callback)
