"""`Trainer.doctor`: planted bugs are found, sound jobs raise no alarm, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, losses, make_trainer, weights
from torch import Tensor, nn
from torch.nn import functional

from paceline import Trainer
from paceline.cli.main import main
from paceline.pytorch.doctor.findings import Diagnosis, Finding

Planted = tuple[nn.Module, list[dict[str, Any]], dict[str, Any]]
BUGS: dict[str, Callable[[], Planted]] = {}
WIDTH, VOCABULARY = 8, 40


def bug(check: str) -> Callable[[Callable[[], Planted]], Callable[[], Planted]]:
    def register(make: Callable[[], Planted]) -> Callable[[], Planted]:
        BUGS[f"{check}: {make.__name__}"] = make
        return make

    return register


def data(change: Callable[[int, Tensor, Any], tuple[Any, Any]] = lambda i, x, y: (x, y)) -> list[dict[str, Any]]:
    rows = [change(index, row["x"], row["labels"]) for index, row in enumerate(classification(48))]
    return [{"x": x, "labels": torch.as_tensor(labels)} for x, labels in rows]


class Changed(Classifier):
    """A classifier with another forward pass."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return self.change(self, x, labels)


def changed(change: Callable[..., Any]) -> Planted:
    return Changed(change), data(), {}


@bug("loss")
def labels_from_one() -> Planted:
    return Classifier(), data(lambda i, x, y: (x, y + 1)), {}


@bug("classes")
def all_ignored() -> Planted:
    return Classifier(), data(lambda i, x, y: (x, y * 0 - 100)), {}


@bug("classes")
def constant_labels() -> Planted:
    return Classifier(), data(lambda i, x, y: (x, y * 0)), {}


@bug("classes")
def imbalanced() -> Planted:
    return Classifier(), data(lambda i, x, y: (x, y * 0 + (i == 0))), {"train_sampling_strategy": "sequential"}


@bug("classes")
def sorted_by_class() -> Planted:
    rows = sorted(data(), key=lambda row: int(row["labels"]))
    return Classifier(), rows, {"train_sampling_strategy": "sequential"}


@bug("label leak")
def label_as_input() -> Planted:
    return Classifier(), data(lambda i, x, y: (torch.cat([x[:-1], y[None].float()]), y)), {}


@bug("inputs")
def not_finite() -> Planted:
    return Classifier(), data(lambda i, x, y: (x / (i % 3), y)), {}


@bug("inputs")
def not_normalised() -> Planted:
    return Classifier(), data(lambda i, x, y: (x * 64 + 128, y)), {}


@bug("rows")
def duplicated_rows() -> Planted:
    return Classifier(), data() + data()[:20], {}


@bug("rows")
def evaluated_on_training_rows() -> Planted:
    return Classifier(), data(), {"eval_dataset": data()[:5]}


@bug("gradients")
def all_frozen() -> Planted:
    return Classifier().requires_grad_(False), data(), {}


@bug("gradients")
def unused_layer() -> Planted:
    model = Classifier()
    model.idle = nn.Linear(3, 3)
    return model, data(), {}


@bug("gradients")
def dead_units() -> Planted:
    def forward(model: Classifier, x: Tensor, labels: Any) -> Any:
        logits = model.second(functional.relu(model.first(x) - 100))
        return functional.cross_entropy(logits, labels), logits

    return changed(forward)


@bug("gradients")
def exploding() -> Planted:
    def forward(model: Classifier, x: Tensor, labels: Any) -> Any:
        logits = model.logits(x)
        return functional.cross_entropy(logits, labels) * 1e6, logits

    return changed(forward)


@bug("gradients")
def optimizer_of_one_layer() -> Planted:
    model = Classifier()
    return model, data(), {"optimizers": (torch.optim.AdamW(model.second.parameters(), lr=1e-3), None)}


@bug("initial loss")
def softmax_twice() -> Planted:
    def forward(model: Classifier, x: Tensor, labels: Any) -> Any:
        logits = model.logits(x).softmax(-1)
        return functional.cross_entropy(logits, labels), logits

    return changed(forward)


@bug("initial loss")
def large_last_layer() -> Planted:
    model = Classifier()
    nn.init.normal_(model.second.weight, std=30)
    return model, data(), {}


@bug("modes")
def dropout_in_evaluation() -> Planted:
    def forward(model: Classifier, x: Tensor, labels: Any) -> Any:
        logits = functional.dropout(model.logits(x), 0.3, training=True)
        return functional.cross_entropy(logits, labels), logits

    return changed(forward)


@bug("modes")
def eval_in_forward() -> Planted:
    def forward(model: Classifier, x: Tensor, labels: Any) -> Any:
        model.drop.eval()
        logits = model.logits(x)
        return functional.cross_entropy(logits, labels), logits

    return changed(forward)


