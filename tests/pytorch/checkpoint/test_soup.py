"""Means of checkpoints: the numbers, what is refused, and what is left untouched."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.cli.main import main
from paceline.pytorch.checkpoint.soup import average_checkpoints, greedy_soup
from paceline.pytorch.checkpoint.tensors import CheckpointError
from paceline.pytorch.checkpoint.weights import write_weights


def make(folder: Path, value: float, **more: torch.Tensor) -> Path:
    weights = {"a": torch.full((3, 2), value), "b": torch.full((2,), value, dtype=torch.bfloat16)}
    write_weights({**weights, "count": torch.tensor([7]), **more}, folder, max_shard_bytes=30)
    (folder / "config.json").write_text(json.dumps({"of": folder.name}))
    (folder / "averages.pt").write_bytes(b"state")
    return folder


def test_the_mean_of_sharded_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [str(make(tmp_path / name, value)) for name, value in (("x", 1.0), ("y", 2.0), ("z", 6.0))]
    assert main(["average", *places, "-o", str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["a"], torch.full((3, 2), 3.0))
    assert torch.equal(found["b"], torch.full((2,), 3.0, dtype=torch.bfloat16))
    assert found["count"].item() == 7
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"of": "x"}
    assert json.loads((tmp_path / "out" / "soup.json").read_text())["checkpoints"] == places
    assert not (tmp_path / "out" / "averages.pt").exists()
    assert main(["average", *places[:2], "-o", str(tmp_path / "out")]) == 2
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a"], found["a"])
    assert main(["average", *places[:2], "--overwrite", "-o", str(tmp_path / "out")]) == 0
    assert load_file(tmp_path / "out" / "model.safetensors")["a"][0, 0] == 1.5
    assert main(["average", places[0], "-o", str(tmp_path / "new")]) == 2
    assert main(["average", *places, "--wrong", "-o", str(tmp_path / "new")]) == 2
    assert main(["average", *places, "-o", "--overwrite"]) == 2
    assert not (tmp_path / "new").exists()
    assert "-o needs a value, not the option --overwrite" in capsys.readouterr().err


def test_weights_that_would_stay_beside_the_mean_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of a folder without a manifest are kept, and transformers prefers one file to an index of shards."""
    for name in ("x", "y", "out"):
        (tmp_path / name).mkdir()
        tensors = {key: torch.full((1000,), {"x": 1.0, "y": 3.0}.get(name, 9.0)) for key in "ab"}
        save_file(tensors, tmp_path / name / "model.safetensors")
    out = tmp_path / "out"
    (out / "notes.txt").write_text("mine")
    words = ["average", str(tmp_path / "x"), str(tmp_path / "y"), "-o", str(out), "--overwrite"]
    assert main([*words, "--max-shard-size", "5KB"]) == 2
    assert f"--overwrite: {out} holds model.safetensors beside what the mean replaces" in capsys.readouterr().err
    assert load_file(out / "model.safetensors")["a"][0] == 9
    (out / "adapter_config.json").write_text("{}")
    assert main(words) == 2
    assert "holds adapter_config.json beside" in capsys.readouterr().err
    (out / "adapter_config.json").unlink()
    assert main(words) == 0
    assert load_file(out / "model.safetensors")["a"][0] == 2
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    assert main([*words, "--max-shard-size", "5KB"]) == 0  # a mean is replaced whole
    assert sorted(path.name for path in out.glob("model*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"c": torch.ones(1)}, "different tensors: c"),
        ({"a": torch.ones(2, 2)}, r"a differs .*\(3, 2\)"),
        ({"b": torch.ones(2)}, "b differs .*bfloat16"),
        ({"count": torch.tensor([8])}, "count is not floating-point"),
    ],
)
def test_models_that_differ_are_refused_by_name(tmp_path: Path, more: dict[str, torch.Tensor], words: str) -> None:
    first, second = make(tmp_path / "x", 1.0), make(tmp_path / "y", 1.0, **more)
    with pytest.raises(CheckpointError, match=words):
        average_checkpoints([first, second], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]


def test_counters_of_batch_norm_differ_between_steps_and_nan_is_refused(tmp_path: Path) -> None:
    for name, count, value in (("a", 3, 1.0), ("b", 9, 2.0), ("c", 9, float("nan"))):
        tensors = {"norm.num_batches_tracked": torch.tensor(count), "norm.running_mean": torch.tensor([value])}
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    average_checkpoints([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    mean = load_file(tmp_path / "mean" / "model.safetensors")
    assert int(mean["norm.num_batches_tracked"]) == 9
    assert float(mean["norm.running_mean"]) == 1.5
    with pytest.raises(CheckpointError, match=r"norm\.running_mean holds NaN in .*c"):
        average_checkpoints([tmp_path / "a", tmp_path / "c"], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_input_is_never_the_output(tmp_path: Path) -> None:
    first, second = make(tmp_path / "x", 1.0), make(tmp_path / "y", 2.0)
    with pytest.raises(ValueError, match="one of the checkpoints"):
        average_checkpoints([first, second], first, overwrite=True)
    assert (first / "averages.pt").exists()


def test_damaged_weights_write_nothing(tmp_path: Path) -> None:
    first, second = make(tmp_path / "x", 1.0), tmp_path / "y"
    second.mkdir()
    save_file({"a": torch.ones(3, 2)}, second / "model.safetensors")
    with (second / "model.safetensors").open("r+b") as file:
        file.truncate(20)
    with pytest.raises(CheckpointError):
        average_checkpoints([first, second], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_greedy_soup_takes_what_helps(tmp_path: Path) -> None:
    places = [make(tmp_path / name, value) for name, value in (("x", 1.0), ("y", 9.0), ("z", 4.0))]

    def distance(folder: str) -> float:  # from 2.4
        weights = {}
        for path in Path(folder).glob("*.safetensors"):
            weights.update(load_file(path))
        return abs(float(weights["a"][0, 0]) - 2.4)

    soup = greedy_soup(places, distance, tmp_path / "out", greater_is_better=False)
    assert soup.chosen == [str(places[0]), str(places[2])]
    assert soup.metric == pytest.approx(0.1)
    assert distance(str(tmp_path / "out")) == pytest.approx(0.1)
    assert json.loads((tmp_path / "out" / "soup.json").read_text())["method"] == "greedy"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "x", "y", "z"]
    with pytest.raises(FileExistsError):
        greedy_soup(places, distance, tmp_path / "out")


def test_a_greedy_soup_by_the_evaluation_of_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "module", "job.yaml"]) == 0
    for name, rate in (("good", "1e-2"), ("better", "2e-2"), ("bad", "1e-5")):
        options = ["--max_steps", "20", "--learning_rate", rate, "--output_dir", name, "--report_to", "none"]
        assert main(["train", "job.yaml", *options]) == 0
    capsys.readouterr()
    assert main(["average", "bad", "good", "better", "-o", "soup", "--greedy", "job.yaml"]) == 0
    told = capsys.readouterr().out
    made = json.loads(Path("soup/soup.json").read_text("utf-8"))
    assert made["metric"] >= max(made["metrics"].values())
    assert f"eval_accuracy {made['metric']:.6g}  soup" in told
    assert main(["average", "good", "better", "-o", "soup", "--greedy", "job.yaml"]) == 2  # it exists
    assert main(["average", "good", "better", "-o", "other", "--greedy", "none.yaml"]) == 2
    assert main(["average", "good", "better", "-o", "other", "--greedy", "job.yaml", "--overwrite"]) == 2
    assert not Path("other").exists()
