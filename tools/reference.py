"""The pages docs/reference (a directive for each public name, which Sphinx fills) and docs/options.md."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.args import sections
from paceline.args.option_docs import choices_of, plain_default
from paceline.args.training import TrainingArguments

paceline: Any = importlib.import_module("paceline")
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
OPTIONS = ROOT / "docs" / "options.md"
TRAINING = (
    *("paceline.pytorch.trainer", "paceline.pytorch.seq2seq", "paceline.pytorch.members.trainer"),
    "paceline.pytorch.replay.step",
)
# title, file, what its modules begin with; a name goes to the first that fits
GROUPS = (
    ("Training", "training", (*TRAINING, "paceline.core.outputs")),
    ("Arguments", "arguments", ("paceline.args",)),
    ("Callbacks and state", "callbacks", ("paceline.callbacks", "paceline.core.events", "paceline.core.state")),
    ("Data", "data", ("paceline.pytorch.data",)),
    ("Optimizers and schedules", "optimizers", ("paceline.pytorch.optim",)),
    ("TensorFlow", "tensorflow", ("paceline.tensorflow",)),
    ("Everything else", "others", ("paceline",)),
)
# section -> an example of a file with its options
EXAMPLES = {
    "RunSection": "output_dir: runs/first",
    "TrainSection": "per_device_train_batch_size: 16\nnum_train_epochs: 2",
    "ScheduleSection": "learning_rate: 3.0e-4\nlr_scheduler_type: cosine\nwarmup_steps: 0.1  # of all steps",
    "OptimSection": "optim: adamw_torch_fused\nweight_decay: 0.01",
    "UpdateSection": "gradient_accumulation_steps: 4  # 4 x per_device_train_batch_size samples a step",
    "PrecisionSection": "bf16: true",
    "ActivationSection": "activation_checkpointing: true",
    "CompileSection": "torch_compile: true\ncompile_cache_dir: ~/.cache/compiled",
    "ModelSection": "neftune_noise_alpha: 5",
    "LogSection": "logging_steps: 10\nreport_to: [tensorboard]",
    "EvalSection": "eval_strategy: steps\neval_steps: 500\nper_device_eval_batch_size: 32",
    "MetricSection": "include_for_metrics: [inputs, loss]",
    "SaveSection": "save_strategy: steps\nsave_steps: 500\nsave_total_limit: 3",
    "HubSection": "push_to_hub: true\nhub_model_id: me/my-model\nhub_strategy: checkpoint",
    "BestSection": (
        "eval_strategy: epoch\nsave_strategy: best\nload_best_model_at_end: true\nmetric_for_best_model: accuracy"
    ),
    "ResumeSection": "ignore_data_skip: false  # continue where the data was left",
    "SeedSection": "seed: 7\nfull_determinism: true",
    "EngineSection": "accelerator_config: {split_batches: true}",
    "DataSection": "dataloader_num_workers: 4\ndataloader_prefetch_factor: 2",
    "ParallelSection": "ddp_timeout: 600  # seconds",
    "DebugSection": "debug: underflow_overflow",
    "ScriptSection": "resume_from_checkpoint: 'true'  # the newest",
    "AverageSection": "ema_decay: 0.999",
    "DistillationSection": "teacher: runs/teacher\ndistillation_alpha: 0.7\ndistillation_temperature: 3",
    "PacelineSection": "packing: pack\npacking_length: 1024",
}
INTRODUCTION = """# Options

Every option of `TrainingArguments`: in Python, in the YAML file of `paceline train`, and as a flag
(`--learning_rate 3e-4`). `paceline train --help NAME` prints the ones whose name or text has that word;
`paceline schema` writes a JSON schema by which editors complete and check files. In Python, an editor shows the text of
an option where the mouse is over its name. A value that cannot be honoured is an error that names the option and the
remedy.

```yaml
output_dir: runs/first
learning_rate: 3.0e-4
num_train_epochs: 2
eval_strategy: epoch
```
"""


def pages() -> dict[Path, str]:
    """Every page and its content."""
    names: dict[str, list[str]] = {file: [] for _, file, _ in GROUPS}
    for name, home in sorted(paceline._HOMES.items()):
        names[next(file for _, file, starts in GROUPS if home.startswith(starts))].append(name)
    made = {FOLDER / f"{file}.md": page(title, names[file]) for title, file, _ in GROUPS}
    return {FOLDER / "index.md": index(), **made, OPTIONS: options_page()}


def index() -> str:
    """The page that leads to the others."""
    files = "\n".join(file for _, file, _ in GROUPS)
    return f"# API reference\n\nImport all names from `paceline`.\n\n```{{toctree}}\n{files}\n```\n"


def page(title: str, names: list[str]) -> str:
    """One page: a directive for each name."""
    directives = "\n\n".join(directive(name) for name in names)
    return f"# {title}\n\n```{{eval-rst}}\n.. currentmodule:: paceline\n\n{directives}\n```\n"


def directive(name: str) -> str:
    """Sphinx' directive for a public name."""
    home = importlib.import_module(paceline._HOMES[name])
    item = getattr(home, name)
    if not isinstance(item, type):
        return f".. autofunction:: {name}"
    lines = [f".. autoclass:: {name}"]
    if not issubclass(item, sections.Options | tuple):  # the fields of a named tuple are in its docstring
        lines += ["   :members:", *inherited(item)]
    return "\n".join(lines)


def inherited(item: type) -> list[str]:
    """The option that documents methods of bases which are not public themselves."""
    public = {getattr(importlib.import_module(home), name) for name, home in paceline._HOMES.items()}
    bases = [base for base in item.__mro__[1:] if base.__module__.startswith("paceline")]
    if not bases or any(base in public for base in bases):
        return []
    outside = [base.__name__ for base in item.__mro__ if not base.__module__.startswith("paceline")]
    return [f"   :inherited-members: {', '.join(outside)}"]


def options_page() -> str:
    """The page of all options, by section."""
    fields = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    lines = [INTRODUCTION]
    for owner in vars(sections).values():
        if not isinstance(owner, type) or owner.__module__ != sections.__name__:
            continue
        own = [fields.pop(name) for name in vars(owner).get("__annotations__", {}) if name in fields]
        if own:
            heading = (owner.__doc__ or "").strip().splitlines()[0].rstrip(".")
            lines += [f"## {heading}", "", "```yaml", EXAMPLES[owner.__name__], "```", "", *table(own), ""]
    return "\n".join(lines).rstrip() + "\n"


def table(fields: list[dataclasses.Field[Any]]) -> Iterator[str]:
    """The rows of options: name, default, what it does."""
    yield from ("| option | default | |", "|---|---|---|")
    for field in fields:
        choices = field.metadata.get("choices") or choices_of(field, None)
        text = field.metadata["help"] + (f" One of {', '.join(f'`{each}`' for each in choices)}." if choices else "")
        cells = (f"`{field.name}`", f"`{plain_default(field)!r}`", text.replace("<", "&lt;"))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
