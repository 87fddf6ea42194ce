"""The same run in `transformers.Trainer` and here: the same losses, rates, rows, events and files."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier

import paceline
from paceline.core.events import EVENTS

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers_models import MODELS, ids  # noqa: E402

# of transformers, accelerate and what they import
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    yield
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


def language(num_samples: int, width: Any = 8) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    samples = []
    for index in range(num_samples):
        tokens = ids(generator, width if isinstance(width, int) else width(index))
        # the first target is ignored: theirs counts it in the divisor, although nothing predicts it
        labels = torch.cat([torch.tensor([-100]), tokens[1:]])
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def classes(num_samples: int) -> list[dict[str, Any]]:
    return list(MODELS["bert"][1](num_samples))


def recorder(base: type) -> Any:
    """A callback of either library that notes the events, and what they were given."""

    def note(event: str) -> Any:
        def method(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            given = tuple(sorted(set(kwargs) & {"logs", "metrics"}))
            self.events.append((event, state.global_step, state.epoch and round(state.epoch, 6), given))

        return method

    body = {event: note(event) for event in EVENTS if hasattr(transformers.TrainerCallback, event)}
    callback = type("Recorder", (base,), body)()
    callback.events = []
    return callback


def run(library: Any, folder: Path, kind: str, options: dict[str, Any], cls: Any = None) -> Any:
    options = dict(options)
    trainer_options = {name: options.pop(name) for name in ("compute_metrics", "data_collator") if name in options}
    data, resume = options.pop("data"), options.pop("resume", None)
    defaults = {
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
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callback = recorder(library.TrainerCallback)
        trainer = (cls or library.Trainer)(
            model=MODELS[kind][0](),
            args=library.TrainingArguments(**{**defaults, **options}),
            train_dataset=data,
            eval_dataset=data[:8],
            callbacks=[callback],
            **trainer_options,
        )
        trainer.events = callback.events
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def metric() -> Any:
    values = iter([0.3, 0.7, 0.5, 0.9, 0.1, 0.2])
    return lambda prediction: {"score": next(values)}


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "score", "save_total_limit": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("gpt2", {"data": language(24)}),
    "classifier": ("bert", {"data": classes(24)}),
    "partial last batch": ("bert", {"data": classes(22), "warmup_steps": 0.2, "lr_scheduler_type": "cosine"}),
    "accumulation": ("gpt2", {"data": language(24), "gradient_accumulation_steps": 3, "weight_decay": 0.1}),
    "accumulation with a partial window": ("gpt2", {"data": language(24), "gradient_accumulation_steps": 4}),
    "by epochs, best": (
        "bert",
        {"data": classes(24), "eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch", **BEST},
    ),
    "by steps, best": (
        "bert",
        {
            "data": classes(24),
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 4,
            "logging_steps": 3,
            **BEST,
        },
    ),
    "save the best": (
        "bert",
        {"data": classes(24), "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", **BEST},
    ),
    "label smoothing": ("gpt2", {"data": language(24), "label_smoothing_factor": 0.2, "eval_strategy": "epoch"}),
    "max_steps": ("gpt2", {"data": language(24), "max_steps": 15, "eval_strategy": "steps", "eval_steps": 4}),
    "fractional epochs": ("gpt2", {"data": language(24), "num_train_epochs": 1.5, "eval_strategy": "epoch"}),
    "ratios": (
        "gpt2",
        {"data": language(24), "eval_strategy": "steps", "eval_steps": 0.25, "logging_steps": 0.1, "warmup_steps": 0.1,
         "logging_first_step": True},
    ),
    "start and delay": (
        "gpt2",
        {"data": language(24), "eval_strategy": "epoch", "eval_on_start": True, "eval_delay": 2, "max_grad_norm": 0.1},
    ),
    "sgd, constant": (
        "bert",
        {"data": classes(24), "optim": "sgd", "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
    ),
    "adafactor": ("bert", {"data": classes(24), "optim": "adafactor"}),
    "plateau": (
        "bert",
        {"data": classes(24), "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0},
         "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"},
    ),
    "drop last": ("bert", {"data": classes(22), "dataloader_drop_last": True}),
    "data seed": ("bert", {"data": classes(24), "data_seed": 3}),
}  # fmt: skip

SPEEDS = ("_runtime", "_per_second")  # of this machine


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(sample["input_ids"]) for sample in samples)
    pads = [width - len(sample["input_ids"]) for sample in samples]
    fill = torch.nn.functional.pad
    return {
        "input_ids": torch.stack([fill(s["input_ids"], (0, n)) for s, n in zip(samples, pads, strict=True)]),
        "attention_mask": torch.stack(
            [fill(torch.ones_like(s["labels"]), (0, n)) for s, n in zip(samples, pads, strict=True)]
        ),
        "labels": torch.stack([fill(s["labels"], (0, n), value=-100) for s, n in zip(samples, pads, strict=True)]),
    }


def both(tmp_path: Path, case: str) -> tuple[Any, Any]:
    kind, options = CASES[case]
    scored = {"compute_metrics": metric()} if "load_best_model_at_end" in options else {}
    theirs = run(transformers, tmp_path / "theirs", kind, {**options, **scored})
    scored = {"compute_metrics": metric()} if scored else {}
    ours = run(paceline, tmp_path / "ours", kind, {**options, **scored})
    return theirs, ours


def check_rows(theirs: Any, ours: Any) -> None:
    assert [set(row) for row in ours.state.log_history] == [set(row) for row in theirs.state.log_history]
    for expected, found in zip(theirs.state.log_history, ours.state.log_history, strict=True):
        for key, value in expected.items():
            if not key.endswith(SPEEDS):
                assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-12), (key, expected, found)


def check_weights(theirs: Any, ours: Any) -> None:
    for (name, expected), found in zip(theirs.model.named_parameters(), ours.model.parameters(), strict=True):
        if not name.endswith("key.bias"):  # whose gradient is zero, but for rounding, which Adafactor normalises
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_the_same_run(tmp_path: Path, case: str) -> None:
    theirs, ours = both(tmp_path, case)
    check_rows(theirs, ours)
    check_weights(theirs, ours)
    assert ours.events == theirs.events
    names = ["global_step", "max_steps", "epoch", "best_metric", "num_train_epochs"]
    if CASES[case][1].get("save_strategy", "no") != "no":  # without checkpoints theirs does not note the best step
        names.append("best_global_step")
    for name in names:
        assert getattr(ours.state, name) == pytest.approx(getattr(theirs.state, name)), name
    files = [
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and "checkpoint-" in str(path)}
        for folder in (tmp_path / "theirs", tmp_path / "ours")
    ]
    more = {path for path in files[1] - files[0]}
    assert files[0] <= files[1]
    assert {Path(path).name for path in more} <= {"manifest.json", "progress.json"}
    states = [getattr(t.state, "best_model_checkpoint", None) for t in (theirs, ours)]
    assert [s and Path(s).name for s in states] == [states[0] and Path(states[0]).name] * 2


def test_grouped_by_length(tmp_path: Path) -> None:
    """Theirs draws the order on the global generator; here both draw from one seeded alike."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    class Seeded(transformers.Trainer):  # type: ignore[misc, name-defined]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            generator = torch.Generator().manual_seed(42)
            return LengthGroupedSampler(4, dataset=self.train_dataset, generator=generator)

    data = language(60, lambda index: 3 + index % 7)
    options = {
        "data": data,
        "train_sampling_strategy": "group_by_length",
        "data_collator": pad,
        "num_train_epochs": 1,
    }
    theirs = run(transformers, tmp_path / "theirs", "gpt2", options, Seeded)
    check_rows(theirs, run(paceline, tmp_path / "ours", "gpt2", options))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("to_ours", [True, False], ids=["theirs to ours", "ours to theirs"])
