"""Builds TFTrainer, model and data for `paceline train --framework tf`. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from paceline.args.errors import UnsupportedOption
from paceline.cli.config import JobConfig
from paceline.cli.errors import UsageError, check_keys, first_line
from paceline.cli.job_data import Splits, load_data, preprocess
from paceline.cli.job_text import LABEL_NAMES, tokenize
from paceline.cli.job_tokenizer import build_tokenizer
from paceline.cli.job_trainer import make_trainer
from paceline.cli.references import is_of, read_reference
from paceline.tensorflow.arguments import TFTrainingArguments
from paceline.tensorflow.checkpoint.model_files import KERAS_FILE
from paceline.tensorflow.data.batches import KNOWN_LABELS
from paceline.tensorflow.data.columns import columns_of
from paceline.tensorflow.framework import keras
from paceline.tensorflow.objective import build_by_itself, check_model, is_functional, shifts
from paceline.tensorflow.trainer import TFTrainer

KERAS_SUFFIX = ".keras"
FORMS = f"a {KERAS_SUFFIX} file, a folder that holds {KERAS_FILE}, or package.module:name"

# errors of training that an invalid configuration causes
REFUSALS = (UnsupportedOption,)


def build_trainer(config: JobConfig, args: TFTrainingArguments) -> tuple[TFTrainer, Splits]:
    """Builds the Trainer from model, data, functions and callbacks. The seed is set before the model is created.

    The model is created in the scope of `args.strategy`, so that it is placed on all the strategy's devices.

    Raises:
        UsageError: the configuration is invalid.
    """
    path, strategy = find_model(config), connect(args)
    keras.utils.set_random_seed(args.seed)
    tokenizer = build_tokenizer(config)
    with strategy.scope():
        model = build_model(config, tokenizer) if path is None else load_model(path)
        build_by_itself(model)
    splits = load_data(config, tokenizer, args.seed)
    check_arrays(splits)
    columns = columns_in(splits)
    if config.get("preprocess") is not None:
        preprocess(config, splits, tokenizer)
    tokenize_text(config, splits, model, tokenizer, columns_in(splits) - columns)
    if config.get("data_collator") is None:
        check_text(splits, args.label_names)
    trainer: TFTrainer = make_trainer(
        config, TFTrainer, model=model, args=args, splits=splits, tokenizer=tokenizer, shifts=shifts(model)
    )
    return trainer, splits


def in_turn(args: TFTrainingArguments) -> AbstractContextManager[bool]:
    """Yields True: each worker opens the folder of a job by itself."""
    return nullcontext(True)


def connect(args: TFTrainingArguments) -> Any:
    """Returns the strategy. Several workers must connect before any computation, and a job's modules may compute.

    Raises:
        UsageError: the devices that the arguments or TF_CONFIG name are not available.
    """
    try:
        return args.strategy
    except (ValueError, RuntimeError) as error:
        raise UsageError(first_line(error)) from error


def find_model(config: JobConfig) -> Path | None:
    """Returns the file that the section `model` names; None if the section names a function, class or object.

    Raises:
        UsageError: the section names none of these, or the file does not exist.
    """
    section = config.get("model")
    if section is None:
        raise UsageError(f"'model' is missing: {FORMS}")
    if read_reference("model", section) is not None:
        return None
    if isinstance(section, Mapping):
        check_keys("model", section, ("path",))
        section = section.get("path")
    found = config.find_file(str(section))
    if found is not None and found.is_dir() and (found / KERAS_FILE).is_file():
        return found / KERAS_FILE
    if found is None or found.is_dir() or found.suffix != KERAS_SUFFIX:
        what = "does not exist" if found is None else "is not a Keras model"
        raise UsageError(f"model: {section} {what}: with TensorFlow give {FORMS}")
    return found


def load_model(path: Path) -> Any:
    """Loads a model from a `.keras` file, with its compiled loss.

    Raises:
        UsageError: the model cannot be loaded.
    """
    try:
        return keras.saving.load_model(path)
    except (ValueError, TypeError, KeyError, OSError, ImportError) as error:
        raise UsageError(
            f"model: {path} cannot be loaded: {first_line(error)[:300]} (with layers or losses of your own in it, give "
            "package.module:name of a function that loads it)"
        ) from error


def build_model(config: JobConfig, tokenizer: object) -> Any:
    """Returns the model from a function or class, or the named object itself.

    Raises:
        UsageError: the object is not a TensorFlow model.
    """
    reference = read_reference("model", config.get("model"))
    assert reference is not None
    loaded = reference.load()
    is_finished = hasattr(type(loaded), "trainable_variables") and not reference.options
    model = loaded if is_finished or is_of(loaded, ("torch",)) else reference.call(tokenizer=tokenizer)
    try:
        check_model(model)
    except TypeError as error:
        raise UsageError(
            f"model: {reference.name} gave a {type(model).__name__}; a Keras model or a callable tf.Module is needed "
            "(for a module of torch leave out --framework tf)"
        ) from error
    if model is None:
        raise UsageError(f"model: {reference.name} gave nothing; a Keras model or a callable tf.Module is needed")
    return model


def check_arrays(splits: Splits) -> None:
    """Refuses a pair `(features, labels)`, which would be read as (train, eval).

    Raises:
        UsageError: a function returned such a pair.
    """
    if is_array(splits.eval) and (is_array(splits.train) or isinstance(splits.train, Mapping)):
        raise UsageError(
            "data: features and labels were given, and a pair stands for (train, eval): return "
            "{'train': (features, labels)}, or ((features, labels), (features, labels))"
        )


def is_array(data: object) -> bool:
    """True for an array or a tensor, False for a table."""
    return hasattr(data, "shape") and hasattr(data, "dtype")


def columns_in(splits: Splits) -> set[str]:
    """Returns the columns of all splits that are tables of `datasets`."""
    return {column for dataset in splits.given().values() for column in getattr(dataset, "column_names", None) or ()}


def tokenize_text(config: JobConfig, splits: Splits, model: Any, tokenizer: Any, made: set[str]) -> None:
    """Converts text to token ids for the model's inputs. For a model with one input, the tokenizer returns ids only.

    Args:
        made: columns that `preprocess` added, which a model with unnamed inputs may take.

    Raises:
        UsageError: see `tokenize`.
    """
    inputs = columns_of(model, None)
    first = getattr(tokenizer, "model_input_names", None)
    is_single = inputs is None and is_functional(model) and not isinstance(model.input, list | tuple)
    if first and is_single:  # a model with one input takes no mask
        tokenizer.model_input_names = first = first[:1]
    before = splits.given()
    makes_blocks = shifts(model) or type(model).__name__.endswith("MaskedLM")
    tokenize(config, splits, model, tokenizer, made if inputs is None else inputs, makes_blocks)
    for name, dataset in splits.given().items():
        if first and is_single and dataset is not before[name]:
            kept = [column for column in dataset.column_names if column in (*first, *LABEL_NAMES)]
            setattr(splits, name, dataset.select_columns(kept))


def check_text(splits: Splits, label_names: Sequence[str] | None) -> None:
    """Refuses a dataset without numeric inputs, because text columns are dropped from batches.

    Raises:
        UsageError: all columns except the labels are text.
    """
    labels = {*(label_names or ()), *(name for known in KNOWN_LABELS for name in known)}
    for name, dataset in splits.given().items():
        features = getattr(dataset, "features", None)
        kinds = features if isinstance(features, Mapping) else {}
        found = [getattr(kind, "dtype", None) for column, kind in kinds.items() if column not in labels]
        if found and all(kind in ("string", "large_string") for kind in found):
            raise UsageError(
                f"data: the {name} set holds only text: give 'tokenizer', or a function that makes numbers of it as "
                "'preprocess' or 'data_collator'"
            )
