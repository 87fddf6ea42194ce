"""Heads of transformers made tiny, with a batch for each, and what becomes of their loss when a batch is split."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from head_batches import SAMPLES, Batch, Batches, collate
from tiny_models import build, freeze
from torch import Tensor, nn

from paceline import Trainer, TrainingArguments
from paceline.pytorch.model.outputs import find_loss

SPLITS = ((4, 2), (2, 4))
SECONDS = 20  # of the processor, for a step of the whole batch: a verdict takes some twenty steps
IS_HEAD = re.compile(r"For[A-Z]|LMHead|DoubleHeads")


class NoLoss(ValueError):
    """Raised where a model returns no loss."""


class NotMade(Exception):
    """Raised where a head cannot be made tiny, or no batch gives it a loss; carries what was said."""

    def __init__(self, configs: list[str], batches: list[str]) -> None:
        super().__init__([*batches[:1], *configs[-1:], "no configuration of it was found"][0])
        self.said = [*configs, *batches]


IS_OF_PRECISION = re.compile("dtype|[dD]ouble|[fF]loat|same type|not finite")
IS_LABEL = re.compile("label|loss|positions$|target|future|actions|masked|negative")
# what a head reads beside text
MEDIA = {"pixel_values", "pixel_values_videos", "input_features", "input_values"}
TEXT_ALONE = "text alone"
NEEDS = re.compile(r"requires the (\w+) library")
IS_NOT_TRAINED = re.compile("not trainable|[tT]raining is not|not support training")


def module_names() -> list[str]:
    """The modules of transformers that hold the heads of its auto classes."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    mappings = (value for name, value in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES"))
    return sorted({model_type_to_module_name(model_type) for mapping in mappings for model_type in mapping})


