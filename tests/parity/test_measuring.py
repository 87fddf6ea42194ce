"""Measurements of a run, beside those of `transformers.Trainer`: memory, tokens, operations, texts; and NEFTune."""

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification

import paceline

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers_models import bert, gpt2, ids  # noqa: E402

# of transformers, accelerate and what they import
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    yield
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


def samples(num_samples: int = 24) -> list[dict[str, Any]]:
    """Texts of 8 tokens, the last ones of which are padding."""
    generator = torch.Generator().manual_seed(4)
    rows = []
    for index in range(num_samples):
        tokens, mask = ids(generator, 8), (torch.arange(8) < 8 - index % 3).long()
        labels = torch.where(mask.bool(), tokens, -100)
        labels[0] = -100
        rows.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return rows


def make(library: Any, folder: Path, model: Any = None, data: Any = None, **options: Any) -> Any:
    data = samples() if data is None else data
    defaults = {
        "output_dir": str(folder / library.__name__),
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = library.TrainingArguments(**{**defaults, "num_train_epochs": 2, **options})
        return library.Trainer(model=model or gpt2(), args=args, train_dataset=data, eval_dataset=data[:8])


def both(tmp_path: Path, **options: Any) -> tuple[Any, Any]:
    return trained(transformers, tmp_path, **options), trained(paceline, tmp_path, **options)


def trained(library: Any, folder: Path, **options: Any) -> Any:
    """Trained right after it was made: theirs draws the order of the data from the numbers that its seed gives."""
    trainer = make(library, folder, **options)
    trainer.train()
    return trainer


def column(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


NUMBERS = {
    "train_runtime": 3725.126,
    "eval_runtime": 0.999,
    "predict_runtime": 90000.5,
    "total_flos": 3.7e12,
    "train_loss": 0.123456789,
    "epoch": 3.0,
    "eval_samples": 24,
    "init_mem_cpu_alloc_delta": 300_000_000,
    "init_mem_cpu_peaked_delta": -5,
    "text": "abc",
    "eval_accuracy": 1 / 3,
}


def test_metrics_as_text_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, files = [], []
    for library in (transformers, paceline):
        trainer = make(library, tmp_path)
        capsys.readouterr()
        trainer.log_metrics("eval", NUMBERS)
        texts.append(capsys.readouterr().out)
        trainer.save_metrics("eval", NUMBERS)
        trainer.save_metrics("train", {"train_loss": 1.5, "epoch": 4.0})
        trainer.save_metrics("test", {"test_loss": 2.5}, combined=False)
        folder = tmp_path / library.__name__
        files.append({path.name: path.read_text() for path in folder.glob("*_results.json")})
    assert texts[0] == texts[1]
    assert files[0] == files[1]
    assert len(files[1]) == 4
    assert trainer.metrics_format(NUMBERS)["train_runtime"] == "1:02:05.12"


@pytest.mark.parametrize("how", ["all", "non_padding"])
def test_tokens_and_operations(tmp_path: Path, how: str) -> None:
    theirs, ours = both(tmp_path, include_num_input_tokens_seen=how, gradient_accumulation_steps=2)
    assert column(ours, "num_input_tokens_seen") == column(theirs, "num_input_tokens_seen")
    assert ours.state.total_flos == theirs.state.total_flos > 0
    assert [set(row) for row in ours.state.log_history] == [set(row) for row in theirs.state.log_history]
    assert "train_tokens_per_second" in ours.state.log_history[0]


@pytest.mark.slow
@pytest.mark.nightly
def test_memory_of_each_stage(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    keys = []
    for library in (transformers, paceline):
        trainer = make(library, tmp_path, skip_memory_metrics=False, eval_strategy="epoch", num_train_epochs=1)
        trained = trainer.train().metrics
        rows = [trained, trainer.evaluate(), trainer.predict(samples(4)).metrics, *trainer.state.log_history]
        keys.append([{key for key in row if "_mem_" in key} for row in rows])
    assert keys[0] == keys[1]
    assert "before_init_mem_cpu" in keys[1][0]
    assert [len(row) for row in keys[1][:3]] == [5, 2, 2]


def test_time_to_prepare_the_model(tmp_path: Path) -> None:
    before, after = [], []
    for library in (transformers, paceline):
        before.append(set(make(library, tmp_path).evaluate()))
        after.append(set(trained(library, tmp_path).evaluate()))
    assert before[0] == before[1]
    assert after[0] == after[1]
    assert before[1] - after[1] == {"eval_model_preparation_time"}
    trainer = make(paceline, tmp_path)
    assert "test_model_preparation_time" in trainer.predict(samples(4)).metrics
    assert "eval_model_preparation_time" not in trainer.evaluate()  # theirs repeats it, and takes it off the runtime


class Widening(torch.nn.Module):
    """Overflows in the third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Classifier()
        self.calls = 0

    def forward(self, x: Any, labels: Any = None) -> Any:
        self.calls += 1
        return self.inner(x * (torch.inf if self.calls == 3 else 1), labels)


def test_overflows_end_a_training(tmp_path: Path) -> None:
    steps = []
    for library in (transformers, paceline):
        model = Widening()
        data = classification(24)
        trainer = make(library, tmp_path, model, data, debug="underflow_overflow", label_names=["labels"])
        with pytest.raises(ValueError, match="inf"):
            trainer.train()
        steps.append(trainer.state.global_step)
    assert steps == [2, 2]
    assert not any(module._forward_hooks for module in model.modules())


# ---- NEFTune


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


@pytest.mark.parametrize("kind", [gpt2, adapted])
def test_noise_on_embeddings(tmp_path: Path, kind: Any) -> None:
    def seeded() -> Any:  # between two steps theirs draws other numbers than ours
        model, numbers = kind(), itertools.count()
        model.register_forward_pre_hook(lambda module, inputs: torch.manual_seed(next(numbers)) and None)
        return model

    options = {"eval_strategy": "epoch", "num_train_epochs": 1}
    theirs = trained(transformers, tmp_path, model=seeded(), neftune_noise_alpha=5.0, **options)
    ours = trained(paceline, tmp_path, model=seeded(), neftune_noise_alpha=5.0, **options)
    plain = trained(paceline, tmp_path, model=seeded(), **options)
    for name in ("loss", "eval_loss"):
        assert column(ours, name) == pytest.approx(column(theirs, name), rel=1e-5)
    assert column(ours, "loss") != pytest.approx(column(plain, "loss"), rel=1e-3)
    model = ours.model.eval()
    batch = torch.stack([row["input_ids"] for row in samples(2)])
    assert torch.equal(model(batch).logits, model(batch).logits)
    assert not any(module._forward_hooks for module in model.modules() if isinstance(module, torch.nn.Embedding))


def test_noise_goes_on_after_a_restart(tmp_path: Path) -> None:
    options: dict[str, Any] = {"neftune_noise_alpha": 5.0, "save_strategy": "steps", "save_steps": 5}
    whole = make(paceline, tmp_path, bert(), classes(), **options)
    whole.train()
    resumed = make(paceline, tmp_path, bert(seed=3), classes(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "paceline" / "checkpoint-5"))
    assert column(resumed, "loss") == column(whole, "loss")
    for expected, found in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(expected, found)


def classes() -> list[dict[str, Any]]:
    return [
        {"input_ids": row["input_ids"], "labels": torch.tensor(int(row["input_ids"].sum()) % 3)} for row in samples()
    ]


# ---- callbacks and state


class Counter(paceline.TrainerCallback, paceline.ExportableState):
    def __init__(self, limit: int = 3) -> None:
        self.limit, self.count = limit, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"limit": self.limit}, "attributes": {"count": self.count}}


def test_callbacks_as_classes_and_as_objects(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 5, "restore_callback_states_from_checkpoint": True}
    trainer = make(paceline, tmp_path, bert(), classes(), **options)
    trainer.add_callback(Counter)
    trainer.train()
    resumed = make(paceline, tmp_path, bert(), classes(), **options)
    counter = Counter(limit=9)
    resumed.add_callback(counter)
    resumed.train(resume_from_checkpoint=str(tmp_path / "paceline" / "checkpoint-5"))
    assert (counter.limit, counter.count) == (3, resumed.state.global_step)
    assert resumed.pop_callback(Counter) is counter


def test_states_are_read_on_the_other_side(tmp_path: Path) -> None:
    options = {"include_num_input_tokens_seen": "all", "eval_strategy": "epoch"}
    for trainer, library in zip(both(tmp_path, **options), (paceline, transformers), strict=True):
        path = tmp_path / "state.json"
        trainer.state.save_to_json(str(path))
        read = library.TrainerState.load_from_json(str(path))
        for name, value in vars(trainer.state).items():
            if hasattr(read, name):
                assert getattr(read, name) == value, name
        assert read.num_input_tokens_seen == 24 * 2 * 8
        again = tmp_path / "again.json"
        read.save_to_json(str(again))
        assert again.read_text() == path.read_text()
