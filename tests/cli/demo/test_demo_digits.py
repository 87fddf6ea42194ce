"""The digits: recognized, counted, and the same again when the run is finished."""

import sys
from pathlib import Path

import demo_runs
import pytest

from paceline.cli.demo import digits, digits_data
from paceline.cli.errors import UsageError


def run(folder: Path, *words: str) -> str:
    return demo_runs.run(digits, demo_runs.options(folder, "digits", *words))


@pytest.mark.slow
def test_a_short_run_learns_and_is_shown_again(tmp_path: Path):
    pytest.importorskip("sklearn")
    first = run(tmp_path / "run", "--num_train_epochs", "2", "--learning_rate", "5e-3")
    accuracy = float(first.split("held-out digits: ")[1].split(" %")[0])
    assert accuracy > 85
    table = first.split("predicted digit):")[1].split("Weights,")[0].split("\n\n")[1].splitlines()
    assert len(table) == 11
    assert sum(int(line.split()[1 + i]) for i, line in enumerate(table[1:])) == round(accuracy * 450 / 100)
    again = run(tmp_path / "run", "--num_train_epochs", "2", "--learning_rate", "5e-3")
    assert "This run is finished" in again
    assert again.split("Loss in nats")[1] == first.split("Loss in nats")[1]


def test_the_halves_hold_the_same_share_of_each_digit():
    pytest.importorskip("sklearn")
    train, held_out, _ = digits.load_digits()
    assert (len(train), len(held_out)) == (1347, 450)
    counts = [sum(int(sample["digit"]) == digit for sample in held_out) for digit in range(10)]
    assert min(counts) >= 43
    assert train[0]["pixels"].shape == (1, 8, 8)
    assert float(max(sample["pixels"].max() for sample in train)) == 1.0


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match=r"scikit-learn.*paceline\[demo\]"):
        digits.load_digits()


def test_confusions_are_counted_by_true_digit():
    table = digits_data.count_confusions([1, 1, 2], [1, 7, 2])
    assert table[1][1] == 1
    assert table[1][7] == 1
    assert table[2][2] == 1
    assert sum(map(sum, table)) == 3
