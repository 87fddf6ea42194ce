"""Names and links that lead out of a folder: of stores, checkpoints, exports and pushes."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import folders, manifest
from paceline.checkpoint.inside import is_inner_name, leads_outside
from paceline.checkpoint.remote_sync import files_beside
from paceline.checkpoint.stores import ObjectStore, bring_files
from paceline.cli import export, verify
from paceline.cli.errors import UsageError
from paceline.hub.contents import files_of_output

OUTSIDE = (
    "../a", "a/../../b", "a/..", "/a", "//a", "C:/a", "c:a", "\\\\a", "..\\a", "a\\..\\b", "a//b", "a/", "./a", ".",
    "..", "", "a\0b", "a/\ud800", "x" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_that_lead_elsewhere(name: str) -> None:
    assert not is_inner_name(name)


@pytest.mark.parametrize("name", ["a", "a/b.bin", ".metadata", "a b/c", "\u00e9", "...", "a..b", "ab:c"])
def test_names_below_a_folder(name: str) -> None:
    assert is_inner_name(name)


class Listed(ObjectStore):
    """A store that lists what it is told to, and gives the same content for everything."""

    def __init__(self, names: list[str]) -> None:
        self.url, self.listed = "memory://bucket/run", names

    def names(self, below: str = "") -> list[str]:
        return [name for name in self.listed if name.startswith(below)]

    def files_beside(self) -> list[str]:
        return self.listed

    def download(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


@pytest.mark.parametrize("name", [name for name in OUTSIDE if name])
def test_objects_of_a_checkpoint_are_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    run = tmp_path / "deep" / "run"
    run.mkdir(parents=True)
    store = Listed(["checkpoint-4/a", f"checkpoint-4/{name}"])
    problems = store.download_checkpoint("checkpoint-4", run / "checkpoint-4")
    assert len(problems) == 1
    assert "not a file of a checkpoint" in problems[0]
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["deep", "deep/run"]


def test_objects_beside_the_checkpoints_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "deep" / "run"
    run.mkdir(parents=True)
    (run / "link").symlink_to(tmp_path)
    bring_files(Listed([*OUTSIDE, "link/a", "log.jsonl", "logs/a"]), run)
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert made == ["deep/run/log.jsonl", "deep/run/logs/a"]
    assert len(caplog.records) == len(OUTSIDE) + 1


# ---- links


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "key").write_text("secret")
    return tmp_path / "home" / "key"


def checkpoint(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, content in {"trainer_state_json": "{}", **files}.items():
        (folder / name.replace("_json", ".json")).write_text(content)
    return folder


def test_links_out_of_a_checkpoint_are_damage(tmp_path: Path, secret: Path) -> None:
    for is_sealed in (True, False):
        folder = checkpoint(tmp_path / str(is_sealed) / "checkpoint-1", a="1")
        (folder / "inner").symlink_to(folder / "a")
        (folder / "vocab.json").symlink_to(secret)
        if is_sealed:
            folders.seal(folder)
        assert folders.verify(folder) == ["vocab.json is a link to a file outside of the folder"]
        assert folders.newest_valid(folder.parent, lambda sentence: None) is None


def test_the_cache_of_the_hub_is_made_of_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1").write_text("{}")
    (snapshot / "config.json").symlink_to(blobs / "1")
    assert not leads_outside(snapshot / "config.json", snapshot)
    assert [path.name for path in export.chosen_files(snapshot, None)] == ["config.json"]


def test_export_takes_no_links_out(tmp_path: Path, secret: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoint(tmp_path / "checkpoint-1", config_json="{}")
    (folder / "tokenizer.json").symlink_to(secret)
    assert [path.name for path in export.chosen_files(folder, None)] == ["config.json"]
    assert "tokenizer.json is a link to a file outside" in caplog.text
    (folder / "model.safetensors").symlink_to(secret)
    with pytest.raises(UsageError, match=r"model\.safetensors is a link to a file outside"):
        export.find(folder)


def test_links_out_are_neither_pushed_nor_uploaded(tmp_path: Path, secret: Path) -> None:
    run = tmp_path / "run"
    (run / "inner").mkdir(parents=True)
    (run / "a").write_text("1")
    (run / "key").symlink_to(secret)
    (run / "inner" / "key").symlink_to(secret)
    (run / "b").symlink_to(run / "a")
    assert sorted(files_of_output(run)) == sorted(files_beside(run)) == ["a", "b"]


# ---- what verify meets


def sealed(folder: Path, files: Any) -> None:
    (folder / manifest.MANIFEST_NAME).write_bytes(manifest._manifest_bytes(files))


def entry(size: Any = 1) -> dict[str, Any]:
    return {"size": size, "sha256": hashlib.sha256(b"1").hexdigest()}


def sparse(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


MANIFESTS: dict[str, Any] = {
    "names": {"a\ud800": entry()},
    "nul": {"a\0": entry()},
    "long": {"x" * 300: entry()},
    "outside": {"../a": entry()},
    "drive": {"C:a": entry()},
    "huge size": {"a": entry(10**400)},
    "negative": {"a": entry(-1)},
    "truth": {"a": entry(True)},
    "not a number": {"a": entry(float("nan"))},
    "text": {"a": entry("1")},
    "list": ["a"],
    "number": 5,
    "hash": {"a": {"size": 1, "sha256": 5}},
    "no entry": {"a": None},
}


@pytest.mark.parametrize("case", sorted(MANIFESTS))
def test_manifests_of_any_content(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint(tmp_path / "checkpoint-1", a="1")
    sealed(folder, MANIFESTS[case])
    assert folders.verify(folder)
    assert folders.extra_files(folder)
    assert folders.newest_valid(tmp_path, lambda sentence: None) is None
    assert verify.run([str(tmp_path)]) == 1
    assert "DAMAGED" in capsys.readouterr().out


BYTES: dict[str, bytes] = {
    "depth": b"[" * 200_000,
    "objects": b'{"a":' * 200_000,
    "digits": b'{"files": ' + b"9" * 100_000 + b"}",
    "nan": b"NaN",
    "null": b"null",
    "not text": b"\xff\xfe\x00",
    "surrogate": b'{"files": {"\\ud800": {"size": 1, "sha256": ""}}, "format": 1}',
    "empty": b"",
}


@pytest.mark.parametrize("name", ["manifest.json", "trainer_state.json", "model.safetensors.index.json", "config.json"])
@pytest.mark.parametrize("case", sorted(BYTES))
def test_json_of_any_content(tmp_path: Path, name: str, case: str) -> None:
    folder = checkpoint(tmp_path / "checkpoint-1")
    (folder / name).write_bytes(BYTES[case])
    problems = folders.verify(folder)
    assert problems or case in ("nan", "null") or (case == "surrogate" and name != "manifest.json")
    assert all(isinstance(problem, str) for problem in problems)


@pytest.mark.parametrize("name", ["manifest.json", "trainer_state.json", "model.safetensors", "optimizer.pt", "a"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "sparse", "dangling", "loop", "unreadable"])
def test_anything_in_the_place_of_a_file(tmp_path: Path, name: str, kind: str) -> None:
    folder = checkpoint(tmp_path / "checkpoint-1")
    if name == "a":
        sealed(folder, {"a": entry()})
    path = folder / name
    path.unlink(missing_ok=True)
    make = {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "sparse": lambda: sparse(path, 1 << 40),
        "dangling": lambda: path.symlink_to(tmp_path / "nowhere"),
        "loop": lambda: path.symlink_to(path),
        "unreadable": lambda: (path.write_text("x"), path.chmod(0)),
    }
    make[kind]()
    problems = folders.verify(folder)
    is_seen = name in ("manifest.json", "trainer_state.json", "a") or (kind == "sparse" and name != "optimizer.pt")
    assert problems or not is_seen or (os.geteuid() == 0 and kind == "unreadable")
    assert verify.run([str(tmp_path)]) == int(bool(problems))


def test_shards_of_any_name(tmp_path: Path) -> None:
    for name in ("../a", "a\0", "x" * 300, "\ud800", "/etc/passwd"):
        folder = checkpoint(tmp_path / str(len(os.listdir(tmp_path))))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        assert len(folders.verify(folder)) == 1


def test_names_that_cannot_be_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint(tmp_path / "checkpoint-1")
    folders.seal(folder)
    with open(os.fsencode(folder) + b"/odd-\xff", "wb") as file:
        file.write(b"1")
    assert verify.run([str(folder)]) == 0
    assert "not in its manifest: odd-\\udcff" in capsys.readouterr().out


def test_damaged_archives(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-1")
    with zipfile.ZipFile(folder / "optimizer.pt", "w") as file:
        file.writestr("archive/data.pkl", b"x" * 50)
    content = (folder / "optimizer.pt").read_bytes()
    for place in range(len(content)):
        for value in (0, 0xFF):
            (folder / "optimizer.pt").write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
            assert all(isinstance(problem, str) for problem in folders.verify(folder))
