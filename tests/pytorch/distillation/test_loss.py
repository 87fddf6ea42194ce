"""Distillation: the loss rule under accumulation, padding and processes, hidden states, resume, and what is refused."""

from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from safetensors.torch import load_file
from small_models import RecordGradient, make_trainer
from taught_models import TINY, Net, Rows, bert, gpt2, rows, sentences
from torch import Tensor, nn
from torch.nn import functional

from paceline import Trainer, TrainingArguments, UnsupportedOption
from paceline.pytorch.model.reductions import LossReduction
from paceline.pytorch.model.soft_targets import TopClasses, divergence, find_logits, reduce_items, top_classes

transformers = pytest.importorskip("transformers")


def t5(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.T5Config(
        vocab_size=23, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0, pad_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


MAKERS = {"gpt2": gpt2, "bert": bert, "t5": t5}


def gradient(folder: Path, model: nn.Module, teacher: nn.Module, data: Any, size: int, **options: Any) -> Tensor:
    trainer: Any = RecordGradient(
        model,
        TrainingArguments(
            str(folder), per_device_train_batch_size=size, gradient_accumulation_steps=8 // size, max_steps=1,
            max_grad_norm=0, train_sampling_strategy="sequential", save_strategy="no", use_cpu=True, disable_tqdm=True,
            **options,
        ),
        train_dataset=data,
        teacher=teacher,
    )  # fmt: skip
    trainer.train()
    found: Tensor = trainer.gradients[0]
    return found


def expected_loss(student: Tensor, teacher: Tensor, labels: Tensor, alpha: float, temperature: float) -> Tensor:
    """The loss of targets `(n,)`, by the formula of the paper."""
    soft = functional.softmax(teacher / temperature, -1)
    cross = -(soft * functional.log_softmax(student / temperature, -1)).sum(-1)
    entropy = -(soft * soft.log()).sum(-1)
    hard = functional.cross_entropy(student, labels)
    return (1 - alpha) * hard + alpha * temperature**2 * (cross - entropy).mean()


# ---- the losses


def test_the_divergence_of_the_likeliest_classes_counts_all_others_as_one() -> None:
    student, teacher = torch.randn(5, 9, requires_grad=True), torch.randn(5, 9)
    whole = divergence(student, teacher, 3.0)
    top = top_classes(teacher, 4, 3.0)
    assert isinstance(top, TopClasses)
    p, q = functional.softmax(teacher / 3, -1), functional.softmax(student / 3, -1)
    merged = [torch.cat([each.gather(-1, top.indices), 1 - each.gather(-1, top.indices).sum(-1, True)], -1)
              for each in (p, q)]  # fmt: skip
    expected = 9 * (merged[0] * (merged[0] / merged[1]).log()).sum(-1)
    torch.testing.assert_close(divergence(student, top, 3.0), expected)
    assert (divergence(student, top, 3.0) <= whole + 1e-6).all()
    torch.testing.assert_close(divergence(student, top_classes(teacher, 8, 3.0), 3.0), whole)


def test_classes_without_mass_cost_no_nan() -> None:
    teacher = torch.tensor([[0.0, float("-inf"), 1.0]])
    for student in (torch.randn(1, 3, requires_grad=True), teacher.clone().requires_grad_()):
        for target in (teacher, top_classes(teacher, 2, 1.0)):
            loss = divergence(student, target, 1.0).sum()
            loss.backward()
            assert loss.isfinite()
            assert student.grad is not None
            assert student.grad.isfinite().all()


@pytest.mark.parametrize("unit", ["tokens", "samples", "all_samples", "sum"])
def test_items_are_reduced_as_the_hard_loss(unit: str) -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, float("nan")], [5.0, 6.0]])
    kept = torch.tensor([[True, True], [True, False], [False, False]])
    expected = {"tokens": 2.0, "samples": 2.25, "all_samples": 1.5, "sum": 6.0}[unit]
    assert reduce_items(values, kept, LossReduction(unit)).item() == pytest.approx(expected)
    assert reduce_items(values, kept, LossReduction(unit), num_items=4).item() == pytest.approx(1.5)


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_outputs_of_any_form_and_the_formula_of_the_paper(tmp_path: Path, form: str) -> None:
    student, teacher, data = Net(0, form="dict"), Net(1, 12, form), rows(8)
    found = gradient(tmp_path, student, teacher, data, 8, distillation_alpha=0.3, distillation_temperature=3.0)
    again = Net(0)
    x, labels = (torch.stack([row[name] for row in data]) for name in ("x", "labels"))
    logits = find_logits(teacher(x, labels), labels, "teacher").detach()
    expected_loss(again(x, labels)["logits"], logits, labels, 0.3, 3.0).backward()
    expected = torch.cat([p.grad.flatten() for p in again.parameters() if p.grad is not None])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_accumulation_and_padding_change_no_gradient(tmp_path: Path, name: str) -> None:
    make, options = MAKERS[name], {"distillation_top_k": 5} if name == "t5" else {}
    found = {
        (size, padded): gradient(tmp_path, make(0), make(1), sentences(padded=padded), size, **options)
        for size, padded in ((8, 0), (2, 0), (8, 4))
    }
    for key in ((2, 0), (8, 4)):
        torch.testing.assert_close(found[key], found[8, 0], rtol=1e-5, atol=1e-5)
    plain = gradient(tmp_path, make(0), make(1), sentences(), 8, distillation_alpha=0.0)
    assert (found[8, 0] - plain).abs().max() > 1e-4


