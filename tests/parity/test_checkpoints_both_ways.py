"""A run that transformers.Trainer began goes on here, and one begun here goes on there."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_but

import paceline
from paceline.pytorch.checkpoint.tensors import load_tensors

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers_models import MODELS, bert, gpt2, ids  # noqa: E402

# of transformers, accelerate and what they import
pytestmark = pytest.mark.filterwarnings("ignore")


def language(num_samples: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    samples = []
    for _ in range(num_samples):
        tokens = ids(generator, 8)
        # the first target is ignored: theirs counts it in the divisor, although nothing predicts it
        samples.append({"input_ids": tokens, "labels": torch.cat([torch.tensor([-100]), tokens[1:]])})
    return samples


# model, data, and accumulation: theirs adds up, instead of averaging, the losses that BERT returns
KINDS: dict[str, tuple[Any, Any, int]] = {"gpt2": (gpt2, language(26), 2), "bert": (bert, MODELS["bert"][1](26), 1)}
STOPS = slow_but(
    [("gpt2", 4), ("bert", 7)],
    [("gpt2", 3), ("gpt2", 4), ("gpt2", 6), ("gpt2", 8), ("bert", 3), ("bert", 7), ("bert", 9)],
)


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    yield
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


def stop_at(library: Any, step: int) -> Any:
    class StopAt(library.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = control.should_training_stop or state.global_step >= step

    return StopAt()


def run(library: Any, folder: Path, kind: str = "gpt2", *, stop: int | None = None, **options: Any) -> Any:
    """Train 26 samples in batches of 4: 7 micro-batches an epoch, 4 updates of two where there is accumulation."""
    make, data, accumulation = KINDS[kind]
    resume, dropout = options.pop("resume", None), options.pop("dropout", 0.0)
    for_trainer = {name: options.pop(name) for name in ("callbacks", "eval_dataset", "optimizers") if name in options}
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 3,
    }
    callbacks = [*for_trainer.pop("callbacks", []), *([stop_at(library, stop)] if stop else [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = library.Trainer(
            model=make(dropout=dropout),
            args=library.TrainingArguments(**{**defaults, **options}),
            train_dataset=data,
            callbacks=callbacks,
            **for_trainer,
        )
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def flat(trainer: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def column(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def assert_alike(first: Any, second: Any, start: int = 0) -> None:
    assert first.state.global_step == second.state.global_step
    assert first.state.epoch == pytest.approx(second.state.epoch)
    for name in ("loss", "grad_norm", "learning_rate", "epoch", "step"):
        theirs, ours = column(first, name), column(second, name)
        assert len(theirs) == len(ours), name
        # transformers rounds what it logs
        assert theirs[start:] == pytest.approx(ours[start:], rel=2e-3, abs=2e-4), name
    assert torch.allclose(flat(first), flat(second), rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stop"), STOPS)
def test_theirs_goes_on_here(tmp_path: Path, kind: str, stop: int) -> None:
    whole = run(transformers, tmp_path / "whole", kind)
    run(transformers, tmp_path / "parts", kind, stop=stop)
    assert_alike(whole, run(paceline, tmp_path / "parts", kind, resume=True))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stop"), STOPS)
def test_ours_goes_on_there(tmp_path: Path, kind: str, stop: int) -> None:
    whole = run(paceline, tmp_path / "whole", kind)
    run(paceline, tmp_path / "parts", kind, stop=stop)
    assert_alike(
        whole, run(transformers, tmp_path / "parts", kind, resume=str(tmp_path / "parts" / f"checkpoint-{stop}"))
    )


@pytest.mark.slow
def test_back_and_forth(tmp_path: Path) -> None:
    whole = run(paceline, tmp_path / "whole")
    run(transformers, tmp_path / "parts", stop=3)
    run(paceline, tmp_path / "parts", stop=6, resume=True)
    run(transformers, tmp_path / "parts", stop=9, resume=True)
    assert_alike(whole, run(paceline, tmp_path / "parts", resume=True))


def test_random_numbers_go_on(tmp_path: Path) -> None:
    """Dropout of the epoch in progress is drawn as there it would have been."""
    whole = run(transformers, tmp_path / "whole", dropout=0.2, num_train_epochs=1)
    run(transformers, tmp_path / "parts", dropout=0.2, num_train_epochs=1, stop=2)
    assert_alike(whole, run(paceline, tmp_path / "parts", dropout=0.2, num_train_epochs=1, resume=True))


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "accumulation"), [(2, 4), (8, 1), (2, 1)])
@pytest.mark.parametrize("stop", [2, 4, 5])
def test_another_split_of_their_epoch(tmp_path: Path, batch_size: int, accumulation: int, stop: int) -> None:
    """Their checkpoint counts steps; the place in the data is found in samples."""
    run(transformers, tmp_path, stop=stop, num_train_epochs=2)
    seen: list[tuple[int, ...]] = []

    class Seen(paceline.TrainerCallback):
        wants = frozenset({"inputs"})

        def on_step_end(self, args: Any, state: Any, control: Any, inputs: Any = None, **kwargs: Any) -> None:
            if state.epoch <= 1 or stop >= 4:
                seen.extend(tuple(row.tolist()) for batch in inputs for row in batch["input_ids"])

    run(
        paceline,
        tmp_path,
        resume=True,
        callbacks=[Seen()],
        num_train_epochs=1 if stop < 4 else 2,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
    )
    samples = [tuple(sample["input_ids"].tolist()) for sample in language(26)]
    epoch, consumed = divmod(stop, 4)
    order = torch.randperm(26, generator=torch.Generator().manual_seed(42 + epoch)).tolist()
    assert sorted(seen) == sorted(samples[index] for index in order[8 * consumed :])


def test_their_shards_and_scaler(tmp_path: Path) -> None:
    run(transformers, tmp_path, stop=3)
    checkpoint = tmp_path / "checkpoint-3"
    model = transformers.GPT2LMHeadModel.from_pretrained(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    model.save_pretrained(checkpoint, max_shard_size="8KB")
    assert not (checkpoint / "model.safetensors").exists()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=10_000)
    torch.save(scaler.state_dict(), checkpoint / "scaler.pt")
    resumed = run(paceline, tmp_path, resume=True, fp16=True, stop=4)
    assert resumed.state.global_step == 4
    assert load_tensors(tmp_path / "checkpoint-4" / "scaler.pt")["scale"] == 64.0
    assert column(resumed, "step")[:4] == [1, 2, 3, 4]


def test_patience_goes_on(tmp_path: Path) -> None:
    """A callback's state in their trainer_state.json, and one in ours, read on the other side."""
    options: dict[str, Any] = {
        "eval_dataset": language(4),
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that it never gets better
        "restore_callback_states_from_checkpoint": True,
    }
    for first, second in ((transformers, paceline), (paceline, transformers)):
        folder = tmp_path / first.__name__
        patient = first.EarlyStoppingCallback(early_stopping_patience=7)
        run(first, folder, stop=5, callbacks=[patient], **options)
        saved = json.loads((folder / "checkpoint-5" / "trainer_state.json").read_text())
        assert saved["stateful_callbacks"]["EarlyStoppingCallback"]["args"]["early_stopping_patience"] == 7
        counted = saved["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"]["early_stopping_patience_counter"]
        patient = second.EarlyStoppingCallback(early_stopping_patience=7)
        resumed = run(second, folder, callbacks=[patient], resume=str(folder / "checkpoint-5"), **options)
        assert counted > 0
        assert resumed.state.global_step == 5 + 7 - counted


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_ours_is_a_model_for_them(tmp_path: Path, kind: str) -> None:
    trainer = run(paceline, tmp_path, kind, stop=2)
    loaded = type(trainer.model).from_pretrained(tmp_path / "checkpoint-2")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
