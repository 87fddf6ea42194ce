"""`paceline init TASK [FILE]`: writes a commented configuration for `paceline train`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.errors import UsageError, check_no_option, suggest
from paceline.core.optional import is_installed
from paceline.core.terminal import show

PLACEHOLDER = "MODEL"  # in the place of a model of transformers
HEADER = """\
# {title}
#
#   paceline train {name}
#
# Options of the command line override this file: --learning_rate 1e-4. All of them: paceline train --help WORD.
# For completion in an editor: paceline schema > paceline.schema.json
# yaml-language-server: $schema=paceline.schema.json

"""
ARGUMENTS = """
arguments:
  output_dir: runs/{task}  # checkpoints, log.jsonl, report.html; the same command resumes here
  num_train_epochs: {epochs}  # or max_steps
  per_device_train_batch_size: {batch}  # samples of one forward pass, on each device
  gradient_accumulation_steps: 1   # forward passes of one optimizer step
  learning_rate: {rate}
  lr_scheduler_type: linear        # cosine, constant_with_warmup, ...
  warmup_steps: 0.1                # below 1: a share of all steps
  weight_decay: 0.01
  eval_strategy: epoch             # steps (every eval_steps), no
  save_strategy: epoch             # a checkpoint for each evaluation
  load_best_model_at_end: true
  metric_for_best_model: {best}
  save_total_limit: 2              # checkpoints that are kept
  logging_steps: 10
  # bf16: true                     # mixed precision
  # seed: 42
"""
MODULE = '''\
"""Model and data of {name}."""

import torch
from torch import nn


class Net(nn.Module):
    """Returns the loss if there are labels: the key `loss` is read by the Trainer."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        if labels is None:
            return {{"logits": logits}}
        return {{"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}}


def make_data(size: int = 400):
    """Returns the training and the eval set: dicts with the names of `forward`'s parameters."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 8, generator=generator)
    rows = [{{"x": sample, "labels": int(sample.sum() > 0)}} for sample in x]
    return rows[: size * 3 // 4], rows[size * 3 // 4 :]
'''
# task -> (title, sections, options of `ARGUMENTS`)
TASKS: dict[str, tuple[str, str, dict[str, str]]] = {
    "module": (
        "A module of your own, with your own data",
        """\
model: {{factory: {module}:Net, width: 32}}   # a function or class in {module}.py, and its keyword arguments
data: {module}:make_data                    # returns (train, eval)
metrics: [accuracy, f1]
""",
        {"epochs": "3", "batch": "16", "rate": "1e-2", "best": "accuracy"},
    ),
    "text_classification": (
        "Classification of texts by a model of transformers",
        """\
model: {{path: MODEL, task: sequence_classification, num_labels: 2}}   # a folder, or a name on the hub
data: {{train: train.csv, eval: eval.csv, text_column: text}}          # with the integers 0, 1, ... in a column `label`
metrics: [accuracy, f1]
""",
        {"epochs": "3", "batch": "16", "rate": "2e-5", "best": "f1"},
    ),
    "language_model": (
        "Fine-tuning of a causal language model of transformers on text",
        """\
model: MODEL                       # a folder, or a name on the hub
# model: {{model_type: gpt2, n_layer: 4, n_embd: 256}}    new weights; then give tokenizer: too
data: {{train: corpus.txt, eval_fraction: 0.05, block_size: 512}}   # text, JSONL, CSV or Parquet, cut into blocks
""",
        {"epochs": "1", "batch": "8", "rate": "5e-5", "best": "loss"},
    ),
    "masked_language_model": (
        "Training of a masked language model of transformers on text",
        """\
model: {{path: MODEL, task: masked_lm}}   # a folder, or a name on the hub
data: {{train: corpus.txt, eval_fraction: 0.05, block_size: 256}}   # text, JSONL, CSV or Parquet, cut into blocks
""",
        {"epochs": "1", "batch": "16", "rate": "5e-5", "best": "loss"},
    ),
}

# extra -> the packages of which it needs one
PACKAGES = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "datasets": ("datasets",),
    "metrics": ("sklearn", "torchmetrics"),
}


def run(words: Sequence[str]) -> int:
    """Writes the files and prints the next step. No existing file is overwritten.

    Raises:
        UsageError: an unknown task, a word too many, an option, or a file that exists.
    """
    check_no_option("init", words)
    if not words or len(words) > 2:
        raise UsageError(f"init takes a task ({', '.join(TASKS)}) and a file: paceline init module job.yaml")
    task = words[0].replace("-", "_")
    if task not in TASKS:
        raise UsageError(f"there is no task {words[0]!r}{suggest(task, TASKS)}")
    path = Path(words[1] if len(words) == 2 else f"{task}.yaml")
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{path}: expected a name that ends with .yaml")
    check_name(task, path)
    texts = make_files(task, path)
    for place in texts:  # all of them, before one is written
        if place.exists():
            raise UsageError(f"{place} exists: it is not overwritten; name another file")
    for place, text in texts.items():
        try:
            with place.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise UsageError(f"{place} exists: it is not overwritten; name another file") from None
        except OSError as error:
            raise UsageError(f"{place} cannot be written: {error.strerror or error}") from error
        show(f"wrote {place}")
    missing = missing_extras(task)
    if missing:
        show(f'first: pip install "paceline[{",".join(missing)}]"')
    wanted = "" if task == "module" else " replace MODEL and the files of data, then"
    show(f"next:{wanted} paceline train {path}")
    return 0


def missing_extras(task: str) -> list[str]:
    """Returns the extras that the configuration of a task needs and that are not installed."""
    sections = TASKS[task][1]
    needed = ["torch"] if task == "module" else ["torch", "transformers", "datasets"]
    needed += ["metrics"] if "metrics:" in sections else []
    return [extra for extra in needed if not any(map(is_installed, PACKAGES[extra]))]


def check_name(task: str, path: Path) -> None:
    """Checks that the output folder, and the module of a task with one, can be named after a file.

    Raises:
        UsageError: they cannot.
    """
    pattern = r"[A-Za-z_][A-Za-z0-9_-]*" if task == "module" else r"[\w.-]+"
    if not re.fullmatch(pattern, path.stem):
        allowed = "letters, digits, _ and -" + (", and begin with a letter" if task == "module" else "")
        raise UsageError(f"{path}: the output folder and a module are named after the file: use {allowed}")


def make_files(task: str, path: Path) -> dict[Path, str]:
    """Returns the text of each file of a task: the configuration at `path`, and a module beside it if it needs one."""
    title, sections, options = TASKS[task]
    module = f"{path.stem.replace('-', '_')}_job"
    text = HEADER.format(title=title, name=path.name)
    text += sections.format(module=module) + align_comments(ARGUMENTS.format(task=path.stem, **options))
    files = {path: text}
    if task == "module":
        files[path.with_name(f"{module}.py")] = MODULE.format(name=path.name)
    return files


def align_comments(text: str) -> str:
    """Returns lines of YAML whose comments begin in the same column."""
    lines = [re.fullmatch(r"( *[^ #].*?) +(# .*)", line) or line for line in text.split("\n")]
    width = max(len(line[1]) for line in lines if not isinstance(line, str))
    return "\n".join(line if isinstance(line, str) else f"{line[1]:<{width}}  {line[2]}" for line in lines)
