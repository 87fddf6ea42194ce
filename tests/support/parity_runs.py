"""Makes the runs of parity_table.py in either library, and names what differs between two of them."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from parity_table import ADDED_FILES, CONFIGURATIONS, Configuration
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import RandomSampler
from transformers_models import MODELS, bart, ids

import paceline
from paceline.core.events import EVENTS

SPEEDS = ("_runtime", "_per_second")  # of this machine


def language(num_samples: int, width: Any = 8) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    samples = []
    for index in range(num_samples):
        tokens = ids(generator, width if isinstance(width, int) else width(index))
        # the first target is ignored: theirs counts it in the divisor, although nothing predicts it
        labels = torch.cat([torch.tensor([-100]), tokens[1:]])
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def all_tokens(num_samples: int) -> list[dict[str, Any]]:
    return [{**sample, "labels": sample["input_ids"]} for sample in language(num_samples, lambda n: 4 + 2 * (n % 3))]


def classes(num_samples: int) -> list[dict[str, Any]]:
    return list(MODELS["bert"][1](num_samples))


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Samples without a length."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(classes(24))


class Poisoned(nn.Module):
    """A classifier of token ids whose loss is not a number in one forward pass of its training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(31, 3)
        self.num_passes = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.table(input_ids).mean(1)
        loss = nn.functional.cross_entropy(logits, labels)
        self.num_passes += self.training
        return {"loss": loss * float("nan") if self.num_passes == 3 else loss, "logits": logits}


class Plain(nn.Module):
    """A classifier of token ids that returns the mean over its batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(31, 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.table(input_ids).mean(1)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Bare(Plain):
    """The same, without a loss."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        logits: Tensor = self.table(input_ids).mean(1)
        return logits


MAKERS: dict[str, Any] = {
    **{name: maker for name, (maker, _) in MODELS.items()},
    "bart": bart,
    "plain": Plain,
    "bare": Bare,
    "poisoned": Poisoned,
}
DATA: dict[str, Any] = {
    "language": lambda: language(24),
    "ragged language": lambda: language(30, lambda index: 3 + index % 7),
    "all tokens": lambda: all_tokens(24),
    "classes": lambda: classes(24),
    "ragged classes": lambda: classes(22),
    "translations": lambda: MODELS["t5"][1](16),
    "stream": Stream,
}


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(sample["input_ids"]) for sample in samples)
    pads = [width - len(sample["input_ids"]) for sample in samples]
    fill, ones = nn.functional.pad, torch.ones_like
    pairs = list(zip(samples, pads, strict=True))
    return {
        "input_ids": torch.stack([fill(sample["input_ids"], (0, n)) for sample, n in pairs]),
        "attention_mask": torch.stack([fill(ones(sample["input_ids"]), (0, n)) for sample, n in pairs]),
        "labels": torch.stack([fill(sample["labels"], (0, n), value=-100) for sample, n in pairs]),
    }


def scores() -> Any:
    values = iter([0.3, 0.7, 0.5, 0.9, 0.1, 0.2])
    return lambda prediction: {"score": next(values)}


def batch_metrics() -> Any:
    seen: list[float] = []

    def compute(prediction: Any, compute_result: bool = False) -> dict[str, float]:
        seen.extend((prediction.predictions.argmax(-1) == prediction.label_ids).float().tolist())
        metrics = {"accuracy": sum(seen) / len(seen), "rows": float(len(seen))}
        if compute_result:
            seen.clear()
        return metrics

    return compute


def text_metrics(prediction: Any) -> dict[str, float]:
    """Of generated token ids: how many are the target's, and their mean length."""
    rows = [set(row[row > 1].tolist()) for row in prediction.predictions]
    targets = [set(row[row > 1].tolist()) for row in prediction.label_ids]
    shared = sum(len(row & target) for row, target in zip(rows, targets, strict=True))
    return {
        "recall": shared / sum(map(len, targets)),
        "length": float((prediction.predictions > 1).sum()) / len(rows),
    }


def cross_entropy(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels)


