"""The cache of a teacher's logits: the run without it to the bit, resume, damage, interrupts, and what is refused."""

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from taught_models import Net, Rows, bert, gpt2, rows, sentences
from torch import Tensor, nn

from paceline import Trainer, TrainingArguments, UnsupportedOption
from paceline.pytorch.checkpoint.tensors import CheckpointError
from paceline.pytorch.distillation import cache as distillation_cache
from paceline.pytorch.distillation.store import LogitStore, Sample
from paceline.pytorch.model.row_checks import row_checks


class Counting(nn.Module):
    """A teacher whose logits are sums of a sample's own numbers, in one order: the same to the bit in any batch."""

    def __init__(self, factor: float = 3.0, num_classes: int = 4) -> None:
        super().__init__()
        self.factor, self.num_classes = factor, num_classes
        self.weight = nn.Parameter(torch.linspace(-1, 1, num_classes))
        self.num_rows = 0
        self.interrupts = False

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        self.num_rows += len(x)
        if self.interrupts and 100 <= self.num_rows < 105:
            os.kill(os.getpid(), signal.SIGINT)
        return x[:, : self.num_classes] * self.factor + self.weight


def train(
    folder: Path, teacher: Any, data: Any = None, model: Any = None, resume: Any = False, stop: Any = None, **given: Any
) -> tuple[Any, Rows]:
    collator = given.pop("collator", None)
    options: dict[str, Any] = {
        "max_steps": 12, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 2, "save_strategy": "steps",
        "save_steps": 1, "logging_steps": 1, "learning_rate": 0.05, "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    watch = Rows(stop)
    trainer = Trainer(
        model or Net(0),
        TrainingArguments(str(folder), **{**options, **given}),
        train_dataset=rows(150) if data is None else data,
        teacher=teacher,
        callbacks=[watch],
        data_collator=collator,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, watch


def weights(trainer: Any) -> Tensor:
    return torch.cat([part.detach().flatten() for part in trainer.model.parameters()])


def losses(watch: Rows) -> list[Any]:
    return [(row["loss"], row["distillation_loss"], row["hard_loss"]) for row in watch.rows if "loss" in row]


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/part-*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"distillation_top_k": 2}, {"distillation_alpha": 1.0}], ids=str)
def test_a_run_with_a_cache_equals_the_one_without_it_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    plain, seen = train(tmp_path / "plain", Counting(), **options)
    teacher = Counting()
    cached, found = train(tmp_path / "cached", teacher, distillation_cache=str(tmp_path / "cache"), **options)
    assert torch.equal(weights(plain), weights(cached))
    assert losses(seen) == losses(found)
    assert len(parts(tmp_path / "cache")) == 3
    asked = teacher.num_rows
    assert asked < 150 + 12  # each sample once, and a few of the first batch alone
    again, found = train(tmp_path / "again", teacher, distillation_cache=str(tmp_path / "cache"), **options)
    assert teacher.num_rows - asked < 12
    assert torch.equal(weights(plain), weights(again))
    assert teacher.training


