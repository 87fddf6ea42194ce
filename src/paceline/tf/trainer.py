"""TFTrainer: the names that users of TensorFlow know, each forwarding to the part that does the work.

Who owns what:
    model, args, data, callables   the user's, as given
    strategy                       where the replicas are: handed over, the model's own, or the arguments'
    objective                      how the model is called, and what its loss means
    engine                         the compiled update; made anew by each `train`
    predictor                      the compiled forward pass, for all evaluations
    memory_stages                  what each stage took, where `skip_memory_metrics=False` asks for it
    run                            plan, data, engine, loop and signals of a run in progress; None outside `train`
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from paceline.args.adopt import apply_log_level
from paceline.args.rules import check
from paceline.callbacks.defaults import with_defaults
from paceline.callbacks.memory_stages import MemoryStages
from paceline.callbacks.reporters import find_reporters
from paceline.callbacks.reporters.tensorboard import TensorBoardCallback
from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.core.folders import make_output_folder
from paceline.core.metrics import speed_metrics
from paceline.core.outputs import EvalLoopOutput, PredictionOutput, TrainOutput
from paceline.core.state import TrainerControl, TrainerState
from paceline.core.streaming import StreamingMetric
from paceline.hub import publishing
from paceline.hub.described import CardFacts, CheckpointForm
from paceline.hub.names import HubNames
from paceline.tf import saving, training
from paceline.tf.arguments import TFTrainingArguments, check_tensorflow
from paceline.tf.batches import make_padding
from paceline.tf.columns import columns_of
from paceline.tf.devices import World, choose_strategy, current_world
from paceline.tf.engine import TFEngine
from paceline.tf.evaluation import Predictor, check_metric, run_evaluation
from paceline.tf.following import FOLLOWING, FollowingSchedule, following_of
from paceline.tf.framework import keras
from paceline.tf.objective import Objective, build_by_itself, check_model
from paceline.tf.optimizers import make_optimizer
from paceline.tf.precision import POLICIES
from paceline.tf.published import card_facts, checkpoint_form
from paceline.tf.schedules import schedule_of
from paceline.tf.sources import (
    Source,
    as_dataset,
    is_columns,
    lengths_of,
    make_source,
    named_dataset,
    source_of_batches,
)

logger = logging.getLogger(__name__)


def checked_arguments(args: Any) -> TFTrainingArguments:
    """The arguments of a TFTrainer, as they are now; all defaults for None.

    Raises:
        TypeError: they are of another kind.
        ValueError: a rule is broken, or an option asks for what only torch can do.
    """
    found = TFTrainingArguments(output_dir="tmp_trainer") if args is None else args
    if not isinstance(found, TFTrainingArguments):
        raise TypeError(f"`args` is {type(args).__name__}; a TFTrainingArguments is needed.")
    check(found)
    check_tensorflow(found)
    apply_log_level(found)
    return found


class TFTrainer(HubNames):
    """Trains, evaluates and predicts with models of TensorFlow: Keras 3, tf_keras, transformers' TF models, tf.Module.

    Data is `(features, labels)` arrays, a dict of arrays, a list of samples, a tf.data.Dataset of samples, a
    `datasets.Dataset`, a Keras PyDataset, or a function that returns an iterator of samples.

    Args:
        model: a Keras model or a callable `tf.Module`; its `call` takes features, and may take `labels` (then it
            returns `(loss, predictions)`) and `training`.
        args: a `TFTrainingArguments`; None: all defaults, output in `tmp_trainer`.
        train_dataset: what to train on.
        eval_dataset: what to evaluate on, or a dict of several by name.
        compute_metrics: `(EvalPrediction) -> dict`, or a `StreamingMetric`, driven batch by batch.
        tb_writer: a writer with `add_scalar`, `add_text`, `flush` and `close`, for the TensorBoard reporter.
        optimizers: (Keras optimizer, learning-rate schedule) instead of those that the arguments name.
        data_collator: a list of samples -> a batch; None: padding by `processing_class` where there is one, else
            stacking.
        processing_class: a tokenizer or processor; pads, and is saved with the model.
        model_init: called without arguments, in the strategy's scope, at each `train` for a fresh model.
        compute_loss_func: `(outputs, labels) -> loss`, or with `num_items_in_batch`; one entry per sample or target,
            or a scalar mean.
        callbacks: beside the default ones; classes or instances.
        preprocess_logits_for_metrics: `(predictions, labels) -> what is kept`, on arrays of one batch.
        strategy: a `tf.distribute.Strategy`; None: the one in whose scope the model was built, else `args.strategy`.

    Raises:
        ValueError, TypeError: an argument contradicts another; the message says what to change.
    """

    args: TFTrainingArguments
    world: World
    run: training.Run | None = None
    engine: TFEngine | None = None
    is_in_train = False

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
        self.memory_stages = MemoryStages(not self.args.skip_memory_metrics)  # of the CPU; it loads no torch
        self.memory_stages.start("init")
        check_metric(compute_metrics, self.args.batch_eval_metrics)
        check_model(model)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.data_collator, self.processing_class = data_collator, processing_class
        self.model_init, self.compute_loss_func = model_init, compute_loss_func
        self.optimizer, self.lr_scheduler = optimizers
        self.has_own_optimizer = False  # made here, and made anew by the next `train`
        self.world = current_world(self.args)
        build_by_itself(model)
        self.strategy = choose_strategy(strategy, model, self.args)
        self.use_model(self.make_model() if model is None else model)
        self.state, self.control = TrainerState(), TrainerControl()
        self.callback_handler = CallbackHandler(
            with_defaults([*(callbacks or []), *([TensorBoardCallback(tb_writer)] if tb_writer else [])], self.args),
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
        )
        if self.args.should_save:
            make_output_folder(str(self.args.output_dir))
        publishing.prepare(self)
        self.memory_stages.stop("init")
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    # ---- the model

    def make_model(self) -> Any:
        """A model from `model_init`, in the strategy's scope and the precision of the arguments."""
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
        """Take a model into use: what is compiled for another one is dropped."""
        self.model = model
        self.objective = Objective(
            model,
            compute_loss_func=self.compute_loss_func,
            loss_weight=self.args.loss_weight,
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
        """With `model_init`, a fresh model and optimizer."""
        if self.model_init is not None:
            self.use_model(self.make_model())
            self.has_own_optimizer = True

    @property
    def n_replicas(self) -> int:
        """Replicas that share an update, over all workers."""
        return int(self.strategy.num_replicas_in_sync)

    @property
    def label_names(self) -> list[str] | None:
        """The columns that are labels; None: those known from transformers."""
        return self.args.label_names

    # ---- data

    def get_train_tfdataset(self) -> Any:
        """The training data as a tf.data.Dataset of batches of `args.train_batch_size` samples, one epoch of it.

        An override may return any tf.data.Dataset of (features, labels) batches; it is then read as it is.
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
            )
        )

    def get_eval_tfdataset(self, eval_dataset: Any = None) -> Any:
        """An evaluation set as a tf.data.Dataset of batches: a data set, the name of one in `self.eval_dataset`, or
        None for that."""
        data = named_dataset(self.eval_dataset, eval_dataset)
        return as_dataset(self._source(data, self.args.per_device_eval_batch_size))

    def get_test_tfdataset(self, test_dataset: Any) -> Any:
        """A test set as a tf.data.Dataset of batches."""
        return as_dataset(self._source(test_dataset, self.args.per_device_eval_batch_size))

    def _source(
        self, data: Any, per_device: int, *, seed: int | None = None, drop_last: bool = False, by_length: bool = False
    ) -> Source:
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
        )

    # ---- optimizer and schedule

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make the optimizer and the schedule that the arguments name, where none were given."""
        if self.optimizer is not None:
            return
        if self.lr_scheduler is None:
            follows = str(self.args.lr_scheduler_type) in FOLLOWING
            self.lr_scheduler = following_of(self.args) if follows else schedule_of(self.args, num_training_steps)
        follows = isinstance(self.lr_scheduler, FollowingSchedule)
        rate = self.lr_scheduler.learning_rate if follows else self.lr_scheduler
        self.optimizer = make_optimizer(self.args, self.model, rate)
        self.has_own_optimizer = True

    # ---- training

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train as the arguments say.

        Args:
            resume_from_checkpoint: a folder; True for the newest good checkpoint in `output_dir`; False to begin anew;
                None: the newest good one if there is any, as the TFTrainer of transformers did.

        Returns:
            The last step, the mean training loss, and speed metrics.

        Raises:
            KeyboardInterrupt: Ctrl-C, after a checkpoint was written (where saving is on).
        """
        with self.memory_stages.measuring("train"):
            return training.train(self, resume_from_checkpoint)

    def run_model(self, features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
        """(loss, predictions) of a batch on one replica, traced. Override for another loss.

        The loss has one entry per sample or per target, or is a scalar mean; None where there are no labels.
        """
        num_items = self.engine._totals[1] if training and self.engine is not None else None
        return self.objective.run(features, labels, training, num_items)

    def training_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> list[Any]:
        """Gradients of this replica's part of the update's loss, one per trainable variable; traced.

        Args:
            nb_instances_in_global_batch: labels other than -100 in the whole update, a float32 scalar.
        """
        assert self.engine is not None
        return self.engine.gradients(features, labels, nb_instances_in_global_batch, self.run_model)

    def apply_gradients(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
        """One update on one replica: gradients, their sum over the replicas, clipping, the optimizer; traced."""
        assert self.engine is not None
        return self.engine.update(features, labels, nb_instances_in_global_batch)

    def distributed_training_steps(self, batch: tuple[Any, Any]) -> Any:
        """One update on all replicas; traced."""
        assert self.engine is not None
        return self.engine.run_replicas(self.apply_gradients, *batch)

    # ---- evaluation and prediction

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Evaluate, every sample once; for a dict of data sets, each under `{prefix}_{name}`.

        Args:
            eval_dataset: a data set, a dict of several, the name of one in `self.eval_dataset`, or None for all that.
            metric_key_prefix: of the metrics' names.

        Raises:
            ValueError: there is no evaluation set, or none of that name.
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, dict) and not is_columns(data):
            metrics: dict[str, float] = {}
            for name, one in data.items():
                metrics.update(self._evaluate_one(one, f"{metric_key_prefix}_{name}"))
            return metrics
        return self._evaluate_one(data, metric_key_prefix)

    def _evaluate_one(self, data: Any, prefix: str) -> dict[str, float]:
        source = source_of_batches(self.get_eval_tfdataset(data))
        start = time.time()
        loss_only = None if self.compute_metrics is not None else True
        with self.memory_stages.measuring("eval"):
            output = self._predict_all(source, "Evaluation", loss_only, prefix)
            metrics = self._timed(output, prefix, start, source.num_batches)
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            metrics.update(self.memory_stages.stop("eval"))
        self._share_control()
        return metrics

    def _timed(self, output: EvalLoopOutput, prefix: str, start: float, num_batches: int | None) -> dict[str, float]:
        spent = speed_metrics(prefix, start, num_samples=output.num_samples, num_steps=num_batches)
        return {**(output.metrics or {}), **spent}

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """Predict: one row per sample, in their order; the labels where there are any, and then metrics too."""
        source = source_of_batches(self.get_test_tfdataset(test_dataset))
        start = time.time()
        with self.memory_stages.measuring("test"):
            output = self._predict_all(source, "Prediction", None, metric_key_prefix)
            metrics = self._timed(output, metric_key_prefix, start, source.num_batches)
            self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
            metrics.update(self.memory_stages.stop("test"))
        self._share_control()
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def _predict_all(self, source: Source, description: str, loss_only: bool | None, prefix: str) -> EvalLoopOutput:
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
        """Run the model over batches once.

        Args:
            dataset: of batches.
            steps, num_examples: how many batches and samples there are, for the log; -1: unknown.
            description: for the log.
            prediction_loss_only: keep nothing but the loss; None: as the arguments say.
            metric_key_prefix: of the metrics' names.
        """
        logger.info("%s: %s batches, %s samples", description, *(n if n >= 0 else "?" for n in (steps, num_examples)))
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        return run_evaluation(self, dataset, loss_only, metric_key_prefix, description != "Prediction")

    def prediction_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
        """The predictions for a batch on one replica, traced; its loss is added up beside."""
        return self.predictor.predict(features, labels, self.run_model)

    def distributed_prediction_steps(self, batch: tuple[Any, Any]) -> Any:
        """The predictions for a batch on all replicas; traced."""
        return self.predictor.run_replicas(*batch)

    # ---- checkpoints

    def _load_from_checkpoint(self, resume_from_checkpoint: str) -> None:
        """Load the weights of a checkpoint, or of what `save_model` wrote."""
        saving.load_model(self.model, Path(resume_from_checkpoint))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model: by `save_pretrained`, as `model.keras`, or as a SavedModel; pushed if so asked."""
        if not self.args.should_save:
            return
        folder = Path(str(self.args.output_dir) if output_dir is None else output_dir)
        saving.save_model(self.model, folder)
        if callable(getattr(self.processing_class, "save_pretrained", None)):
            self.processing_class.save_pretrained(str(folder))
        if self.args.push_to_hub and not _internal_call:
            publishing.push_saved_model(self)

    def _save_checkpoint(self) -> bool:
        """Write a checkpoint of this moment; whether it is there."""
        return saving.save_checkpoint(self)

    # ---- the hub, beside the methods of HubNames

    def _card_facts(self) -> CardFacts:
        return card_facts(self)

    def _checkpoint_form(self) -> CheckpointForm:
        return checkpoint_form(self)

    # ---- reporters

    def setup_wandb(self) -> None:
        """Add the W&B reporter now; `report_to="wandb"` does it from the start."""
        self._add_reporter("wandb")

    def setup_comet(self) -> None:
        """Add the Comet reporter now; `report_to="comet_ml"` does it from the start."""
        self._add_reporter("comet_ml")

    def _add_reporter(self, name: str) -> None:
        for callback in find_reporters(name):
            if not any(type(there) is callback for there in self.callback_handler.callbacks):
                self.add_callback(callback)
