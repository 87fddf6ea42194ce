"""Sequence-to-sequence training with evaluation and prediction on generated text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.args.adopt import adopt
from paceline.args.choices import IntervalStrategy, SaveStrategy
from paceline.args.seq2seq import Seq2SeqTrainingArguments
from paceline.core.contracts import StreamingMetric
from paceline.core.events import TrainerCallback
from paceline.core.optional import LateModule
from paceline.core.outputs import PredictionOutput, TrainOutput
from paceline.pytorch import parts
from paceline.pytorch.data.sampling import make_train_sampler
from paceline.pytorch.model import generation
from paceline.pytorch.trainer import Trainer

if TYPE_CHECKING:
    from paceline.predictions import augmentation as test_time
    from paceline.pytorch import within_evaluation
else:
    test_time = LateModule("paceline.predictions.augmentation")
    within_evaluation = LateModule("paceline.pytorch.within_evaluation")

logger = logging.getLogger(__name__)


class Seq2SeqTrainer(Trainer):
    """A Trainer that generates during evaluation and prediction, if `predict_with_generate` is set.

    The generated token ids are the predictions passed to `compute_metrics` and returned by `predict`, int64 of shape
    (samples, length). They and the labels are padded to the maximum length of the generation settings, so every batch
    has the same width. With several sequences per sample, the shape is (samples, sequences, length).

    Generation settings take effect in this order of precedence: keyword arguments of `evaluate` and `predict`,
    `generation_max_length` and `generation_num_beams`, `generation_config` (which replaces the model's own), the
    model's own generation config. They are checked when the Trainer is created.

    Args:
        model, args, ...: as for `Trainer`; `args` is a `Seq2SeqTrainingArguments`. With `predict_with_generate=True`
            the model needs a method `generate`; it does not have to come from transformers.

    Raises:
        TypeError: the arguments lack the generation options.
        UnsupportedOption: the model cannot generate, or not with these settings.
        ValueError, OSError: a generation config is invalid or not found.
    """

    args: Seq2SeqTrainingArguments
    _gen_kwargs: dict[str, Any]  # settings of the current or last evaluation; unset before; subclasses read and set it
    _model_settings: Mapping[str, Any] = {}  # for a model without a generation config

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | StreamingMetric | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        tokenizer: Any = None,
        teacher: Any = None,
    ) -> None:
        # locals() contains exactly the parameters above, as long as nothing else is assigned before
        options = {name: value for name, value in locals().items() if name not in ("self", "args", "__class__")}
        args = adopt(args) if args is not None else Seq2SeqTrainingArguments(output_dir="tmp_trainer")
        if not hasattr(args, "predict_with_generate"):
            raise TypeError(f"`args` is {type(args).__name__}; Seq2SeqTrainer needs Seq2SeqTrainingArguments.")
        super().__init__(args=args, **options)
        if model_init is None:
            self._prepare_generation(self.model)
        self._warn_of_idle_options("The arguments hold", self._settings_of_arguments({}))

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Makes a model with `model_init`, and sets its generation config from the arguments."""
        model = super().call_model_init(trial)
        self._prepare_generation(model)
        return model

    def _prepare_generation(self, model: nn.Module) -> None:
        """Sets a model's generation config, and checks that it can generate as requested."""
        self._model_settings = generation.apply_config(model, self.args.generation_config, self.load_generation_config)
        if self.args.predict_with_generate:
            generation.check_generation(model, {**self._model_settings, **self._settings_of_arguments({})})

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """Returns the `GenerationConfig` of transformers for the option `generation_config`; see there for its forms.

        Raises:
            OSError: there is no such file or model.
            ValueError: it contains an unknown option or an invalid value.
        """
        return generation.load_config(gen_config_arg)

    # ---- settings of a generation

    def _settings_of_arguments(self, gen_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments of a call, with defaults from `generation_max_length` and
        `generation_num_beams`.
        """
        settings = dict(gen_kwargs)
        given = [settings, generation.vars_of(settings.get("generation_config"))]
        names_length = any(each.get(name) is not None for each in given for name in generation.LENGTHS)
        if not names_length and self.args.generation_max_length is not None:
            settings["max_length"] = self.args.generation_max_length
        names_beams = any(each.get("num_beams") is not None for each in given)
        if not names_beams and self.args.generation_num_beams is not None:
            settings["num_beams"] = self.args.generation_num_beams
        return settings

    def _settings_of_batch(self, gen_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments of `generate` for a batch, without its inputs."""
        current = self._gen_kwargs if hasattr(self, "_gen_kwargs") else self._settings_of_arguments({})
        given = {
            name: value
            for name, value in (gen_kwargs or current).items()
            if value is not None or name not in ("max_length", "num_beams")  # here None means not given
        }
        settings = generation.with_one_length(self.model, self._model_settings, given)
        return generation.with_default_length(self.model, settings)

    def _warn_of_idle_options(self, who: str, settings: Mapping[str, Any]) -> None:
        names = [name for name, value in settings.items() if value is not None]
        if names and not self.args.predict_with_generate:
            logger.warning(
                "%s %s for generation, and nothing is generated: predict_with_generate=False.", who, ", ".join(names)
            )

    # ---- data

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Returns the sampler of the training data; with `sortish_sampler`, batches of similar length."""
        args = self.args
        if not args.sortish_sampler:
            return super()._get_train_sampler(train_dataset)
        try:
            return make_train_sampler(
                train_dataset if train_dataset is not None else self.train_dataset,
                strategy="group_by_length",
                batch_size=args.train_batch_size,
                accumulation=args.gradient_accumulation_steps,
                seed=self._data_seed,
                length_column=args.length_column_name,
                model_input_name=self._model_input_name,
            )
        except ValueError as error:
            raise ValueError(f"sortish_sampler=True: {error}") from error

    # ---- training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        *,
        model_path: str | None = None,
    ) -> TrainOutput:
        """Trains as configured by the arguments; see `Trainer.train`.

        Raises:
            ValueError: the first evaluation could not use the generation config, or the first checkpoint not save it.
        """
        if self.args.predict_with_generate and self.args.eval_strategy != IntervalStrategy.NO:
            generation.check_start(self.model)
        if self.args.save_strategy != SaveStrategy.NO:
            generation.check_saving(self.model)
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval, model_path=model_path)

    # ---- evaluation and prediction

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        *,
        augmentation: test_time.TestTimeAugmentation | None = None,
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Evaluates and returns the metrics; for a dict of datasets, each under `{prefix}_{name}`.

        Args:
            eval_dataset: replaces the Trainer's.
            ignore_keys: keys of the model's output to drop; unused with generation.
            metric_key_prefix: prefix of the metric names.
            augmentation: as in `Trainer.evaluate`, without generation.
            gen_kwargs: for `generate`: `max_length`, `max_new_tokens` (tokens), `num_beams`, ...
        """
        self._begin_generation("evaluate() was given", gen_kwargs)
        if augmentation is not None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, augmentation=augmentation)
        datasets = self.eval_dataset if eval_dataset is None else eval_dataset
        if not isinstance(datasets, dict) or not gen_kwargs:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        metrics: dict[str, float] = {}
        for name, dataset in datasets.items():
            given = name if eval_dataset is None else dataset
            metrics.update(self.evaluate(given, ignore_keys, f"{metric_key_prefix}_{name}", **gen_kwargs))
        return metrics

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        *,
        augmentation: test_time.TestTimeAugmentation | None = None,
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Returns one row of generated token ids per sample, and metrics if there are labels.

        Args:
            test_dataset: a dataset with or without labels.
            ignore_keys: keys of the model's output to drop; unused with generation.
            metric_key_prefix: prefix of the metric names.
            augmentation: as in `Trainer.predict`, without generation.
            gen_kwargs: for `generate`, as in `evaluate`.
        """
        self._begin_generation("predict() was given", gen_kwargs)
        if augmentation is not None:
            return super().predict(test_dataset, ignore_keys, metric_key_prefix, augmentation=augmentation)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def _begin_generation(self, who: str, gen_kwargs: Mapping[str, Any]) -> None:
        self._warn_of_idle_options(who, gen_kwargs)
        self._gen_kwargs = self._settings_of_arguments(gen_kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """Returns (loss, generated token ids, labels) of one batch, without gradients; absent ones are None.

        Args:
            model: computes the loss; `self.model` generates.
            inputs: the batch.
            prediction_loss_only: compute only the loss, without generation.
            ignore_keys: keys of the model's output to drop; unused with generation.
            gen_kwargs: for `generate`; replaces the settings of the evaluation in progress.
        """
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        names = parts.batch_predictor_of(self).labels_in(inputs)
        settings = self._settings_of_batch(gen_kwargs)
        with torch.no_grad():
            placed = self._prepare_inputs(inputs)
            labels = tuple(placed[name] for name in names)
            generated = self._generate(placed, settings)
        loss = super().prediction_step(model, inputs, True, ignore_keys)[0] if names else None
        length = generation.padded_length(self.model, settings)
        labels = tuple(self._pad_tensors_to_max_len(label.detach(), length) for label in labels)
        rows = self._pad_tensors_to_max_len(generated, length)
        return loss, rows, labels[0] if len(labels) == 1 else labels or None

    def _generate(self, inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
        """Returns the token ids that the model generates for a batch on the device."""
        given = generation.select_inputs(inputs, self.label_names or self.objective.label_names)
        return within_evaluation.generate(self, given, settings)

    def _pad_tensors_to_max_len(self, tensor: Any, max_length: int) -> Any:
        """Pads rows of token ids; unchanged if they are long enough."""
        return generation.pad_rows(tensor, max_length, generation.find_pad_token(self.processing_class, self.model))
