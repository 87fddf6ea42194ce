"""The text of a model card: what the model was trained on, how, with what result, and by which versions."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.record import library_versions
from paceline.hub.history import describing, evaluations_of

if TYPE_CHECKING:
    from paceline.trainer import Trainer

# distribution, also as the name that it is imported under -> how people write it
_LIBRARIES = {
    "paceline": "paceline",
    "torch": "PyTorch",
    "transformers": "Transformers",
    "peft": "PEFT",
    "datasets": "Datasets",
    "tokenizers": "Tokenizers",
    "accelerate": "Accelerate",
    "trl": "TRL",
    "numpy": "NumPy",
}


def describe(trainer: Trainer, name: str, base: Any, datasets: list[str]) -> str:
    """The part of a card that follows from the run, in Markdown."""
    parts = [
        f"# {plain(name)}",
        opening(trainer, base, datasets),
        results(trainer),
        "## Training data\n\n" + data(trainer, datasets),
        "## Training procedure\n\n### Hyper-parameters\n\n" + hyper_parameters(trainer),
        history(trainer),
        # PEFT adds its line below a heading of this name
        "### Framework versions\n\n" + versions(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: Any) -> str:
    """A text that neither ends a line nor a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def shown(value: Any) -> str:
    """A value for a person: numbers to four places, or six digits where they are small."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:.6g}" if value != 0 and abs(value) < 1e-3 else f"{value:,.4f}".rstrip("0").rstrip(".")
    return plain(value)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def opening(trainer: Trainer, base: Any, datasets: list[str]) -> str:
    """What this is, in a sentence or two."""
    model = trainer.strategy.unwrap(trainer.model)
    names = [base] if isinstance(base, str) else base or []
    links = ", ".join(f"[{plain(item)}](https://huggingface.co/{item})" for item in names)
    origin = f", starting from {links}" if links else ""
    on = f" on {', '.join(map(plain, datasets))}" if datasets else ""
    state = trainer.state
    progress = f"after {state.global_step:,} updates"
    if trainer.is_in_train and state.global_step < state.max_steps:
        progress += f" of {state.max_steps:,}; training goes on"
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    size = f"{total:,} parameters" + (f", {trained:,} of them trained" if trained < total else "")
    return f"`{type(model).__name__}`, trained{on}{origin}: the model {progress}. It has {size}."


def results(trainer: Trainer) -> str:
    """The metrics of the model as it is."""
    found = describing(trainer)
    if found is None:
        return "It has not been evaluated."
    rows = [[plain(name), shown(value)] for name, value in found.metrics.items()]
    return f"On the evaluation data (step {found.step:,}):\n\n" + table(["metric", "value"], rows)


def data(trainer: Trainer, datasets: list[str]) -> str:
    """How much data there was, and its columns."""
    lines = [f"- name: {', '.join(map(plain, datasets))}"] if datasets else []
    lines.append(f"- training: {amount(trainer.train_dataset)}")
    given = trainer.eval_dataset
    if isinstance(given, dict):
        lines += [f"- evaluation, {plain(name)}: {amount(dataset)}" for name, dataset in given.items()]
    elif given is not None:
        lines.append(f"- evaluation: {amount(given)}")
    columns = getattr(trainer.train_dataset, "column_names", None)
    if isinstance(columns, list) and columns:
        lines.append(f"- columns: {', '.join(map(plain, columns))}")
    return "\n".join(lines)


def amount(dataset: Any) -> str:
    """The size of a data set, in words."""
    if dataset is None:
        return "none"
    try:
        return f"{len(dataset):,} samples"
    except (TypeError, NotImplementedError):
        return "a stream"


def hyper_parameters(trainer: Trainer) -> str:
    """The arguments that make the result what it is."""
    args, state = trainer.args, trainer.state
    processes = trainer.strategy.mesh.data_size
    plan, accumulation = trainer._plan(), args.gradient_accumulation_steps
    micro, total = plan.micro_batch_size, trainer.get_total_train_batch_size(args)
    now = state.train_batch_size  # less, where memory ran out
    precision = plan.precision if plan.precision != "full" or plan.shard_precision else ""
    formats = f" ({plan.shard_precision})" if plan.shard_precision else ""
    lines = [
        f"learning_rate: {args.learning_rate}",
        f"samples per update: {total} = {micro} per device x {accumulation} accumulated x "
        + (f"{processes} process" if processes == 1 else f"{processes} processes")
        + (f", in micro-batches of {now}" if now and now != micro else ""),
        f"per_device_eval_batch_size: {args.per_device_eval_batch_size}",
        f"optimizer: {optimizer(trainer)}",
        f"weight_decay: {args.weight_decay}",
        f"lr_scheduler_type: {args.lr_scheduler_type}, warmup_steps: {args.warmup_steps}"
        + (f", {plain(args.lr_scheduler_kwargs)}" if args.lr_scheduler_kwargs else ""),
        f"updates: {state.max_steps:,}" + (f", epochs: {epochs}" if (epochs := state.num_train_epochs) < 2**31 else ""),
        f"max_grad_norm: {args.max_grad_norm}",
        f"precision: {'mixed, ' + precision if precision else 'float32'}{formats}",
        f"seed: {args.seed}, data_seed: {args.seed if args.data_seed is None else args.data_seed}",
    ]
    lines += [
        f"{name}: {plain(value)}"
        for name in ("label_smoothing_factor", "neftune_noise_alpha", "train_sampling_strategy", "optim_target_modules")
        if (value := getattr(args, name)) not in (None, 0, 0.0, "random")
    ]
    return "\n".join(f"- {line}" for line in lines)


def optimizer(trainer: Trainer) -> str:
    """The optimizer and its settings."""
    args, made = trainer.args, trainer.optimizer
    while hasattr(made, "optimizer"):  # inside the wrappers of other libraries
        made = made.optimizer
    name = str(args.optim) if made is None else f"{type(made).__name__} (optim={args.optim})"
    settings: dict[str, Any] = dict(made.defaults) if isinstance(made, torch.optim.Optimizer) else {}
    wanted: dict[str, Any] = {key: settings[key] for key in ("betas", "momentum", "eps", "alpha") if key in settings}
    if not settings:
        wanted = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if args.optim_args:
        wanted["optim_args"] = args.optim_args
    return ", ".join([name, *(f"{key}={plain(value)}" for key, value in wanted.items())])


def history(trainer: Trainer) -> str:
    """A row for each evaluation while training."""
    found = [one for one in evaluations_of(trainer.state.log_history) if one.is_of_training]
    if not found:
        return ""
    names = list(dict.fromkeys(name for one in found for name in one.metrics))
    rows = [
        [
            shown(one.training_loss) if one.training_loss is not None else "not logged",
            shown(one.epoch) if one.epoch is not None else "",
            str(one.step),
            *(shown(one.metrics[name]) if name in one.metrics else "" for name in names),
        ]
        for one in found
    ]
    head = ["training loss", "epoch", "step", *(f"evaluation {plain(name)}" for name in names)]
    return "### Training results\n\n" + table(head, rows)


def versions() -> str:
    """The versions of what took part."""
    used = library_versions([name for name in _LIBRARIES if name in sys.modules])
    lines = [f"- {_LIBRARIES[name]} {version}" for name, version in used.items()]
    return "\n".join([*lines, f"- Python {platform.python_version()}"])