@bug("learning rate")
def rate_far_too_high() -> Planted:
    return Classifier(), data(), {"learning_rate": 30.0}


@bug("learning rate")
def rate_far_too_low() -> Planted:
    return Classifier(), data(), {"learning_rate": 1e-10}


@bug("one batch")
def loss_without_inputs() -> Planted:
    def forward(model: Classifier, x: Tensor, labels: Any) -> Any:
        logits = model.logits(x * 0) * 1e-6
        return functional.cross_entropy(logits, labels), logits

    return changed(forward)


class Unscaled(Trainer):
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = self.compute_loss(model, self._prepare_inputs(inputs))
        loss.backward()
        return loss.detach()


@bug("accumulation")
def training_step_without_scaling() -> Planted:
    return Classifier(), data(), {"cls": Unscaled, "gradient_accumulation_steps": 4}


class Language(nn.Module):
    """Predicts tokens; `shift` as a causal model does."""

    def __init__(self, shift: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.shift = shift

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Any:
        logits = self.head(self.embedding(input_ids))
        left, right = (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)
        return {"loss": functional.cross_entropy(left.flatten(0, 1), right.flatten()), "logits": logits}


def texts(pads: int = 0) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    rows = []
    for _ in range(32):
        ids = torch.randint(1, VOCABULARY, (WIDTH,))
        mask = torch.ones(WIDTH, dtype=torch.long)
        mask[WIDTH - pads :] = 0
        rows.append({"input_ids": ids * mask, "labels": ids * mask, "attention_mask": mask})
    return rows


@bug("targets")
def targets_not_shifted() -> Planted:
    return Language(shift=False), texts(), {}


@bug("padding")
def padding_as_targets() -> Planted:
    return Language(shift=True), texts(pads=3), {}


class Words:
    """A tokenizer of numbered words."""

    pad_token_id = 0

    def __init__(self, size: int = VOCABULARY) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"w{index}" for index in ids)


def gpt(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 64, "vocab_size": VOCABULARY, **options}
    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    return model


@bug("vocabulary")
def token_beyond_the_embedding() -> Planted:
    return gpt(vocab_size=VOCABULARY // 2), texts(), {}


@bug("vocabulary")
def tokenizer_of_another_model() -> Planted:
    return gpt(), texts(), {"processing_class": Words(VOCABULARY + 1)}


@bug("tied weights")
def embeddings_that_are_two_tensors() -> Planted:
    model: Any = gpt()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model, texts(), {}


@bug("length")
def texts_longer_than_the_positions() -> Planted:
    return gpt(n_positions=WIDTH // 2), texts(), {}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, tmp_path: Path) -> None:
    model, rows, options = BUGS[name]()
    found = make_trainer(tmp_path, model, rows, **{"learning_rate": 1e-3, **options}).doctor()
    check = name.split(":")[0]
    assert check in {each.check for each in found.findings if each.severity in ("error", "warning")}, str(found)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "warmup_steps": 5}])
def test_a_sound_job_raises_no_alarm(options: dict[str, Any], tmp_path: Path) -> None:
    found = make_trainer(tmp_path, Classifier(dropout=0.1), data(), learning_rate=1e-3, **options).doctor()
    assert not found.findings, str(found)
    assert "one batch" in found.checks


def test_shift_and_masks_of_the_targets_are_shown_as_text(tmp_path: Path) -> None:
    rows = texts(pads=2)
    for row in rows:
        row["labels"] = row["labels"].clone()
        row["labels"][:3] = -100
        row["labels"][-2:] = -100
    options: dict[str, Any] = {"train_sampling_strategy": "sequential", "learning_rate": 1e-3}
    found = make_trainer(tmp_path, Language(shift=True), rows, processing_class=Words(), **options).doctor()
    words = Words().decode(rows[0]["input_ids"].tolist()).split()
    seen = [each.seen for each in found.findings if each.check == "targets"]
    assert seen[0] == f"inputs of the first sample: '{' '.join(words[:-2])}' <2 padding>"
    assert seen[1] == f"targets of the first sample: <3 ignored> '{' '.join(words[3:-2])}' <2 ignored>"
    assert seen[2].startswith("Right: the target of output i is token i + 1 (the labels in the batch are shifted by 0")
    assert {each.severity for each in found.findings} == {"note"}, str(found)


def test_classes_of_tokens_are_not_shown_as_text(tmp_path: Path) -> None:
    rows = [{**row, "labels": row["labels"] % 3} for row in texts()]

    class Names(Language):
        def __init__(self) -> None:
            super().__init__(shift=False)
            self.head = nn.Linear(16, 3)

    found = make_trainer(tmp_path, Names(), rows, processing_class=Words(), learning_rate=1e-3).doctor()
    assert not [each.seen for each in found.findings if "first sample" in each.seen]