def head_classes(modules: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(name, class) of every head in these modules."""
    for module_name in modules:
        try:
            module = importlib.import_module(f"transformers.models.{module_name}.modeling_{module_name}")
        except Exception:
            continue
        for name in sorted(getattr(module, "__all__", ())):
            kind = getattr(module, name)
            if is_head(kind, name):
                yield name, kind


def is_head(kind: Any, name: str) -> bool:
    is_module = isinstance(kind, type) and issubclass(kind, nn.Module)
    return is_module and "PreTrainedModel" not in name and IS_HEAD.search(name) is not None


def full_batch(model: nn.Module, batch: Batch, seed: int = 0) -> tuple[float, Tensor]:
    """The loss of all samples at once by the model's own forward, and its gradient.

    Raises: whatever the model raises; NoLoss where it returns none; ValueError where it is not finite.
    """
    model.zero_grad()
    torch.manual_seed(seed)
    loss = find_loss(model(**batch))
    if loss is None:
        raise NoLoss("it returns no loss")
    if not bool(torch.isfinite(loss)) or not loss.requires_grad:
        raise ValueError("its loss is not finite, or has no gradient")
    loss.backward()
    return float(loss.detach()), gradient_of(model)


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat(
        [p.grad.flatten().double() for p in model.parameters() if p.grad is not None and p.requires_grad]
    ).clone()


class Recorder(logging.Handler):
    """Keeps the warnings that name the option to set."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "loss_weight=" in record.getMessage():
            self.texts.append(record.getMessage())


class Whole(Trainer):
    """Keeps the gradient of the update, and takes no step."""

    gradient: Tensor | None = None

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        optimizer = super().create_optimizer(model)

        def keep(*_: Any) -> None:
            self.gradient = gradient_of(self.model)
            for parameter in self.model.parameters():
                parameter.grad = None

        optimizer.register_step_pre_hook(keep)
        return optimizer


def is_close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-4 * max(abs(one), abs(other)) + 1e-7


def verdict_of(folder: Path, model: nn.Module, data: list[Batch]) -> tuple[str, str]:
    """(`right`, `warned`, `refused` or `wrong`, what was said or seen)."""
    model.eval()
    with torch.no_grad():
        loss = float(find_loss(model(**collate(data))) or 0.0)
    model.train()
    whole, gradient = full_batch(model, collate(data))
    if not is_close(whole, full_batch(model, collate(data), seed=1)[0]):
        return "random", "the loss draws random numbers"
    logger, said, wrong = logging.getLogger("paceline"), "", ""
    for size, accumulation in SPLITS:
        recorder = Recorder()
        logger.addHandler(recorder)
        try:
            trainer = Whole(
                model=model,
                args=TrainingArguments(
                    output_dir=str(folder), use_cpu=True, disable_tqdm=True, save_strategy="no", max_steps=1,
                    per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, max_grad_norm=0,
                    per_device_eval_batch_size=size, train_sampling_strategy="sequential", learning_rate=0.0,
                    logging_strategy="no", report_to="none", optim="sgd", remove_unused_columns=False,
                ),
                train_dataset=data, eval_dataset=data, data_collator=collate,
            )  # fmt: skip
            evaluated = trainer.evaluate()["eval_loss"]
            trainer.train()
        except ValueError as error:
            if "loss" in str(error) and "paceline" in str(error):
                return "refused", str(error)
            raise
        finally:
            logger.removeHandler(recorder)
        assert trainer.gradient is not None
        distance = float((trainer.gradient - gradient).norm() / gradient.norm().clamp(min=1e-12))
        if distance > 1e-3 or not is_close(evaluated, loss):
            found = (
                f"{size}x{accumulation}: gradient off by {distance:.3g}, eval_loss {evaluated:.6g}, whole {loss:.6g}"
            )
            if not recorder.texts:
                return "wrong", found
            wrong, said = found, recorder.texts[0]
    return ("warned", said) if wrong else ("right", "")


def find_batch(kind: Any) -> tuple[nn.Module, list[Batch]]:
    """A tiny model of this class, and 8 samples that give it a loss.

    Raises: NotMade.
    """
    configs: list[str] = []
    said: list[str] = []
    for wide in (False, True):
        for dtype in (torch.float64, torch.float32):  # some kernels know no double precision
            try:
                model = freeze(build(kind, wide), dtype)
            except Exception as error:
                configs.append(describe(error))
                break
            errors: list[str] = []
            data = first_that_fits(model, dtype, errors)
            if data is not None:
                return model, data
            said = errors + said
            if not any(IS_OF_PRECISION.search(error) for error in errors):
                break
    raise NotMade(configs, said)


def first_that_fits(model: nn.Module, dtype: torch.dtype, errors: list[str]) -> list[Batch] | None:
    """The first 8 samples that the model has a loss for."""
    batches = Batches(model)
    try:
        for batch in batches:
            data = [{name: cast(value[index], dtype) for name, value in batch.items()} for index in range(SAMPLES)]
            batches.error = fit(model, data)
            if not batches.error:
                return data
            errors.append(batches.error)
    except Exception as error:  # the config lacks what a batch is made from
        errors.append(describe(error))
    return None


def fit(model: nn.Module, data: list[Batch]) -> str:
    """Returns the message of the model for these samples; empty where it has a loss for them."""
    begin = time.process_time()
    try:
        full_batch(model, collate(data))
    except Exception as error:
        return describe(error)
    seconds = time.process_time() - begin
    return "" if seconds < SECONDS else f"a step takes more than {SECONDS} seconds"


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {name: cast(item, dtype) for name, item in value.items()}
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def examine(folder: Path, kind: Any) -> tuple[str, str]:
    """The verdict on a head, and why.

    `no loss`: it has none in training; `random`: its loss draws random numbers, so that no two passes agree;
    `not made`: it cannot be made tiny, or no batch fits.
    """
    try:
        model, data = find_batch(kind)
    except NotMade as error:
        return why_not(kind, error)
    verdict, reason = verdict_of(folder, model, data)
    return verdict, TEXT_ALONE if verdict == "right" and is_text_alone(kind, data[0]) else reason


def is_text_alone(kind: Any, sample: Iterable[str]) -> bool:
    """True if a head also reads images or sounds, and these samples have none."""
    reads = MEDIA & set(inspect.signature(kind.forward).parameters)
    return bool(reads) and not any(name.removesuffix("_flat") in reads for name in sample)


def why_not(kind: Any, error: NotMade) -> tuple[str, str]:
    """(`no loss` or `not made`, the reason)."""
    said = " ".join(error.said)
    needed = NEEDS.search(said)
    if needed is not None:
        return "not made", f"needs {needed[1]}"
    if IS_NOT_TRAINED.search(said) or has_no_loss(kind, said):
        return "no loss", "it is not trained in transformers"
    return "not made", str(error)


def has_no_loss(kind: Any, said: str) -> bool:
    """True if `forward` speaks of no loss and no labels, or has no name for targets and was seen to return no loss."""
    code = inspect.getsource(kind.forward).rsplit('"""', 1)[-1]
    if not any(word in code for word in ("loss", "labels", "super().forward(")):
        return True
    takes = any(IS_LABEL.search(name) for name in inspect.signature(kind.forward).parameters)
    return not takes and NoLoss.__name__ in said
