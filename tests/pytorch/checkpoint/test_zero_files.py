"""Reading what DeepSpeed wrote: parts of stage 3 put together, and nothing run that a file holds."""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.main import main
from paceline.pytorch.checkpoint.tensors import CheckpointError
from paceline.pytorch.checkpoint.weights import read_weights
from paceline.pytorch.checkpoint.zero_files import cut, has_zero_files, read_zero_files

SHAPES = OrderedDict(first=torch.Size([3, 2]), second=torch.Size([5]))


def parts_of(values: dict[str, torch.Tensor], rank: int) -> torch.Tensor:
    """Returns the shard of each parameter on one of two processes, the last one padded with zeros."""
    pieces = []
    for value in values.values():
        size = -(-value.numel() // 2)
        padded = torch.cat([value.flatten(), torch.zeros(2 * size - value.numel())])
        pieces.append(padded[rank * size : (rank + 1) * size])
    return torch.cat(pieces)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "global_step7"
    folder.mkdir()
    (tmp_path / "latest").write_text("global_step7")
    for rank in (0, 1):
        base = {
            "state": {0: {"step": torch.tensor(7.0), "exp_avg": parts_of(values(1), rank)}},
            "param_groups": [{"lr": 0.5, "params": [0]}],
        }
        part = {
            "zero_stage": 3,
            "partition_count": 2,
            "fp32_flat_groups": [parts_of(values(0), rank)],
            "optimizer_state_dict": base,
        }
        torch.save({"optimizer_state_dict": part}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model = {
            "module": {"first": torch.zeros(0), "second": torch.zeros(0), "buffer": torch.arange(3)},
            "param_shapes": [SHAPES],
            "frozen_param_shapes": {"still": torch.Size([3])},
            "frozen_param_fragments": {"still": torch.tensor([[1.0, 2.0], [3.0, 0.0]][rank])},
            "shared_params": {"tied": "first"},
        }
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    return tmp_path


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def test_parts_are_put_together(checkpoint: Path) -> None:
    assert has_zero_files(checkpoint)
    files = read_zero_files(checkpoint)
    weights, expected = files.weights(), values(0)
    assert weights.keys() == {"first", "second", "buffer", "still", "tied"}
    for name, value in {**expected, "tied": expected["first"], "still": torch.tensor([1.0, 2.0, 3.0])}.items():
        assert torch.equal(weights[name], value)
    state = files.optimizer()
    assert state["param_groups"] == [{"lr": 0.5, "params": ["first", "second"]}]
    for name, value in values(1).items():
        assert torch.equal(state["state"][name]["exp_avg"], value)
        assert float(state["state"][name]["step"]) == 7


def test_a_checkpoint_is_exported(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "zero_to_fp32.py").write_text("")
    out = tmp_path / "out"
    assert main(["export", str(checkpoint), str(out), "--max-shard-size", "40b"]) == 0
    assert {path.name for path in out.iterdir()} >= {"config.json", "model-00001-of-00003.safetensors"}
    assert not {"latest", "zero_to_fp32.py", "global_step7"} & {path.name for path in out.iterdir()}
    expected, found = read_zero_files(checkpoint).weights(), read_weights(out)
    assert found is not None
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_values_that_lie_in_several_tensors() -> None:
    tensors = [torch.arange(3), torch.zeros(0), torch.arange(3, 5), torch.arange(5, 10)]
    for start, size in ((0, 10), (2, 4), (3, 2), (9, 1), (4, 0)):
        pieces = [torch.zeros(0, dtype=torch.int64), *cut(tensors, start, size)]
        assert torch.cat(pieces).tolist() == list(range(start, start + size))


def make_universal(checkpoint: Path, stage: int) -> Path:
    """The other form of the same, as DeepSpeed's tool writes it; stage 3 leaves shapes and steps out."""
    parts, folder = checkpoint / "global_step7", checkpoint / "global_step7_universal"
    (folder / "zero").mkdir(parents=True)
    common: dict[str, Any] = {"zero_stage": stage, "param_groups": [{"lr": 0.5, "params": [0]}]}
    if stage == 3:
        state = {0: {"step": torch.tensor(7.0), "exp_avg": parts_of(values(1), 0)}}
        common["optimizer_state_dict"] = {"state": state, "param_groups": common["param_groups"]}
        for path in parts.glob("*model_states.pt"):
            shutil.copy(path, folder)
    else:
        module = {**values(0), "buffer": torch.arange(3), "unused": torch.ones(2), "still": torch.ones(3)}
        shapes = OrderedDict(**SHAPES, unused=torch.Size([2]))
        model = {"module": module, "param_shapes": [shapes], "shared_params": {"tied": "first"}}
        torch.save(model, folder / "mp_rank_00_model_states.pt")
    torch.save(common, folder / "zero" / "optimizer_state.pt")
    for name in SHAPES:
        (folder / "zero" / name).mkdir()
        for key, seed in (("fp32", 0), ("exp_avg", 1)):
            value = values(seed)[name]
            stored = value.flatten() if stage == 3 else {"param": value, "cat_dim": 0}
            torch.save(stored, folder / "zero" / name / f"{key}.pt")
        if stage < 3:
            torch.save(torch.tensor(7.0), folder / "zero" / name / "step.pt")
    (checkpoint / "latest_universal").write_text(folder.name)
    shutil.rmtree(parts)
    return folder


@pytest.mark.parametrize("stage", [2, 3])
def test_the_universal_form(checkpoint: Path, tmp_path: Path, stage: int) -> None:
    expected = read_zero_files(checkpoint).optimizer()
    make_universal(checkpoint, stage)
    for has_latest in (True, False):  # it names a folder that is gone, or is itself gone
        if not has_latest:
            (checkpoint / "latest").unlink()
        assert has_zero_files(checkpoint)
        files = read_zero_files(checkpoint)
        weights, state = files.weights(), files.optimizer()
        assert weights["tied"] is weights["first"]
        assert all(torch.equal(weights[name], value) for name, value in values(0).items())
        assert state["param_groups"][0]["params"] == ["first", "second", *(["unused"] if stage == 2 else [])]
        assert state["state"].keys() == expected["state"].keys()
        for name, entry in expected["state"].items():
            assert state["state"][name].keys() == entry.keys()
            assert all(torch.equal(state["state"][name][key], value) for key, value in entry.items())
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    found = read_weights(tmp_path / "out")
    assert found is not None
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_a_universal_form_that_is_not_read(checkpoint: Path) -> None:
    folder = make_universal(checkpoint, 2)
    name = "mp_rank_00_model_states.pt"
    (folder / "zero" / "first" / "fp32.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"fp32\.pt is damaged"):
        read_zero_files(checkpoint).weights()
    shutil.copy(folder / name, folder / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="no universal form of ZeRO alone"):
        read_zero_files(checkpoint)
    (folder / "mp_rank_01_model_states.pt").unlink()
    model = {"module": {}, "param_shapes": [{"../../../elsewhere": torch.Size([1])}]}
    torch.save(model, folder / name)
    with pytest.raises(CheckpointError, match="not inside the folder"):
        read_zero_files(checkpoint).weights()
    (folder / "zero" / "optimizer_state.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer_state\.pt is missing"):
        read_zero_files(checkpoint)


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


def test_nothing_in_a_file_is_run(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint)
    path = checkpoint / "global_step7" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": Harmful()}, path)
    with pytest.raises(CheckpointError, match=r"rank_1.* not read for safety: put the weights together"):
        read_zero_files(checkpoint)
    assert not Path("harmed").exists()


def test_what_is_missing_is_named(checkpoint: Path) -> None:
    path = checkpoint / "global_step7" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.rename(path.with_name("zero_pp_rank_1_mp_rank_01_optim_states.pt"))
    with pytest.raises(CheckpointError, match="holds no parts of ZeRO alone"):
        read_zero_files(checkpoint)
    path.with_name("zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"1 files of parts, of \[2\]"):
        read_zero_files(checkpoint)
    (checkpoint / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="not a folder of the checkpoint"):
        read_zero_files(checkpoint)