def test_what_a_model_of_a_library_leaves_unused_is_no_alarm(tmp_path: Path) -> None:
    """The mask token of an image encoder, which its classifier never uses; the same in a model of one's own is one."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    torch.manual_seed(0)
    config = transformers.Dinov2Config(**sizes, num_labels=2)
    model = transformers.Dinov2ForImageClassification(config)
    rows = [{"pixel_values": torch.randn(3, 16, 16) + label, "labels": label} for label in [0, 1] * 16]

    class Own(type(model)):  # type: ignore[misc]
        pass

    for kind, severity in ((type(model), "note"), (Own, "warning")):
        model.__class__ = kind
        found = make_trainer(tmp_path, model, rows, learning_rate=1e-3).doctor().findings
        unused = [each for each in found if "dinov2.embeddings.mask_token" in each.seen]
        assert [each.severity for each in unused] == [severity]
        assert {each.severity for each in found} <= {severity, "note"}


class Padded(nn.Module):
    """A tagger whose loss depends on how far a batch is padded, as that of heads for question answering does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.score = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.score(self.embed(input_ids)).squeeze(-1)  # (samples, tokens): where the answer is
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Masked(nn.Module):
    """Learns tokens that its collator masked at random."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(input_ids)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def collate_padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "labels": torch.stack([row["labels"] for row in rows])}


def collate_masked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = torch.stack([row["input_ids"][:4] for row in rows])
    is_masked = torch.rand(ids.shape) < 0.4
    return {"input_ids": ids.where(~is_masked, 1), "labels": ids.where(is_masked, -100)}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dataloader_num_workers": 1}])
@pytest.mark.parametrize(("kind", "collate"), [(Padded, collate_padded), (Masked, collate_masked)])
def test_padding_and_random_masks_are_no_wrong_accumulation(
    kind: type[nn.Module], collate: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(48):
        ids = torch.randint(2, VOCABULARY, (4 + index % 5,), generator=generator)
        rows.append({"input_ids": ids, "labels": ids.argmax()})
    for size, accumulation in ((4, 2), (8, 4), (6, 4)):
        split: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        found = make_trainer(
            tmp_path, kind(), rows, data_collator=collate, learning_rate=1e-3, **split, **options
        ).doctor()
        assert "accumulation" in found.checks, str(found)
        assert "accumulation" not in {each.check for each in found.findings}, str(found)
        if options:
            break


@pytest.mark.parametrize(("shared", "severity"), [(0, None), (1, "note"), (5, "warning"), (20, "error")])
def test_rows_that_are_in_both_sets_by_chance_are_no_error(shared: int, severity: str | None, tmp_path: Path) -> None:
    rows = [{"x": row["x"], "labels": row["labels"]} for row in classification(300)]
    evaluation = [*rows[:shared], *rows[180 + shared :]]
    found = make_trainer(tmp_path, Classifier(), rows[:180], eval_dataset=evaluation, learning_rate=1e-3).doctor()
    assert [each.severity for each in found.findings if each.check == "rows"] == ([severity] if severity else [])


def test_nothing_remains_of_it(tmp_path: Path) -> None:
    runs = []
    for is_examined in (False, True):
        trainer = make_trainer(tmp_path / str(is_examined), Classifier(dropout=0.2), data())
        torch.manual_seed(3)
        if is_examined:
            before, state = torch.get_rng_state(), str(trainer.state)
            trainer.doctor()
            assert torch.equal(before, torch.get_rng_state())
            assert str(trainer.state) == state
            assert trainer.optimizer is None
            assert all(parameter.grad is None for parameter in trainer.model.parameters())
            assert not list((tmp_path / str(is_examined)).iterdir())
        trainer.train()
        runs.append((losses(trainer), weights(trainer.model)))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["init", "module", "sound.yaml"]) == 0
    before = sorted(path.name for path in tmp_path.iterdir())
    capsys.readouterr()
    assert main(["doctor", "sound.yaml"]) == 0
    assert "0 findings" in capsys.readouterr().out
    assert main(["plan", "sound.yaml", "--print-config"]) == 0
    output = capsys.readouterr().out
    assert "peak of a step" in output
    assert "learning_rate: 0.01  # not the default" in output
    assert main(["plan", "sound.yaml", "--json", "--max_steps", "3"]) == 0
    assert '"max_steps": 3' in capsys.readouterr().out
    assert main(["doctor", "sound.yaml", "--json", "--learning_rate", "1000"]) == 1
    assert '"has_errors": true' in capsys.readouterr().out
    assert main(["plan", "sound.yaml", "--fresh"]) == 2
    assert [name for name in sorted(p.name for p in tmp_path.iterdir()) if name != "__pycache__"] == before


def test_the_last_line_counts_findings() -> None:
    one = Finding("note", "seen", check="targets")
    for findings, line in (((), "2 checks, 0 findings"), ((one,), "2 checks, 1 finding")):
        assert str(Diagnosis(findings, ("targets", "rows"))).splitlines()[-1] == line