def test_hidden_states_of_padding_count_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"distillation_layers": {"transformer.h.0": "transformer.h.1"}, "logging_steps": 1}
    one = gradient(tmp_path, gpt2(0), gpt2(1), sentences(), 8, **options)
    for size, padded in ((2, 0), (8, 4)):
        other = gradient(tmp_path, gpt2(0), gpt2(1), sentences(padded=padded), size, **options)
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_states_of_an_encoder_are_compared_as_such_for_targets_of_any_length(tmp_path: Path) -> None:
    """Also if the padded targets are as long as the padded inputs."""
    found = []
    for padded in (0, 4):
        ignored = torch.full((padded,), -100)
        data = [{**row, "labels": torch.cat([row["labels"], ignored])} for row in sentences()]
        layers = {"encoder.block.0": "encoder.block.0"}
        found.append(gradient(tmp_path, t5(0), t5(1), data, 8, distillation_layers=layers))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


# ---- runs


def run(folder: Path, stop: int | None = None, resume: bool = False, **options: Any) -> tuple[Any, Rows]:
    watch = Rows(stop)
    defaults: dict[str, Any] = {
        "max_steps": 6, "save_strategy": "steps", "save_steps": 3, "logging_steps": 2, "learning_rate": 0.05,
        "distillation_layers": {"body": "body"},
    }  # fmt: skip
    given = {name: options.pop(name) for name in ("model", "teacher") if name in options}
    args = TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, **{**defaults, **options})
    teacher = given.get("teacher", Net(1, 12))
    trainer = Trainer(
        given.get("model", Net(0)), args, train_dataset=rows(), eval_dataset=rows(), callbacks=[watch], teacher=teacher
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, watch


def weights(trainer: Any) -> Tensor:
    parts = [*trainer.model.parameters(), *(m.weight for m in trainer.distillation.projections.maps.values())]
    return torch.cat([part.detach().flatten() for part in parts])


def test_a_resume_is_exact_with_its_projections_and_its_log(tmp_path: Path) -> None:
    straight, seen = run(tmp_path / "one")
    run(tmp_path / "two", stop=3)
    resumed, rest = run(tmp_path / "two", resume=True)
    assert weights(straight).equal(weights(resumed))
    first = next(row for row in rest.rows if "hard_loss" in row)
    expected = next(row for row in seen.rows if row.get("learning_rate") == first["learning_rate"])
    for name in ("hard_loss", "distillation_loss", "hidden_loss"):
        assert first[name] == expected[name]
    assert first["loss"] == pytest.approx(
        0.5 * first["hard_loss"] + 0.5 * first["distillation_loss"] + first["hidden_loss"], rel=1e-3
    )
    saved = load_file(tmp_path / "two" / "checkpoint-6" / "model.safetensors")
    assert set(saved) == set(Net(0).state_dict())


def test_evaluation_has_the_hard_loss_and_the_teacher_is_left_as_it_was(tmp_path: Path) -> None:
    teacher = Net(1, 12)
    teacher.body.eval()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    trainer, _ = run(tmp_path, teacher=teacher)
    assert all(value.equal(before[name]) for name, value in teacher.state_dict().items())
    assert teacher.training
    assert not teacher.body.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in teacher.parameters())
    batch = {name: torch.stack([row[name] for row in rows()]) for name in ("x", "labels")}
    with torch.no_grad():
        expected = trainer.model(**batch)["loss"].item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


