"""Builds the torch model of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from paceline.cli.config import JobConfig
from paceline.cli.errors import UsageError, first_line, need, suggest
from paceline.cli.references import is_of, read_reference

TASKS = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "multiple_choice": "AutoModelForMultipleChoice",
    "image_classification": "AutoModelForImageClassification",
    "audio_classification": "AutoModelForAudioClassification",
    "speech_seq2seq": "AutoModelForSpeechSeq2Seq",
}
TENSORFLOW = ("keras", "tf_keras", "tensorflow")
OWN_KEYS = ("path", "task", "model_type")


def build_model(config: JobConfig, tokenizer: object) -> nn.Module:
    """Builds the model of the section `model`.

    Raises:
        UsageError: the section is missing, has an unknown key, or the model cannot be loaded or is not an `nn.Module`.
    """
    section = config.get("model")
    if section is None:
        raise UsageError("'model' is missing: folder or name for transformers, {model_type: ...}, package.module:name")
    reference = read_reference("model", section)
    if reference is not None:
        loaded = reference.load()
        is_finished = isinstance(loaded, nn.Module) and not reference.options
        model = loaded if is_finished or is_of(loaded, TENSORFLOW) else reference.call(tokenizer=tokenizer)
        if not isinstance(model, nn.Module):
            hint = "; a model of TensorFlow: give --framework tf" if is_of(model, TENSORFLOW) else ""
            raise UsageError(f"model: {reference.name} gave a {type(model).__name__}; an nn.Module is needed{hint}")
        return model
    return build_transformers_model(config, {"path": section} if isinstance(section, str) else section, tokenizer)


def build_transformers_model(config: JobConfig, section: Mapping[str, Any], tokenizer: object) -> nn.Module:
    """Builds a model of transformers, with weights from a folder or name, or with new weights from `model_type`."""
    if ("path" in section) == ("model_type" in section):
        raise UsageError("model: give one of 'path' (a folder or name), 'model_type' (fresh weights), 'factory'")
    transformers = need("transformers", "transformers", "model")
    transformers.utils.logging.disable_progress_bar()  # one bar per checkpoint would break the display
    settings = {key: value for key, value in section.items() if key not in OWN_KEYS}
    if "path" in section:
        name = str(config.find_file(str(section["path"])) or section["path"])
        if name.endswith(".keras"):
            raise UsageError(f"model: {section['path']} is a Keras model: give --framework tf")
        try:
            shape = transformers.AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise UsageError(f"model: {section['path']!r} cannot be loaded: {first_line(error)}") from error
        apply_settings(shape, settings)
        return find_class(transformers, shape, section).from_pretrained(name, config=shape)  # type: ignore[no-any-return]
    model_type = str(section["model_type"])
    known = transformers.CONFIG_MAPPING
    if model_type not in known:
        raise UsageError(f"model.model_type: there is no {model_type!r}{suggest(model_type, known)}")
    shape = transformers.AutoConfig.for_model(model_type)
    if tokenizer is not None and hasattr(shape, "vocab_size"):
        settings = {**vocabulary_settings(tokenizer, shape), **settings}
    apply_settings(shape, settings)
    return find_class(transformers, shape, section).from_config(shape)  # type: ignore[no-any-return]


def vocabulary_settings(tokenizer: Any, shape: object) -> dict[str, Any]:
    """Returns the vocabulary size and the special token ids of the tokenizer, for a new model."""
    names = [name for name in ("bos_token_id", "eos_token_id", "pad_token_id") if hasattr(shape, name)]
    return {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name, None) for name in names}}


def apply_settings(shape: Any, settings: Mapping[str, Any]) -> None:
    """Sets values of a model's configuration.

    Raises:
        UsageError: an unknown name; the message names the closest known one.
    """
    known = {*shape.to_dict(), *getattr(shape, "attribute_map", {})} - {"transformers_version", "architectures"}
    for name, value in settings.items():
        if name not in known and not hasattr(shape, name):
            raise UsageError(f"model.{name}: a {shape.model_type} has no {name!r}{suggest(name, {*known, *OWN_KEYS})}")
        setattr(shape, name, value)


def find_class(transformers: Any, shape: Any, section: Mapping[str, Any]) -> Any:
    """Returns the auto class of the named task, else of the saved model's task, else of causal language modelling."""
    task = section.get("task")
    if task is None:
        saved = [_task_of(transformers, name) for name in shape.architectures or ()]
        task = next(filter(None, saved), "causal_lm")
    name = str(task).replace("-", "_")
    if name not in TASKS:
        raise UsageError(f"model.task: there is no {task!r}{suggest(name, TASKS)}")
    found = getattr(transformers, TASKS[name])
    if type(shape) not in found._model_mapping:
        fitting = [other for other in TASKS if type(shape) in getattr(transformers, TASKS[other])._model_mapping]
        raise UsageError(f"model.task: a {shape.model_type} cannot do {name!r}; it can: {', '.join(fitting) or 'none'}")
    return found


def _task_of(transformers: object, class_name: str) -> str | None:
    endings = {
        "ForCausalLM": "causal_lm",
        "LMHeadModel": "causal_lm",
        "ForMaskedLM": "masked_lm",
        "ForConditionalGeneration": "seq2seq_lm",
    }
    for ending, task in endings.items():
        if class_name.endswith(ending):
            return task
    for task, auto_name in TASKS.items():
        if class_name.endswith(auto_name.removeprefix("AutoModel")):
            return task
    return None