def in_our_order(trainer: type) -> type:
    """Theirs draws the order of lengths on the global generator; here it draws from one seeded as ours is."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    class Seeded(trainer):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            generator = torch.Generator().manual_seed(42)
            return LengthGroupedSampler(4, dataset=self.train_dataset, generator=generator)

    return Seeded


def in_an_order_without_a_seed(trainer: type) -> type:
    """A sampler of torch that draws from the global generator."""

    class Unseeded(trainer):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return RandomSampler(self.train_dataset)

    return Unseeded


def mask(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Only some places have a label, drawn from the global generator."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    chosen = torch.bernoulli(torch.full(batch["labels"].shape, 0.5)).bool()
    return {**batch, "labels": batch["labels"].masked_fill(~chosen, -100)}


def recorder(base: type, stop: int = 0) -> Any:
    """A callback of either library that notes the events, and what they were given; it ends the run at `stop`."""

    def note(event: str) -> Any:
        def method(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            given = tuple(sorted(set(kwargs) & {"logs", "metrics"}))
            self.events.append((event, state.global_step, state.epoch and round(state.epoch, 6), given))
            if event == "on_step_end" and stop and state.global_step >= stop:
                control.should_training_stop = True

        return method

    import transformers

    body = {event: note(event) for event in EVENTS if hasattr(transformers.TrainerCallback, event)}
    callback = type("Recorder", (base,), body)()
    callback.events = []
    return callback


def train(library: Any, folder: Path, run: Configuration, *, resume: str | bool | None = None, stop: int = 0) -> Any:
    """One run of one library. Returns its trainer, with the `events` it saw."""
    is_seq2seq, data = "seq2seq" in run.extras, DATA[run.data]()
    held_out = (data if isinstance(data, list) else classes(8))[: 9 if "ragged" in run.data else 8]
    options = {
        "output_dir": str(folder),
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        **run.options,
        **(run.options_before if stop else {}),
    }
    callbacks = [recorder(library.TrainerCallback, stop)]
    parts: dict[str, Any] = {}
    if "early stopping" in run.extras and not stop:
        callbacks.append(library.EarlyStoppingCallback(early_stopping_patience=1))
    if "loss function" in run.extras:
        parts["compute_loss_func"] = cross_entropy
    if "pad" in run.extras:
        parts["data_collator"] = pad
    if "masks" in run.extras:
        parts["data_collator"] = mask
    if "evaluation sets" in run.extras:
        held_out = {"first": held_out[:4], "second": held_out[4:]}
    if metrics := {"scores", "batch metrics", "text metrics"} & set(run.extras):
        parts["compute_metrics"] = {
            "scores": scores,
            "batch metrics": batch_metrics,
            "text metrics": lambda: text_metrics,
        }[metrics.pop()]()
    trainer_class = library.Seq2SeqTrainer if is_seq2seq else library.Trainer
    if "seeded order" in run.extras and library is not paceline:
        trainer_class = in_our_order(trainer_class)
    if "unseeded order" in run.extras:
        trainer_class = in_an_order_without_a_seed(trainer_class)
    arguments_class = library.Seq2SeqTrainingArguments if is_seq2seq else library.TrainingArguments
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer = trainer_class(
                model=MAKERS[run.model](),
                args=arguments_class(**options),
                train_dataset=data,
                eval_dataset=held_out,
                callbacks=callbacks,
                **parts,
            )
            trainer.train(resume_from_checkpoint=resume)
        except (AttributeError, KeyError, RuntimeError, SafetensorError) as error:
            if library is paceline:
                raise
            return SimpleNamespace(error=type(error).__name__)
        trainer.events, trainer.error = callbacks[0].events, None
        trainer.predicted = tuple(trainer.predict(held_out).predictions.shape) if "predict" in run.extras else None
    return trainer


def make_both(folder: Path, name: str) -> tuple[Any, Any]:
    """The two runs of a configuration: theirs, ours."""
    import transformers

    run = CONFIGURATIONS[name]
    libraries = {"theirs": transformers, "ours": paceline}
    if run.written_by:
        train(libraries[run.written_by], folder / "before", run, stop=run.stop)
    trainers = []
    for side, library in libraries.items():
        resume: str | bool | None = None
        if run.written_by:  # each goes on in a folder of its own
            shutil.copytree(folder / "before", folder / side)
            resume = str(folder / side / f"checkpoint-{run.stop}")
        if "cut short" in run.extras:
            resume, weights = True, folder / side / f"checkpoint-{run.stop}" / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:1000])
        trainers.append(train(library, folder / side, run, resume=resume))
    return trainers[0], trainers[1]


# ---- what differs


def close(expected: Any, found: Any) -> bool:
    if isinstance(expected, Tensor):
        return expected.shape == found.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        return isinstance(found, int | float) and bool(
            torch.isclose(torch.tensor(float(found)), torch.tensor(float(expected)), rtol=1e-5, atol=1e-9).item()
        )
    return bool(expected == found)


def different_rows(theirs: Any, ours: Any) -> set[str]:
    first, second = theirs.state.log_history, ours.state.log_history
    if [row["step"] for row in first] != [row["step"] for row in second]:
        return {"log: rows"}
    found = set()
    for expected, row in zip(first, second, strict=True):
        found |= {f"log: {key} only there" for key in expected.keys() - row.keys()}
        found |= {f"log: {key} only here" for key in row.keys() - expected.keys()}
        shared = [key for key in expected.keys() & row.keys() if not key.endswith(SPEEDS)]
        found |= {f"log: {key}" for key in shared if not close(expected[key], row[key])}
    return found


def different_weights(theirs: Any, ours: Any) -> set[str]:
    pairs = zip(theirs.model.named_parameters(), ours.model.parameters(), strict=True)
    same = all(close_weights(name, expected.detach(), found.detach()) for (name, expected), found in pairs)
    return set() if same else {"weights"}


def close_weights(name: str, expected: Tensor, found: Tensor) -> bool:
    """True if two weights are equal. Biases of keys are left out: their gradient is rounding, which Adam normalizes."""
    if name.endswith(("key.bias", "k_proj.bias")):
        return True
    if name.endswith("c_attn.bias"):
        expected, found = (torch.cat([bias.chunk(3)[0], bias.chunk(3)[2]]) for bias in (expected, found))
    return close(expected, found)


def different_state(theirs: Any, ours: Any) -> set[str]:
    names = ("global_step", "max_steps", "epoch", "best_metric", "best_global_step", "num_train_epochs", "total_flos")
    values = [(name, getattr(theirs.state, name), getattr(ours.state, name)) for name in names]
    found = {f"state: {name}" for name, expected, value in values if not close(expected, value)}
    folders = [trainer.state.best_model_checkpoint for trainer in (theirs, ours)]
    if [Path(folder).name if folder else None for folder in folders[:1]] != [
        Path(folder).name if folder else None for folder in folders[1:]
    ]:
        found.add("state: best_model_checkpoint")
    return found


def checkpoint_files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and any(part.startswith("checkpoint-") for part in path.relative_to(folder).parts)
    }


def different_files(theirs: Path, ours: Path) -> set[str]:
    """Of the checkpoints: names, and what is in them."""
    first, second = checkpoint_files(theirs), checkpoint_files(ours)
    folders = [{Path(name).parent.as_posix() for name in names} for names in (first, second)]
    found = {f"files: {name} only there" for name in folders[0] - folders[1]}
    found |= {f"files: {name} only here" for name in folders[1] - folders[0]}
    both = folders[0] & folders[1]
    there, here = ({name for name in names if Path(name).parent.as_posix() in both} for names in (first, second))
    found |= {f"files: {name} only there" for name in there - here}
    found |= {
        f"files: {name} only here" for name in here - there if Path(name).name not in {*ADDED_FILES, "uncommitted.diff"}
    }
    for name in sorted(first & second):
        compare = CONTENT.get(Path(name).name)
        if compare and not compare(theirs / name, ours / name):
            found.add(f"files: {Path(name).name}")
    return found


def same_weights(theirs: Path, ours: Path) -> bool:
    from safetensors.torch import load_file

    expected, found = load_file(theirs), load_file(ours)
    return expected.keys() == found.keys() and all(
        close_weights(key, value, found[key]) for key, value in expected.items()
    )


def same_optimizer(theirs: Path, ours: Path) -> bool:
    """The same groups of the same options, and the same state of every parameter."""
    expected, found = (torch.load(path, weights_only=True) for path in (theirs, ours))
    groups = [
        [{**group, "params": len(group["params"])} for group in state["param_groups"]] for state in (expected, found)
    ]
    return (
        groups[0] == groups[1]
        and expected["state"].keys() == found["state"].keys()
        and all(expected["state"][key].keys() == found["state"][key].keys() for key in expected["state"])
    )


def same_schedule(theirs: Path, ours: Path) -> bool:
    expected, found = (torch.load(path, weights_only=True) for path in (theirs, ours))
    for state in (expected, found):  # of functions nothing is kept: None here, an empty dict there
        state["lr_lambdas"] = [kept or None for kept in state.get("lr_lambdas", [])]
    return all(close(value, found.get(key)) for key, value in expected.items() if not key.startswith("_"))


def same_state(theirs: Path, ours: Path) -> bool:
    """Both libraries read both files, and find the same names."""
    import transformers

    for path in (theirs, ours):
        steps = {library.TrainerState.load_from_json(str(path)).global_step for library in (transformers, paceline)}
        if len(steps) != 1:
            return False
    expected, found = json.loads(theirs.read_text()), json.loads(ours.read_text())
    return bool(expected.keys() <= found.keys())


CONTENT = {
    "model.safetensors": same_weights,
    "optimizer.pt": same_optimizer,
    "scheduler.pt": same_schedule,
    "trainer_state.json": same_state,
}


def differences(folder: Path, theirs: Any, ours: Any) -> set[str]:
    """Everything in which two runs differ, in words that the table of configurations uses."""
    if theirs.error:
        return {f"error there: {theirs.error}"}
    found = different_rows(theirs, ours) | different_weights(theirs, ours) | different_state(theirs, ours)
    found |= different_files(folder / "theirs", folder / "ours")
    found |= {"rows predicted"} if theirs.predicted != ours.predicted else set()
    return found | ({"events"} if theirs.events != ours.events else set())
