"""The columns that a model takes, and those that are removed."""

import logging
from typing import Any

import pytest
from torch import nn

from paceline.pytorch.data.columns import (
    RemoveColumnsCollator,
    find_labels,
    has_removable_columns,
    remove_unused_columns,
    signature_columns,
)


class Classifier(nn.Module):
    def forward(self, x: Any, *, mask: Any = None, labels: Any = None, **options: Any) -> None: ...


class Anything(nn.Module):
    def forward(self, *args: Any, **inputs: Any) -> None: ...


def test_signature_columns() -> None:
    assert signature_columns(Classifier(), ["y"]) == ["x", "mask", "labels", "label", "label_ids", "y"]
    assert signature_columns(Anything(), ["labels"]) is None
    assert signature_columns(object(), []) is None


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("x, labels=None", ["labels"]),
        ("x, label", ["label"]),
        ("x, label_ids=None, next_sentence_label=None", ["label_ids", "next_sentence_label"]),
        ("x, target", ["target"]),
        ("x, targets=None, target_lengths=None", ["targets"]),
        ("x, start_positions=None, end_positions=None", ["start_positions", "end_positions"]),
        ("x, start_positions=None", []),
        ("x, labels=None, label_smoothing=0.0, return_labels=False", ["labels"]),
        ("**inputs", []),
    ],
)
def test_find_labels(parameters: str, expected: list[str]) -> None:
    scope: dict[str, Any] = {}
    exec(f"class Model:\n    def forward(self, {parameters}): ...", scope)
    assert find_labels(scope["Model"]()) == expected


def test_find_labels_of_library_models() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=20
    )
    assert find_labels(transformers.BertForSequenceClassification(config)) == ["labels"]
    assert find_labels(transformers.BertForQuestionAnswering(config)) == ["start_positions", "end_positions"]
    assert find_labels(transformers.BertForPreTraining(config)) == ["labels", "next_sentence_label"]


def test_collator_drops_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    collator = RemoveColumnsCollator(list, ["x", "labels"], "training")
    rows = [{"x": 1, "idx": 7, "text": "a"}, {"x": 2, "idx": 8, "text": "b"}]
    with caplog.at_level(logging.INFO):
        assert collator(rows) == [{"x": 1}, {"x": 2}]
        assert collator(rows) == [{"x": 1}, {"x": 2}]
    assert len(caplog.records) == 1
    assert "have been ignored: idx, text" in caplog.text
    assert "remove_unused_columns=False" in caplog.text
    assert rows[0] == {"x": 1, "idx": 7, "text": "a"}
    assert collator([{"x": 1}]) == [{"x": 1}]
    assert collator([(1, 2)]) == [(1, 2)]
    assert collator([{"x": 1}, {"x": 2, "late": 3}]) == [{"x": 1}, {"x": 2}]


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"No columns in .*\(x\).*training dataset has a, b.*remove_unused_columns"):
        RemoveColumnsCollator(list, ["x"], "training")([{"a": 1, "b": 2}])


def test_library_datasets(caplog: pytest.LogCaptureFixture) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"x": [1], "text": ["a"], "idx": [0]})
    with caplog.at_level(logging.INFO, logger="paceline"):
        kept = remove_unused_columns(dataset, ["x", "labels"], "evaluation")
    assert kept.column_names == ["x"]
    assert dataset.column_names == ["x", "text", "idx"]
    assert "have been ignored: text, idx" in caplog.text
    assert remove_unused_columns(dataset, None, "evaluation") is dataset
    assert remove_unused_columns(kept, ["x"], "evaluation") is kept
    with pytest.raises(ValueError, match="x, text, idx"):
        remove_unused_columns(dataset, ["y"], "evaluation")
    formatted = dataset.with_format("torch")
    assert remove_unused_columns(formatted, ["x"], "evaluation").format["type"] == "torch"
    transformed = dataset.with_transform(lambda rows: {"x": rows["text"]})
    assert remove_unused_columns(transformed, ["x"], "evaluation") is transformed
    stream = dataset.to_iterable_dataset()
    assert list(remove_unused_columns(stream, ["x"], "training")) == [{"x": 1}]
    assert not has_removable_columns(stream.map(lambda row: {"y": 2}))
    assert not has_removable_columns([{"x": 1}])
