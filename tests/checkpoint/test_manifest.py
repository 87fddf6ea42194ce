import json
import os
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.checkpoint import manifest
from paceline.checkpoint.manifest import MANIFEST_NAME, entry_of, extra_files, hash_and_sync, seal, verify


def fill(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(bytes(range(256)))
    (folder / "sub" / "state.json").write_text('{"step": 3}')
    (folder / "empty").write_bytes(b"")
    seal(folder)
    return folder


def safetensors_bytes(payload: bytes = b"\0" * 16) -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, len(payload)]}}).encode()
    return struct.pack("<Q", len(header)) + header + payload


def test_sealed_folder_is_good_and_lists_all_files(tmp_path: Path) -> None:
    folder = fill(tmp_path / "c")
    assert verify(folder) == []
    assert extra_files(folder) == []
    listed = json.loads((folder / MANIFEST_NAME).read_text())["files"]
    assert sorted(listed) == ["empty", "sub/state.json", "weights.bin"]
    assert listed["weights.bin"]["size"] == 256


def test_weights_beside_those_of_the_manifest_hide_no_damage(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"listed")
    seal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"broken")
    (folder / "model.safetensors").write_bytes(safetensors_bytes())
    assert "pytorch_model.bin is damaged" in verify(folder)[0]


def test_a_file_that_is_known_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = entry_of(fill(tmp_path / "c") / "weights.bin")
    assert known is not None
    assert entry_of(tmp_path / "c" / "other") is None
    assert entry_of(tmp_path / "none" / "weights.bin") is None
    again = tmp_path / "again"
    again.mkdir()
    os.link(tmp_path / "c" / "weights.bin", again / "weights.bin")
    (again / "with the next name").write_bytes(b"1")
    hashed: list[str] = []

    def note(path: Path) -> tuple[str, int]:
        hashed.append(path.name)
        return hash_and_sync(path)

    monkeypatch.setattr(manifest, "hash_and_sync", note)
    seal(again, {"weights.bin": known})
    assert hashed == ["with the next name"]
    assert verify(again) == []


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    folder = fill(tmp_path / "c")
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            continue
        content = path.read_bytes()
        for position in range(len(content)):
            changed = bytearray(content)
            changed[position] ^= 1 << (position % 8)
            path.write_bytes(changed)
            problems = verify(folder)
            assert problems, f"byte {position} of {path.name}"
            assert path.name in problems[0]
        path.write_bytes(content)
    assert verify(folder) == []


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.binary(max_size=200))
def test_random_manifest_never_passes_nor_raises(tmp_path: Path, junk: bytes) -> None:
    folder = tmp_path / "c"
    if not folder.exists():
        fill(folder)
    (folder / MANIFEST_NAME).write_bytes(junk)
    assert len(verify(folder)) == 1
    assert "weights.bin" in extra_files(folder)


def test_truncated_missing_and_extra_files_are_named(tmp_path: Path) -> None:
    folder = fill(tmp_path / "c")
    (folder / "weights.bin").write_bytes(bytes(100))
    (folder / "empty").unlink()
    (folder / "added.txt").write_text("x")
    assert verify(folder) == ["empty is missing", "weights.bin has 100 bytes instead of 256"]
    assert extra_files(folder) == ["added.txt"]


def test_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    for name in ("../secret", "/dev/zero", "a/../../b", "a\\b"):
        entry = {name: {"sha256": "0" * 64, "size": 0}}
        (folder / MANIFEST_NAME).write_bytes(manifest._manifest_bytes(entry))
        assert verify(folder) == [f"{MANIFEST_NAME} is damaged: it lists a path outside of this folder"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_are_neither_hashed_nor_read(tmp_path: Path) -> None:
    folder = fill(tmp_path / "c")
    os.mkfifo(folder / "pipe")
    assert extra_files(folder) == []
    (folder / "weights.bin").unlink()
    os.mkfifo(folder / "weights.bin")
    assert verify(folder) == ["weights.bin is not a regular file"]


def test_newer_format_and_missing_folder_are_told(tmp_path: Path) -> None:
    assert verify(tmp_path / "none") == [f"{tmp_path / 'none'} is not a folder"]
    folder = fill(tmp_path / "c")
    value = json.loads((folder / MANIFEST_NAME).read_text())
    (folder / MANIFEST_NAME).write_text(json.dumps({**value, "format": 2}))
    assert "format 2" in verify(folder)[0]


class TestWithoutManifest:
    """Checkpoints of another trainer: only what their own formats tell can be checked."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "checkpoint-3"
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(safetensors_bytes())
        with zipfile.ZipFile(folder / "optimizer.pt", "w") as archive:
            archive.writestr("data.pkl", b"\x80\x02}." * 50)
        return folder

    def test_whole_folder_is_good(self, folder: Path) -> None:
        assert verify(folder) == []

    @pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
    @pytest.mark.parametrize("kept", [0.0, 0.3, 0.9])
    def test_file_cut_short_is_named(self, folder: Path, name: str, kept: float) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * kept)])
        problems = verify(folder)
        assert len(problems) == 1
        assert problems[0].startswith(name)

    @settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(junk=st.binary(max_size=100))
    def test_junk_never_raises(self, folder: Path, junk: bytes) -> None:
        for name in ("x.safetensors", "x.pt", "x.json", "x.index.json"):
            (folder / name).write_bytes(junk)
        (folder / "y.safetensors").write_bytes(struct.pack("<Q", len(junk)) + junk)
        verify(folder)

    def test_missing_shard_and_state_are_named(self, folder: Path) -> None:
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "trainer_state.json").unlink()
        (folder / "checkpoint-is-incomplete.txt").touch()
        problems = verify(folder)
        assert len(problems) == 3
        assert "model-00001-of-00002.safetensors" in problems[2]


def test_no_fsync_is_tolerated_and_a_failed_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    (tmp_path / "a").write_text("x")

    def fail(number: int) -> None:
        def fsync(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    fail(errno.EINVAL)
    seal(tmp_path)
    assert verify(tmp_path) == []
    fail(errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        seal(tmp_path)
