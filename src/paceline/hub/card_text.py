"""The text of a model card: what the model was trained on, how, with what result, and by which versions."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.core.record import library_versions
from paceline.hub.described import CardFacts
from paceline.hub.history import describing, evaluations_of

if TYPE_CHECKING:
    from paceline.hub.names import HubNames

# distribution, also as the name that it is imported under -> how people write it
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


def describe(trainer: HubNames, facts: CardFacts, name: str, base: Any, datasets: list[str]) -> str:
    """The part of a card that follows from the run, in Markdown."""
    parts = [
        f"# {plain(name)}",
        opening(trainer, facts, base, datasets),
        results(trainer),
        "## Training data\n\n" + data(trainer, facts, datasets),
        "## Training procedure\n\n### Hyper-parameters\n\n" + hyper_parameters(trainer, facts),
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


def opening(trainer: HubNames, facts: CardFacts, base: Any, datasets: list[str]) -> str:
    """What this is, in a sentence or two."""
    names = [base] if isinstance(base, str) else base or []
    links = ", ".join(f"[{plain(item)}](https://huggingface.co/{item})" for item in names)
    origin = f", starting from {links}" if links else ""
    on = f" on {', '.join(map(plain, datasets))}" if datasets else ""
    state = trainer.state
    progress = f"after {state.global_step:,} updates"
    if trainer.is_in_train and state.global_step < state.max_steps:
        progress += f" of {state.max_steps:,}; training goes on"
    total, trained = facts.num_parameters, facts.num_trained
    size = f"{total:,} parameters" + (f", {trained:,} of them trained" if trained < total else "")
    return f"`{type(facts.model).__name__}`, trained{on}{origin}: the model {progress}. It has {size}."


def results(trainer: HubNames) -> str:
    """The metrics of the model as it is."""
    found = describing(trainer)
    if found is None:
        return "It has not been evaluated."
    rows = [[plain(name), shown(value)] for name, value in found.metrics.items()]
    return f"On the evaluation data (step {found.step:,}):\n\n" + table(["metric", "value"], rows)


def data(trainer: HubNames, facts: CardFacts, datasets: list[str]) -> str:
    """How much data there was, and its columns."""
    lines = [f"- name: {', '.join(map(plain, datasets))}"] if datasets else []
    lines.append(f"- training: {amount(facts, trainer.train_dataset)}")
    lines += [
        f"- evaluation, {plain(name)}: {amount(facts, dataset)}" if name else f"- evaluation: {amount(facts, dataset)}"
        for name, dataset in facts.evaluation_sets.items()
    ]
    columns = getattr(trainer.train_dataset, "column_names", None)
    if isinstance(columns, list) and columns:
        lines.append(f"- columns: {', '.join(map(plain, columns))}")
    return "\n".join(lines)


def amount(facts: CardFacts, dataset: Any) -> str:
    """The size of a data set, in words."""
    if dataset is None:
        return "none"
    size = facts.num_samples(dataset)
    return "a stream" if size is None else f"{size:,} samples"


def hyper_parameters(trainer: HubNames, facts: CardFacts) -> str:
    """The arguments that make the result what it is."""
    args, state = trainer.args, trainer.state
    shares, name = facts.shares, facts.share_name
    micro, accumulation = facts.micro_batch_size, args.gradient_accumulation_steps
    now = state.train_batch_size  # less, where memory ran out
    most = "at most " if micro * accumulation * shares > facts.samples_per_update else ""
    lines = [
        f"learning_rate: {args.learning_rate}",
        f"samples per update: {facts.samples_per_update} = {most}{micro} per device x {accumulation} accumulated x "
        + f"{shares} {name if shares == 1 else plural(name)}"
        + (f", in micro-batches of {now}" if now and now != micro else ""),
        f"per_device_eval_batch_size: {args.per_device_eval_batch_size}",
        f"optimizer: {facts.optimizer}",
        f"weight_decay: {args.weight_decay}",
        f"lr_scheduler_type: {args.lr_scheduler_type}, warmup_steps: {args.warmup_steps}"
        + (f", {plain(args.lr_scheduler_kwargs)}" if args.lr_scheduler_kwargs else ""),
        f"updates: {state.max_steps:,}" + (f", epochs: {epochs}" if (epochs := state.num_train_epochs) < 2**31 else ""),
        f"max_grad_norm: {args.max_grad_norm}",
        f"precision: {facts.precision}",
        f"seed: {args.seed}, data_seed: {args.seed if args.data_seed is None else args.data_seed}",
    ]
    lines += [
        f"{name}: {plain(value)}"
        for name in ("label_smoothing_factor", "neftune_noise_alpha", "train_sampling_strategy", "optim_target_modules")
        if (value := getattr(args, name)) not in (None, 0, 0.0, "random")
    ]
    return "\n".join(f"- {line}" for line in lines)


def plural(name: str) -> str:
    """Several of what is called so."""
    return f"{name}es" if name.endswith("s") else f"{name}s"


def settings_of(args: Any, name: str | None, settings: Mapping[str, Any] | None) -> str:
    """An optimizer in words: its name, and those of its settings that matter; None: those that the arguments say."""
    title = str(args.optim) if name is None else f"{name} (optim={args.optim})"
    found = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon} if settings is None else settings
    wanted: dict[str, Any] = {key: found[key] for key in ("betas", "momentum", "eps", "alpha") if key in found}
    if args.optim_args:
        wanted["optim_args"] = args.optim_args
    return ", ".join([title, *(f"{key}={plain(value)}" for key, value in wanted.items())])


def history(trainer: HubNames) -> str:
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
