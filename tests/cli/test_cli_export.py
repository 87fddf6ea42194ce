"""`paceline export`: checkpoints of every form become folders that are whole, or not there."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from shard_folders import write
from small_models import Classifier, classification, make_trainer

from paceline.checkpoint import folders
from paceline.cli.export import parse_size
from paceline.cli.main import main
from paceline.pytorch.checkpoint import safetensors_file, streaming
from paceline.pytorch.checkpoint.weights import read_weights, write_weights


@pytest.fixture
def run(tmp_path: Path) -> Path:
    trainer = make_trainer(
        tmp_path / "run", Classifier(), classification(16), save_strategy="steps", save_steps=2,
        checkpoint_format="sharded",
    )  # fmt: skip
    trainer.train()
    (tmp_path / "run" / "checkpoint-4" / "notes.txt").write_text("mine")
    return tmp_path / "run"


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def expected(checkpoint: Path) -> dict[str, torch.Tensor]:
    source = streaming.open_weights(checkpoint)
    return {name: source.read(name) for name in source.forms}


def test_a_run_in_shards(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--max-shard-size", "300b"]) == 0
    said = capsys.readouterr()
    assert "4 tensors" in said.out
    assert "has no config.json" in said.err
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors.index.json", "model-00001-of-00003.safetensors", "notes.txt"} <= files
    assert not {"optimizer_0", "trainer_state.json", "scheduler.pt", "sharded.json"} & files
    assert folders.verify(tmp_path / "out") == []
    weights = read_weights(tmp_path / "out")
    assert weights is not None
    for name, value in expected(run / "checkpoint-4").items():
        assert torch.equal(weights[name], value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20)
@given(limit=st.integers(1, 2000), data=st.data())
def test_what_is_streamed_is_what_safetensors_reads(tmp_path: Path, limit: int, data: st.DataObject) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn]
    state = {
        f"part.{index}": torch.randint(0, 2, data.draw(st.sampled_from([(), (3,), (2, 5), (0, 4)]))).to(dtype)
        for index, dtype in enumerate(data.draw(st.lists(st.sampled_from(dtypes), min_size=1, max_size=7)))
    }
    out = tmp_path / "out"
    source = streaming.open_weights(write(tmp_path / "shards", state))
    names = streaming.write_stream(source, out, max_shard_bytes=limit)
    found = [load_file(out / name) for name in names if name.endswith(".safetensors")]
    merged = {key: value for part in found for key, value in part.items()}
    assert merged.keys() == state.keys()
    for name, value in state.items():
        assert merged[name].dtype == value.dtype
        assert torch.equal(merged[name].view(torch.uint8) if value.dim() else merged[name].float(),
                           value.view(torch.uint8) if value.dim() else value.float())  # fmt: skip
    for part, name in zip(found, names, strict=False):
        assert len(part) == 1 or sum(value.nbytes for value in part.values()) <= limit, name


def test_a_tensor_is_released_before_the_next_is_read(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def read(name: str) -> torch.Tensor:
        assert not [each for each in alive if each() is not None]
        tensor = torch.zeros(4)
        alive.append(weakref.ref(tensor))
        return tensor

    forms = {f"part.{index}": (torch.Size([4]), torch.float32) for index in range(3)}
    safetensors_file.write_file(tmp_path / "model.safetensors", forms, read, {})
    assert len(alive) == 3


def test_whole_checkpoints_and_pickled_ones(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    state = {"a": weight, "again": weight, "b": torch.ones(2, dtype=torch.complex64)}
    write_weights(state, tmp_path / "one", max_shard_bytes=10**9)
    write_weights({"a": weight, "c": torch.ones(3)}, tmp_path / "many", max_shard_bytes=20)
    (tmp_path / "pickled").mkdir()
    torch.save(state, tmp_path / "pickled" / "pytorch_model_fsdp.bin")
    for name in ("one", "many", "pickled"):
        assert main(["export", str(tmp_path / name), str(tmp_path / f"{name}-out")]) == 0
        weights = read_weights(tmp_path / f"{name}-out")
        assert weights is not None
        assert torch.equal(weights["a"], weight)
        if name != "many":
            assert weights["again"] is weights["a"]
            assert torch.equal(weights["b"], state["b"])


def test_what_cannot_be_done_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    (tmp_path / "empty").mkdir()
    for words, text in (
        ([str(run), str(tmp_path / "full")], "already exists: name a folder that is new or empty"),
        ([str(run)], "export needs a checkpoint and an output folder"),
        ([str(tmp_path / "none"), str(tmp_path / "out")], "is not a folder"),
        ([str(run), str(tmp_path / "out"), "--max-shard-size", "much"], "--max-shard-size much is not a size"),
        ([str(run), str(tmp_path / "out"), "--files-from", str(tmp_path / "none")], "--files-from"),
        ([str(tmp_path / "empty"), str(tmp_path / "out")], "holds no weights that can be exported"),
    ):
        assert main(["export", *words]) in (1, 2)
        assert text in capsys.readouterr().err
    path = next((run / "checkpoint-4" / "pytorch_model_fsdp_0").glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-3])
    assert main(["export", str(run / "checkpoint-4"), str(tmp_path / "out")]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_full_disk_and_an_interrupt_leave_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    octets = safetensors_file.octets
    for error, code in ((OSError(errno.ENOSPC, "No space left on device"), 1), (KeyboardInterrupt(), 130)):

        def refuse(tensor: Any, error: BaseException = error) -> Any:
            if tensor.numel() == 16:
                raise error
            return octets(tensor)

        monkeypatch.setattr(safetensors_file, "octets", refuse)
        try:
            assert main(["export", str(run), str(tmp_path / "out")]) == code
        except OSError as refused:
            assert refused.errno == errno.ENOSPC  # noqa: PT017, raised by the test itself, so shown as it is
        monkeypatch.undo()
        assert not (tmp_path / "out").exists()
        assert hidden(tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_an_export_that_is_killed_is_cleared_by_the_next(run: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from paceline.pytorch.checkpoint import safetensors_file\n"
        "from paceline.cli.main import main\n"
        "safetensors_file.octets = lambda tensor: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main(sys.argv[1:])"
    )
    words = ["export", str(run), str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", code, *words], env=os.environ, capture_output=True, timeout=200)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert len(hidden(tmp_path)) == 1
    assert main(words) == 0
    assert hidden(tmp_path) == []


def test_configuration_is_taken_from_another_folder(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "weights" / "model.safetensors")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "base" / "model.safetensors").write_text("not taken")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "weights"), str(out), "--files-from", str(tmp_path / "base")]) == 0
    assert (out / "config.json").read_text() == "{}"
    assert load_file(out / "model.safetensors").keys() == {"a"}


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("2GiB", 2**31), ("500mb", 5 * 10**8), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
