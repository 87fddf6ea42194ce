"""The sizes of evaluation data."""

from paceline.pytorch.data.lengths import evaluation_samples


def test_samples_of_an_evaluation():
    assert evaluation_samples([1, 2, 3]) == 3
    assert evaluation_samples({"a": [1, 2], "b": [3]}) == 3
    assert evaluation_samples({"a": [1, 2], "b": iter([3])}) is None
    assert evaluation_samples(None) is None
