"""`paceline verify`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.checkpoint.folders import staged
from paceline.cli.main import main


def make(run: Path, *steps: int) -> None:
    for step in steps:
        with staged(run / f"checkpoint-{step}") as folder:
            (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
            (folder / "trainer_state.json").write_text("{}")


def test_a_good_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, 2, 10)
    assert main(["verify", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("checkpoint-2   good     10.")
    assert lines[1].startswith("checkpoint-10  good")
    assert lines[2].startswith("2 checked, 0 damaged")


def test_a_flipped_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, 2, 4)
    path = tmp_path / "checkpoint-4" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    (tmp_path / "checkpoint-2" / "notes.txt").write_text("mine")
    (tmp_path / ".checkpoint-6.incomplete-1").mkdir()
    assert main(["verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "DAMAGED  model.safetensors is damaged: checksum mismatch" in out
    assert "not in its manifest: notes.txt" in out
    assert ".checkpoint-6.incomplete-1: being written, or left by a crash" in out
    assert "a resume takes checkpoint-2" in out
    assert main(["verify", str(tmp_path / "checkpoint-2")]) == 0
    assert main(["verify", str(tmp_path / "checkpoint-2"), str(tmp_path / "checkpoint-4")]) == 1


def test_results_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, 2, 4)
    (tmp_path / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    assert main(["verify", str(tmp_path), "--json"]) == 1
    good, bad = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (good["checkpoint"], good["is_good"], good["problems"]) == (str(tmp_path / "checkpoint-2"), True, [])
    assert good["bytes"] > 10240
    assert good["has_manifest"]
    assert good["is_of_last_run"]
    assert not bad["is_good"]
    assert "model.safetensors" in bad["problems"][0]
    assert main(["verify", "--json", str(tmp_path / "checkpoint-2")]) == 0
    assert main(["verify", "--json"]) == 2


def test_a_checkpoint_of_another_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")
    assert main(["verify", str(tmp_path)]) == 0
    assert "only its structure could be checked" in capsys.readouterr().out


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], [str(tmp_path)], [str(tmp_path / "none")], ["--fast"]):
        assert main(["verify", *words]) == 2
    assert "has no checkpoints" in capsys.readouterr().err
    assert main(["verify", "--help"]) == 0
    assert "paceline verify RUN" in capsys.readouterr().out


def test_it_loads_no_torch(tmp_path: Path) -> None:
    make(tmp_path, 1)
    code = (
        "import sys; from paceline.cli.main import main; code = main(['verify', sys.argv[1]]);"
        "assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
