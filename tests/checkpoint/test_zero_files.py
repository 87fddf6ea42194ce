"""Reading what DeepSpeed wrote: parts of stage 3 put together, and nothing run that a file holds."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.tensors import CheckpointError
from paceline.checkpoint.zero_files import has_zero_files, read_zero_files

SHAPES = OrderedDict(first=torch.Size([3, 2]), second=torch.Size([5]))


def parts_of(values: dict[str, torch.Tensor], rank: int) -> torch.Tensor:
    """What a process of two holds of each parameter, the last part filled up with zeros."""
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
