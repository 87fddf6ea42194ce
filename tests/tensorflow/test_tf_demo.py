"""`paceline demo digits --framework tf`: learns, and shows the same again when it is finished."""

from pathlib import Path

import pytest

from paceline.cli.demo import digits_tf
from paceline.cli.demo.options import read_demo_options
from paceline.cli.errors import UsageError


@pytest.mark.slow
def test_a_short_run_learns_and_is_shown_again(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    words = ["digits", "--framework", "tf", "--output_dir", str(tmp_path), "--disable_tqdm", "--num_train_epochs", "2"]
    said: list[list[str]] = [[], []]
    for number in range(2):
        assert digits_tf.run(read_demo_options(words), said[number].append) == 0
    first, again = ("\n".join(lines) for lines in said)
    assert float(first.split("held-out digits: ")[1].split(" %")[0]) > 85
    assert "This run is finished" in again
    assert again.split("Loss in nats")[1] == first.split("Loss in nats")[1]


def test_wrong_frameworks() -> None:
    with pytest.raises(UsageError, match="--framework jax: expected one of torch, tf"):
        read_demo_options(["digits", "--framework", "jax"])
    with pytest.raises(UsageError, match="there is `paceline demo digits`"):
        read_demo_options(["text", "--framework", "tf"])
