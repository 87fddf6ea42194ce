"""The text of a model card: training data, procedure, results and library versions."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Sequence
from typing import Any

from paceline.core.record import library_versions
from paceline.hub.described import CardFacts, CardRun, Hyperparameters, OptimizerFacts
from paceline.hub.history import describing, evaluations_of

# name of the distribution and of its module -> display name
_LIBRARIES = {
    "paceline": "paceline",
    "torch": "PyTorch",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "tf_keras": "tf_keras",
    "transformers": "Transformers",
    "peft": "PEFT",
    "datasets": "Datasets",
    "tokenizers": "Tokenizers",
    "accelerate": "Accelerate",
    "trl": "TRL",
    "numpy": "NumPy",
}


def describe(run: CardRun, facts: CardFacts, name: str, base: object, datasets: list[str]) -> str:
    """Returns the generated part of a card, in Markdown."""
    parts = [
        f"# {plain(name)}",
        opening(run, facts, base, datasets),
        results(run),
        "## Training data\n\n" + data(run, facts, datasets),
        "## Training procedure\n\n### Hyper-parameters\n\n" + hyper_parameters(run, facts),
        history(run),
        # PEFT adds its line under a heading of this name
        "### Framework versions\n\n" + versions(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: object) -> str:
    """Escapes text so that it ends neither a line nor a table cell."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def shown(value: object) -> str:
    """Formats a value: numbers with four decimals, or six digits if they are small."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:.6g}" if value != 0 and abs(value) < 1e-3 else f"{value:,.4f}".rstrip("0").rstrip(".")
    return plain(value)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def opening(run: CardRun, facts: CardFacts, base: Any, datasets: list[str]) -> str:
    """Returns one or two sentences that describe the model."""
    names = [base] if isinstance(base, str) else base or []
    links = ", ".join(f"[{plain(item)}](https://huggingface.co/{item})" for item in names)
    origin = f", starting from {links}" if links else ""
    on = f" on {', '.join(map(plain, datasets))}" if datasets else ""
    state = run.state
    progress = f"after {state.global_step:,} optimizer steps"
    if run.is_training and state.global_step < state.max_steps:
        progress += f" of {state.max_steps:,}; training continues"
    total, trained = facts.num_parameters, facts.num_trained
    size = f"{total:,} parameters" + (f", {trained:,} of them trained" if trained < total else "")
    return f"`{type(facts.model).__name__}`, trained{on}{origin}: the model {progress}. It has {size}."


def results(run: CardRun) -> str:
    """Returns the metrics of the current model."""
    found = describing(run)
    if found is None:
        return "It has not been evaluated."
    rows = [[plain(name), shown(value)] for name, value in found.metrics.items()]
    return f"On the evaluation data (step {found.step:,}):\n\n" + table(["metric", "value"], rows)


def data(run: CardRun, facts: CardFacts, datasets: list[str]) -> str:
    """Describes the size and columns of the data."""
    lines = [f"- name: {', '.join(map(plain, datasets))}"] if datasets else []
    lines.append(f"- training: {amount(facts, run.train_dataset)}")
    lines += [
        f"- evaluation, {plain(name)}: {amount(facts, dataset)}" if name else f"- evaluation: {amount(facts, dataset)}"
        for name, dataset in facts.evaluation_sets.items()
    ]
    columns = getattr(run.train_dataset, "column_names", None)
    if isinstance(columns, list) and columns:
        lines.append(f"- columns: {', '.join(map(plain, columns))}")
    return "\n".join(lines)


def amount(facts: CardFacts, dataset: object) -> str:
    """Describes the size of a dataset."""
    if dataset is None:
        return "none"
    size = facts.num_samples(dataset)
    return "a stream" if size is None else f"{size:,} samples"


def hyper_parameters(run: CardRun, facts: CardFacts) -> str:
    """Lists the hyperparameters."""
    options, state = run.options, run.state
    shares, name = facts.shares, facts.share_name
    micro, accumulation = facts.micro_batch_size, options.gradient_accumulation_steps
    now = state.train_batch_size  # smaller after an out-of-memory
    most = "at most " if micro * accumulation * shares > facts.global_batch_size else ""
    tokens = getattr(options, "per_device_train_tokens", None)
    batch = f"{facts.global_batch_size} = {most}{micro} per device"
    if tokens:
        batch = f"about {facts.global_batch_size} samples = at most {tokens} tokens per device"
    lines = [
        f"learning_rate: {options.learning_rate}",
        f"global batch size: {batch} x {accumulation} accumulated x {shares} {name if shares == 1 else plural(name)}"
        + (f", in micro-batches of {now}" if now and now != micro and not tokens else ""),
        f"per_device_eval_batch_size: {options.per_device_eval_batch_size}",
        f"optimizer: {optimizer_line(options, facts.optimizer)}",
        f"weight_decay: {options.weight_decay}",
        f"lr_scheduler_type: {options.lr_scheduler_type}, warmup_steps: {options.warmup_steps}"
        + (f", {plain(options.lr_scheduler_kwargs)}" if options.lr_scheduler_kwargs else ""),
        f"steps: {state.max_steps:,}" + (f", epochs: {epochs}" if (epochs := state.num_train_epochs) < 2**31 else ""),
        f"max_grad_norm: {options.max_grad_norm}",
        f"precision: {facts.precision}",
        f"seed: {options.seed}, data_seed: {options.seed if options.data_seed is None else options.data_seed}",
    ]
    lines += [
        f"{name}: {plain(value)}"
        for name in ("label_smoothing_factor", "neftune_noise_alpha", "train_sampling_strategy", "optim_target_modules")
        if (value := getattr(options, name)) not in (None, 0, 0.0, "random")
    ]
    return "\n".join(f"- {line}" for line in lines)


def plural(name: str) -> str:
    """Returns the plural of a name."""
    return f"{name}es" if name.endswith("s") else f"{name}s"


def optimizer_line(options: Hyperparameters, optimizer: OptimizerFacts) -> str:
    """Describes an optimizer by its name and relevant settings."""
    name, found = optimizer.name, optimizer.settings
    if found is None:
        found = {"betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_epsilon}
    wanted: dict[str, Any] = {key: found[key] for key in ("betas", "momentum", "eps", "alpha") if key in found}
    if options.optim_args:
        wanted["optim_args"] = options.optim_args
    title = str(options.optim) if name is None else f"{name} (optim={options.optim})"
    return ", ".join([title, *(f"{key}={plain(value)}" for key, value in wanted.items())])


def history(run: CardRun) -> str:
    """Returns a table with a row for each evaluation during training."""
    found = [one for one in evaluations_of(run.state.log_history) if one.is_of_training]
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
    """Lists the versions of the imported libraries."""
    used = library_versions([name for name in _LIBRARIES if name in sys.modules])
    lines = [f"- {_LIBRARIES[name]} {version}" for name, version in used.items()]
    return "\n".join([*lines, f"- Python {platform.python_version()}"])
