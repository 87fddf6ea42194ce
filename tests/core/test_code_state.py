import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.args.secrets import MASK
from paceline.core.code_state import MOST_BYTES, mask_lines, read_changes
from paceline.core.record import git_state

KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA7v\nabcdefgh\n-----END RSA PRIVATE KEY-----\n"


def git(folder: Path, *words: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("rate = 1\n" + KEY)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "a")
    return tmp_path


def test_changes_are_a_diff_and_untracked_files(repository: Path) -> None:
    assert read_changes(repository) == ({"diff": None, "untracked": {}}, "")
    (repository / "code.py").write_text("rate = 2\n" + KEY)
    (repository / "new.py").write_text("x = 1\n")
    (repository / "data.txt").write_text("no code")
    entries, diff = read_changes(repository)
    assert "-rate = 1\n+rate = 2\n" in diff
    assert entries["diff"]["bytes"] == len(diff)
    assert entries["diff"]["is_cut"] is False
    assert list(entries["untracked"]) == ["new.py"]
    git(repository, "add", ".")
    staged, diff = read_changes(repository)
    assert staged["untracked"] == {}
    assert "+x = 1\n" in diff


def test_programs_named_by_a_repository_are_not_run(repository: Path) -> None:
    trap = repository / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {repository}/sprung\n")
    trap.chmod(0o755)
    for name in ("core.fsmonitor", "diff.external", "diff.own.textconv"):
        git(repository, "config", name, str(trap))
    (repository / ".gitattributes").write_text("*.py diff=own\n")
    (repository / "code.py").write_text("rate = 2\n")
    state = git_state(repository)
    assert state is not None
    assert state["dirty"]
    assert "+rate = 2\n" in read_changes(repository)[1]
    assert not (repository / "sprung").exists()


def test_secrets_in_a_diff_are_masked(repository: Path) -> None:
    (repository / "code.py").write_text('rate = 1\napi_key = "s3cret-value-1234"\ntoken: hf_' + "A1b2" * 6 + "\n")
    _, diff = read_changes(repository)
    assert MASK in diff
    for secret in ("s3cret", "A1b2", "MIIEow", "abcdefgh"):
        assert secret not in diff
    assert "rate = 1" in diff


def test_keys_are_masked_to_their_end_or_that_of_the_file() -> None:
    added = "".join(f"+{line}\n" for line in KEY.splitlines())
    assert mask_lines(f"+a\n{added}+b\n") == f"+a\n+{MASK}\n+b\n"
    assert mask_lines("+-----BEGIN PRIVATE KEY-----\n+secret\ndiff --git a b\n") == f"+{MASK}\ndiff --git a b\n"
    assert mask_lines("") == ""


@pytest.mark.slow
def test_a_large_diff_is_cut_at_a_line_and_says_so(repository: Path) -> None:
    (repository / "code.py").write_text("".join(f"value_{number} = {number}\n" for number in range(100_000)))
    begun = time.perf_counter()
    entries, diff = read_changes(repository)
    assert time.perf_counter() - begun < 20
    assert entries["diff"]["is_cut"] is True
    lines = diff.splitlines()
    assert lines[-1].startswith("# cut: the diff is larger than 1,000,000 bytes")
    assert lines[-3].startswith("+value_")
    assert len(diff) < MOST_BYTES + 200


def test_without_git_there_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_changes(tmp_path) == ({}, "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_changes(tmp_path) == ({}, "")


def test_a_git_that_hangs_is_ended(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A git whose diff never answers."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "git").write_text('#!/bin/sh\ncase "$*" in *diff*) exec sleep 60;; *) echo x;; esac\n')
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr("paceline.core.record.GIT_SECONDS", 0.2)
    begun = time.perf_counter()
    entries, diff = read_changes(repository)
    assert time.perf_counter() - begun < 5
    assert "git diff failed" in entries["note"]
    assert diff == ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere Python may start programs in another way")
def test_git_is_read_without_a_pipe(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is forked while one is open holds it open, and the record would wait for the end of the worker."""
    (repository / "code.py").write_text("changed = True\n")

    def pipe() -> Any:
        raise AssertionError("a pipe")

    monkeypatch.setattr(os, "pipe", pipe)
    assert git_state(repository) is not None
    assert "changed = True" in read_changes(repository)[1]