def test_a_checkpoint_goes_on_in_the_other(tmp_path: Path, kind: str, to_ours: bool) -> None:
    """Weights, optimizer, schedule, state and the place in the data."""
    data = language(24) if kind == "gpt2" else classes(24)
    options = {"data": data, "save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 1}
    first, second = (transformers, paceline) if to_ours else (paceline, transformers)
    whole = run(first, tmp_path / "whole", kind, options)
    moved = run(second, tmp_path / "moved", kind, {**options, "resume": str(tmp_path / "whole" / "checkpoint-8")})
    assert moved.state.global_step == whole.state.global_step == 12
    check_weights(whole, moved)
    rows = [[row for row in t.state.log_history if "loss" in row] for t in (whole, moved)]
    assert [row["step"] for row in rows[1]] == list(range(1, 13))
    for expected, found in zip(*rows, strict=True):
        for key in expected:
            assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-12), (key, expected, found)


def test_a_plain_module_with_equal_batches(tmp_path: Path) -> None:
    """Where their mean of means is the mean."""
    from small_models import classification

    data, found = classification(24), []
    for library in (transformers, paceline):
        args = library.TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = library.Trainer(model=Classifier(), args=args, train_dataset=data, eval_dataset=data)
        trainer.train()
        found.append(([r["loss"] for r in trainer.state.log_history if "loss" in r], trainer.evaluate()["eval_loss"]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-5)