class Normed(Net):
    """Draws dropout, and keeps statistics of batch norm."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, 12)
        self.body = nn.Sequential(self.body, nn.BatchNorm1d(12), nn.Dropout(0.5))  # type: ignore[assignment]


def test_outside_of_a_run_the_teacher_is_in_evaluation_mode_too(tmp_path: Path) -> None:
    teacher = Normed(1)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    args = TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, save_strategy="no", max_steps=1)
    trainer = Trainer(Net(0), args, train_dataset=rows(), teacher=teacher)
    batch = {name: torch.stack([row[name] for row in rows()]) for name in ("x", "labels")}
    found = [float(trainer.compute_loss(trainer.model, dict(batch)).detach()) for _ in range(2)]
    assert found[0] == found[1]
    assert all(value.equal(before[name]) for name, value in teacher.state_dict().items())
    assert teacher.training


def test_options_that_are_set_after_the_trainer_count(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, save_strategy="no", max_steps=1)
    watch = Rows()
    trainer = Trainer(Net(0), args, train_dataset=rows(), callbacks=[watch], teacher=Net(1, 12))
    trainer.args.distillation_alpha = 1.0
    trainer.train()
    row = next(row for row in watch.rows if "hard_loss" in row)
    assert row["loss"] == pytest.approx(row["distillation_loss"], rel=1e-3)


class NanOnce(Net):
    """Gives NaN in its second training pass."""

    passes = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.passes += self.training
        found = super().forward(*args, **kwargs)
        is_bad = self.training and self.passes == 2
        return {name: value * float("nan") for name, value in found.items()} if is_bad else found


def test_a_step_that_is_skipped_is_not_in_the_logged_losses(tmp_path: Path) -> None:
    _, watch = run(
        tmp_path, model=NanOnce(0), max_steps=4, logging_steps=4, nonfinite_policy="skip", save_strategy="no",
        loss_weight="samples",
    )  # fmt: skip
    row = next(row for row in watch.rows if "hard_loss" in row)
    assert row["nonfinite_steps"] == 1
    parts = 0.5 * row["hard_loss"] + 0.5 * row["distillation_loss"] + row["hidden_loss"]
    assert row["loss"] == pytest.approx(parts, rel=1e-3)


class OutOfMemory(Net):
    """Runs out of memory in its `fails_at`th training pass."""

    passes, fails_at = 0, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.passes += self.training and torch.is_grad_enabled()
        if self.fails_at and self.passes == self.fails_at:
            self.fails_at = 0
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(*args, **kwargs)


def test_passes_that_run_again_count_once_for_the_projections(tmp_path: Path) -> None:
    found = []
    for fails_at in (0, 2):
        model = OutOfMemory(0)
        model.fails_at = fails_at
        trainer, _ = run(
            tmp_path / str(fails_at), model=model, max_steps=1, gradient_accumulation_steps=2, save_strategy="no",
            auto_find_batch_size=True, loss_weight="samples",
        )  # fmt: skip
        found.append(trainer.distillation.projections.state_dict()["body"]["optimizer"]["state"][0]["exp_avg"])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-7)


def test_projections_learn(tmp_path: Path) -> None:
    trainer, watch = run(tmp_path, max_steps=60, logging_steps=10, save_strategy="no", distillation_layer_loss="cosine")
    found = [row["hidden_loss"] for row in watch.rows if "hidden_loss" in row]
    assert found[-1] < 0.5 * found[0]
    assert trainer.distillation.projections.maps["body"].weight.shape == (12, 6)


def test_unlabelled_data_with_the_soft_loss_alone(tmp_path: Path) -> None:
    data = [{"x": row["x"]} for row in rows()]
    options: dict[str, Any] = {"max_steps": 40, "logging_steps": 10, "distillation_alpha": 1.0, "learning_rate": 0.05}
    args = TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, save_strategy="no", **options)
    watch = Rows()
    Trainer(Net(0), args, train_dataset=data, callbacks=[watch], teacher=Net(1, 12)).train()
    found = [row["distillation_loss"] for row in watch.rows if "distillation_loss" in row]
    assert found[-1] < 0.5 * found[0]


def test_smoothed_hard_loss_and_the_folder_of_a_teacher(tmp_path: Path) -> None:
    gpt2(1).save_pretrained(tmp_path / "teacher")
    options: dict[str, Any] = {"label_smoothing_factor": 0.1, "linear_cross_entropy": "auto"}
    found = []
    for teacher, option in ((gpt2(1), None), (None, str(tmp_path / "teacher"))):
        args = TrainingArguments(
            str(tmp_path / "run"), max_steps=2, use_cpu=True, disable_tqdm=True, save_strategy="no", teacher=option,
            **options,
        )  # fmt: skip
        made = Trainer(gpt2(0), args, train_dataset=sentences(), teacher=teacher)
        made.train()
        found.append(torch.cat([p.detach().flatten() for p in made.model.parameters()]))
    assert found[0].equal(found[1])


# ---- refused


class Deaf(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Doubled(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return 2 * super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)


def test_an_overridden_loss_without_the_teacher_is_refused(tmp_path: Path) -> None:
    args = make_trainer(tmp_path, Net(0), rows(), max_steps=2).args
    deaf = Deaf(Net(0), args, train_dataset=rows(), teacher=Net(1))
    with pytest.raises(UnsupportedOption, match="without the teacher: call super"):
        deaf.train()
    Doubled(Net(0), args, train_dataset=rows(), teacher=Net(1)).train()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "packing": ({"packing": "flatten"}, "packing='flatten'"),
    "chunks": ({"linear_cross_entropy": True}, "linear_cross_entropy=True"),
    "temperature": ({"distillation_temperature": 0.0}, "distillation_temperature=0.0"),
    "alpha": ({"distillation_alpha": 1.5}, "distillation_alpha=1.5"),
    "top_k": ({"distillation_top_k": 0}, "distillation_top_k=0"),
    "layers": ({"distillation_layers": {"body": 3}}, "distillation_layers"),
    "layer loss alone": ({"distillation_layer_loss": "cosine"}, "requires distillation_layers"),
    "layer loss": ({"distillation_layer_loss": "l1"}, "distillation_layer_loss"),
    "weight function": ({"loss_weight": lambda batch: 1.0}, "loss_weight"),
    "folder": ({"teacher": "no/such"}, "two teachers"),
    "token metrics": ({"log_token_metrics": True}, "log_token_metrics with a teacher"),
    "z-loss": ({"z_loss_weight": 0.1}, "z_loss_weight with a teacher"),
    "sources": ({"loss_by_source": "source"}, "loss_by_source with a teacher"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        Trainer(Net(0), TrainingArguments(str(tmp_path), use_cpu=True, **options), teacher=Net(1))


def test_teachers_that_cannot_teach_are_refused(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no")
    student = Net(0)
    with pytest.raises(ValueError, match="shares parameters"):
        Trainer(student, args, teacher=student)
    config = transformers.GPT2Config(**{**TINY, "vocab_size": 24})
    with pytest.raises(ValueError, match="vocab_size=24"):
        Trainer(gpt2(0), args, teacher=transformers.GPT2LMHeadModel(config))
    with pytest.raises(ValueError, match="not a folder"):
        Trainer(Net(0), args, teacher=tmp_path)
    with pytest.raises(ValueError, match="requires a teacher"):
        Trainer(Net(0), TrainingArguments(str(tmp_path), use_cpu=True, distillation_alpha=0.9))
    with pytest.raises(ValueError, match="no module 'nothing'"):
        run(tmp_path, distillation_layers={"nothing": "body"})
    with pytest.raises(TypeError, match="expected a module"):
        Trainer(Net(0), args, teacher=3)  # type: ignore[arg-type]


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    for number, words in enumerate(("a b c", "b a c")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "vocab.txt").write_text("\n".join(["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *words.split()]))
        transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    bert(1).save_pretrained(tmp_path / "1")
    own, theirs = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in "01")
    args = TrainingArguments(str(tmp_path), use_cpu=True, teacher=str(tmp_path / "1"))
    with pytest.raises(ValueError, match="another tokenizer than the model: the token"):
        Trainer(bert(0), args, processing_class=own)
    Trainer(bert(0), args, processing_class=theirs)


# ---- several processes


@pytest.mark.slow
def test_two_processes_have_the_gradient_of_one(tmp_path: Path) -> None:
    processes.run("distillation_job.py", 2, str(tmp_path))
    found = torch.load(tmp_path / "0.pt")
    one = gradient(
        tmp_path, gpt2(0), gpt2(1), sentences(), 8, distillation_layers={"transformer.h.0": "transformer.h.1"}
    )
    torch.testing.assert_close(found["gpt2"], one, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["straight"], found["resumed"], rtol=0, atol=0)
    torch.testing.assert_close(found["shards"], found["straight"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["shards"], found["shards resumed"], rtol=0, atol=0)
    assert found["hard_loss"] == pytest.approx(found["hard_loss of one"], rel=1e-5)
    for engine in ("ddp", "fsdp"):
        torch.testing.assert_close(found[f"{engine} cached"], found[f"{engine} plain"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[f"{engine} again"], found[f"{engine} cached"], rtol=0, atol=0)
