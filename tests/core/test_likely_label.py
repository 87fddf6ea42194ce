"""The column that most likely holds labels."""

import datasets

from paceline.core.likely_label import find_likely_label


def test_a_column_of_classes_goes_before_names() -> None:
    features = datasets.Features({"score": datasets.Value("float32"), "kind": datasets.ClassLabel(names=["a", "b"])})
    data = datasets.Dataset.from_dict({"score": [0.5], "kind": [1]}, features=features)
    assert find_likely_label(data, ["score", "kind"]) == "kind"
    assert find_likely_label(data, ["score"]) == "score"
    assert find_likely_label(None, ["scoreboard", "text"]) is None
