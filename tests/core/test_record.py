import json
import os
import subprocess
import sys
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

import pytest

from paceline.args.secrets import MASK, mask_command
from paceline.core.record import git_state, jsonable, library_versions, write_run_record


def write(folder: Path, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"args_dict": {}, "plan_dict": {}, "seeds": {}, **changes}
    record: dict[str, Any] = json.loads(write_run_record(folder, **values).read_text())
    return record


def test_holds_what_tells_a_run(tmp_path: Path) -> None:
    record = write(tmp_path / "new", args_dict={"lr": 0.1}, plan_dict={"steps": 3}, seeds={"seed": 42}, extra={"a": 1})
    assert record["arguments"] == {"lr": 0.1}
    assert record["plan"] == {"steps": 3}
    assert record["seeds"] == {"seed": 42}
    assert record["extra"] == {"a": 1}
    assert record["versions"]["numpy"]
    assert record["python"] == sys.version.split()[0]
    assert record["history"] == []
    assert record["started"].endswith("+00:00")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run.json"]


def test_odd_bytes_of_names_come_back(tmp_path: Path) -> None:
    """A folder of bytes that are no UTF-8, or of any accent where the locale is C."""
    name = os.fsdecode(b"r\xe9sum\xc3\xa9")
    assert write(tmp_path, args_dict={"output_dir": name})["arguments"] == {"output_dir": name}
    assert write(tmp_path)["history"][0]["arguments"] == {"output_dir": name}


def test_earlier_runs_stay_in_order(tmp_path: Path) -> None:
    for number in range(3):
        record = write(tmp_path, seeds={"seed": number})
    assert record["seeds"] == {"seed": 2}
    assert [earlier["seeds"]["seed"] for earlier in record["history"]] == [0, 1]
    assert all("history" not in earlier for earlier in record["history"])


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"history": 3}', b"\xff\xfe"])
def test_a_damaged_record_is_kept_beside(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run.json").write_bytes(content)
    assert write(tmp_path)["history"] == []
    kept = [path for path in tmp_path.iterdir() if "unreadable" in path.name]
    assert kept[0].read_bytes() == content
    assert kept[0].name in caplog.text


def test_a_failed_write_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, seeds={"seed": 1})

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, seeds={"seed": 2})
    assert json.loads((tmp_path / "run.json").read_text())["seeds"] == {"seed": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_secrets_never_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_" + "A1b2" * 6
    monkeypatch.setattr(
        sys, "argv", ["train.py", "--hub_token", "s3cret", "--api-key=s3cret", f"--name={token}", "--n=1"]
    )
    arguments = {
        "hub_token": "s3cret",
        "nested": {"password": "s3cret", "note": f"use {token}"},
        "url": "https://me:s3cret@host/x",
        "include_num_input_tokens_seen": "all",
        "push_to_hub_token": "<PUSH_TO_HUB_TOKEN>",
        "token": None,
    }
    record = write(tmp_path, args_dict=arguments)
    text = json.dumps(record)
    assert "s3cret" not in text
    assert token not in text
    assert record["arguments"]["include_num_input_tokens_seen"] == "all"
    assert record["arguments"]["push_to_hub_token"] == "<PUSH_TO_HUB_TOKEN>"
    assert record["command"][1:] == ["train.py", "--hub_token", MASK, f"--api-key={MASK}", f"--name={MASK}", "--n=1"]


def test_an_option_after_a_bare_secret_option_stays() -> None:
    assert mask_command(["--token", "--lr", "1"]) == ["--token", "--lr", "1"]


def test_values_become_strict_json() -> None:
    class Color(Enum):
        RED = "red"

    class Name(StrEnum):
        A = "a"

    value = {"e": Color.RED, "n": Name.A, "p": Path("x"), "nan": float("nan"), "s": {2, 1}, "t": (1, [2.5]), 3: None}
    plain = jsonable(value)
    assert plain == {"e": "red", "n": "a", "p": "x", "nan": "nan", "s": [1, 2], "t": [1, [2.5]], "3": None}
    assert type(plain["n"]) is str


def test_versions_without_importing() -> None:
    assert library_versions(["numpy", "no-such-distribution"]).keys() == {"numpy"}
    code = "import sys, paceline.core.record as r; r.library_versions(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_git_state(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        names = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *names, *words], cwd=tmp_path, check=True, capture_output=True)

    try:
        git("init", "-q")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("git is missing")
    assert git_state(tmp_path) is None
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    state = git_state(tmp_path)
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "untracked").write_text("1")
    assert git_state(tmp_path) == state
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == {**state, "dirty": True}


def test_no_git_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None