@pytest.mark.parametrize(("kind", "top_k"), [("gpt2", None), ("bert", 5)])
def test_language_models_have_the_losses_without_a_cache(tmp_path: Path, kind: str, top_k: int | None) -> None:
    make = {"gpt2": gpt2, "bert": bert}[kind]
    data = [{name: value[: int(row["attention_mask"].sum())] for name, value in row.items()} for row in sentences(14)]
    # not Adam, which turns the rounding of gradients that are zero in theory, of the bias of keys, into whole steps
    given = {
        "distillation_top_k": top_k, "max_steps": 6, "per_device_train_batch_size": 3, "collator": pad, "optim": "sgd",
    }  # fmt: skip
    plain, seen = train(tmp_path / "a", make(1), data, make(0), **given)
    cached, found = train(tmp_path / "b", make(1), data, make(0), distillation_cache=str(tmp_path / "c"), **given)
    torch.testing.assert_close(torch.tensor(losses(found)), torch.tensor(losses(seen)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights(cached), weights(plain), rtol=1e-4, atol=1e-5)


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pads on the right, as far as the batch needs it."""
    filling = {"input_ids": 9, "attention_mask": 0, "labels": -100}
    return {
        name: nn.utils.rnn.pad_sequence([row[name] for row in samples], batch_first=True, padding_value=value)
        for name, value in filling.items()
    }


@pytest.mark.parametrize("step", range(1, 12))
def test_a_resume_from_each_step_is_exact(tmp_path_factory: Any, step: int, straight: Any) -> None:
    folder, expected, rest = straight
    own = tmp_path_factory.mktemp("resumed")
    shutil.copytree(folder / f"checkpoint-{step}", own / f"checkpoint-{step}")
    resumed, found = train(own, Counting(), distillation_cache=str(folder.parent / "cache"), resume=True)
    assert torch.equal(weights(resumed), expected)
    assert losses(found) == rest[step:]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("straight") / "run"
    trainer, watch = train(folder, Counting(), distillation_cache=str(folder.parent / "cache"))
    return folder, weights(trainer), losses(watch)


def cached(tmp_path: Path, teacher: Any = None, **given: Any) -> Any:
    options: dict[str, Any] = {"max_steps": 3, "save_strategy": "no", **given}
    made = Counting() if teacher is None else teacher
    trainer, _ = train(tmp_path / "run", made, distillation_cache=str(tmp_path / "cache"), **options)
    return weights(trainer)


@pytest.mark.slow
def test_a_damaged_file_is_made_again_or_refused_and_never_used(tmp_path: Path) -> None:
    expected = cached(tmp_path)
    files = parts(tmp_path / "cache")
    whole = files[0].read_bytes()
    for broken in (b"", b"\0" * 100, b"{}" * 9, whole[:-1], whole[: len(whole) // 2], files[1].read_bytes()):
        files[0].write_bytes(broken)
        assert torch.equal(cached(tmp_path), expected)
        assert files[0].read_bytes() == whole
    generator = torch.Generator().manual_seed(0)
    longer = cached(tmp_path, max_steps=15)  # reads each sample
    for _ in range(4):  # one byte, anywhere
        where = int(torch.randint(len(whole), (1,), generator=generator))
        files[0].write_bytes(whole[:where] + bytes([whole[where] ^ 0x55]) + whole[where + 1 :])
        found = None
        with contextlib.suppress(CheckpointError):  # damaged, found when a sample is read
            found = cached(tmp_path, max_steps=15)
        assert files[0].exists() == (found is not None)
        assert found is None or torch.equal(found, longer)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)


@pytest.mark.slow
def test_what_the_values_depend_on_has_a_cache_of_its_own(tmp_path: Path) -> None:
    cached(tmp_path)
    other = Counting()
    with torch.no_grad():
        other.weight[0] += 1e-6
    for given in (
        {"teacher": other}, {"data": rows(149)}, {"distillation_top_k": 2},
        {"distillation_top_k": 2, "distillation_temperature": 3.0}, {"bf16": True},
    ):  # fmt: skip
        before = len(list((tmp_path / "cache").iterdir()))
        cached(tmp_path, **given)
        assert len(list((tmp_path / "cache").iterdir())) == before + 1
    cached(tmp_path, distillation_temperature=5.0)  # whole logits have no temperature
    assert len(list((tmp_path / "cache").iterdir())) == before + 1


def test_changed_code_of_the_teacher_is_refused(tmp_path: Path) -> None:
    cached(tmp_path)
    with pytest.raises(UnsupportedOption, match=r"are not those in .*code has been changed"):
        cached(tmp_path, Counting(factor=3.5))


def test_a_changed_sample_is_refused(tmp_path: Path) -> None:
    data = rows(300)
    train(tmp_path / "a", Counting(), data, distillation_cache=str(tmp_path / "cache"), max_steps=1)
    other = rows(300)
    other[1] = {**other[1], "x": other[1]["x"] + 1}  # none of the rows that the fingerprint reads
    with pytest.raises(UnsupportedOption, match=r"sample 1 of the dataset is not the one.*delete"):
        train(
            tmp_path / "b",
            Counting(),
            other,
            distillation_cache=str(tmp_path / "cache"),
            num_train_epochs=1,
            max_steps=-1,
        )


class Noisy(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return {"x": super().__getitem__(index)["x"] + torch.randn(8), "labels": torch.tensor(1)}


class NotANumber(Counting):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).index_fill(1, torch.tensor([1]), float("nan"))


class OfTheBatch(Counting):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Halved(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        part = {name: value[:2] for name, value in inputs.items()}
        return super().compute_loss(model, part, return_outputs, num_items_in_batch)


def test_what_has_no_logits_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match=r"random rows have no|twice with different"):
        cached(tmp_path, data=Noisy(rows(20)))
    with pytest.raises(UnsupportedOption, match=r"logits of sample 0 hold inf or NaN"):
        cached(tmp_path, NotANumber())
    with pytest.raises(UnsupportedOption, match="differ alone and in a batch"):
        cached(tmp_path, OfTheBatch())
    assert not parts(tmp_path / "cache")
    with pytest.raises(ValueError, match="The student has 4 classes and the teacher 3"):
        cached(tmp_path, Counting(num_classes=3))
    for options in ({"auto_find_batch_size": True}, {"dataloader_in_order": False, "dataloader_num_workers": 1}):
        with pytest.raises(UnsupportedOption, match="distillation_cache="):
            cached(tmp_path, **options)
    warmup = {"start": 4, "end": 8, "steps": 2}
    for options in ({"distillation_layers": {"body": "body"}}, {"sequence_length_warmup": warmup}):
        with pytest.raises(ValueError, match=f"distillation_cache=.*{next(iter(options))}"):
            TrainingArguments(str(tmp_path), distillation_cache="c", **options)
    with pytest.raises(ValueError, match="requires a teacher"):
        Trainer(Net(0), TrainingArguments(str(tmp_path), use_cpu=True, distillation_cache="c"))
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, distillation_cache=str(tmp_path / "cache"))
    with pytest.raises(UnsupportedOption, match="the loss is computed of 2 samples"):
        Halved(Net(0), args, train_dataset=rows(64), teacher=Counting()).train()


def test_ctrl_c_keeps_what_is_complete_and_a_next_run_makes_the_rest(tmp_path: Path) -> None:
    teacher = Counting()
    teacher.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, teacher)
    assert len(parts(tmp_path / "cache")) == 1
    assert not list((tmp_path / "cache").glob("*/.*"))
    teacher = Counting()
    found = cached(tmp_path, teacher)
    assert teacher.num_rows < 150 - 64 + 12
    shutil.rmtree(tmp_path / "cache")
    assert torch.equal(cached(tmp_path), found)


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*values: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("paceline.pytorch.distillation.store.save_file", fail)
        with pytest.raises(OSError, match="No space left"):
            cached(tmp_path)
    assert not list((tmp_path / "cache").glob("*/*"))
    assert len(cached(tmp_path))


@pytest.mark.slow
def test_workers_and_unlabelled_data(tmp_path: Path) -> None:
    data = [{"x": row["x"]} for row in rows(70)]
    for name, options in (("plain", {}), ("cached", {"distillation_cache": str(tmp_path / "cache")})):
        trainer, _ = train(
            tmp_path / name, Counting(), data, distillation_alpha=1.0, max_steps=4, dataloader_num_workers=1, **options
        )
        if name == "plain":
            expected = weights(trainer)
    assert torch.equal(weights(trainer), expected)


def test_rows_are_identified_without_their_padding() -> None:
    ids, labels = torch.tensor([[5, 6, 7, 0], [8, 9, 3, 2]]), torch.tensor([[-100, 6, 7, -100], [8, 9, 3, 2]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, "weight": torch.rand(2, dtype=torch.float64)}
    found = row_checks(batch, ["labels"], 2)
    alone = {name: value[:1, :3] if value.dim() > 1 else value[:1] for name, value in batch.items()}
    assert row_checks(alone, ["labels"], 1)[0] == found[0]
    left = {name: value[:1].roll(1, 1) if value.dim() > 1 else value[:1] for name, value in batch.items()}
    assert row_checks(left, ["labels"], 1)[0] == found[0]
    for name, place in (("input_ids", (0, 1)), ("labels", (0, 2)), ("attention_mask", (0, 2)), ("weight", (0,))):
        changed = {**batch, name: batch[name].clone()}
        changed[name][place] = 0
        other = row_checks(changed, ["labels"], 2)
        assert other[0] != found[0]
        assert other[1] == found[1]
    swapped = {**batch, "input_ids": ids[:, [1, 0, 2, 3]]}
    assert (row_checks(swapped, ["labels"], 2) != found).all()


def test_a_store_keeps_samples_of_any_length_and_dtype(tmp_path: Path) -> None:
    store = LogitStore(tmp_path / "store", "key", 70)
    made = [Sample(index, {"logits": torch.randn(index % 3, 4).bfloat16()}) for index in range(70)]
    assert store.find_missing() == [0, 1]
    for part in range(2):
        store.write(part, [made[index] for index in store.samples_of(part)], 4)
    again = LogitStore(tmp_path / "store", "key", 70)
    assert again.find_missing() == []
    for index in (0, 1, 2, 63, 64, 69):
        sample, num_classes = again.read(index)
        assert num_classes == 4
        assert sample.row == index
        assert torch.equal(sample.values["logits"], made[index].values["logits"])
    assert LogitStore(tmp_path / "store", "other", 70).find_missing() == [0, 1]
    assert distillation_cache.are_close(made[1], made[1])
