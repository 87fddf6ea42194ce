"""An object store as a place for runs: memory, a folder; names, secrets, and a checkpoint that is whole or absent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import make_checkpoint

from paceline import TrainingArguments
from paceline.args.places import check_url, is_url, staging_folder
from paceline.checkpoint import folders
from paceline.checkpoint.stores import (
    MARKER_NAME,
    ObjectStore,
    StoreError,
    bring_files,
    bring_named,
    bring_run,
    open_file_system,
)


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = f"memory://{tmp_path.name}/run" if request.param == "memory" else f"file://{tmp_path}/remote/run"
    return ObjectStore(place)


def test_a_url_is_told_from_a_path() -> None:
    assert is_url("s3://bucket/run")
    assert is_url("file:///tmp/run")
    assert not any(map(is_url, ["runs/a", "C://runs", "/tmp/s3://x", None, 3]))


def test_the_staging_folder_is_the_same_each_time_and_stays_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert staging_folder("s3://bucket/a/b") == str(tmp_path / "paceline" / "staging" / "s3" / "bucket" / "a" / "b")
    for url in ("s3://bucket/../../../etc", "file:///a/./b", "s3://bucket/a b;c"):
        assert Path(staging_folder(url)).resolve().is_relative_to(tmp_path / "paceline" / "staging")
    assert staging_folder("s3://bucket/a") != staging_folder("gs://bucket/a")


def test_arguments_split_a_url_into_store_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    args = TrainingArguments(output_dir="s3://bucket/run/")
    assert args.output_store == "s3://bucket/run"
    assert args.output_dir == staging_folder("s3://bucket/run")
    again = TrainingArguments.from_dict(args.to_dict())
    assert (again.output_dir, again.output_store) == (args.output_dir, args.output_store)
    args.output_dir = str(tmp_path)
    assert (args.output_dir, args.output_store) == (str(tmp_path), None)
    both = TrainingArguments(output_dir=str(tmp_path), output_store="gs://bucket/run")
    assert (both.output_dir, both.output_store) == (str(tmp_path), "gs://bucket/run")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"output_store": "/a/folder"}, "output_store='/a/folder' is not a URL"),
        ({"output_dir": "s3://"}, "has no path"),
        ({"output_dir": "s3://a/b", "output_store": "s3://a/c"}, "are two stores"),
        ({"output_dir": "s3://user:secret@bucket/run"}, "password or a signature"),
        ({"output_dir": "https://host/run?X-Amz-Signature=abc"}, "password or a signature"),
    ],
)
def test_wrong_urls_are_refused_without_showing_secrets(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        TrainingArguments(**options)
    assert "secret" not in str(caught.value)
    assert "abc" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match=r"paceline\[gcs\]"):
        open_file_system("gs://bucket/run")
    with pytest.raises(ValueError, match="knows no scheme 'nowhere'"):
        open_file_system("nowhere://bucket/run")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match=r"paceline\[object-stores\]"):
        open_file_system("s3://bucket/run")


def test_check_url_keeps_what_it_is_given() -> None:
    assert check_url("output_dir", "memory://a/b//") == "memory://a/b"


def test_a_checkpoint_goes_up_and_comes_back(store: ObjectStore, tmp_path: Path) -> None:
    store.check()
    assert store.checkpoints() == {}
    assert store.names() == []
    original = make_checkpoint(tmp_path / "run", 5)
    store.upload_checkpoint(original, "checkpoint-5")
    assert store.checkpoints() == {"checkpoint-5": None}  # it names no run
    found = bring_named(f"{store.url}/checkpoint-5", store.url, tmp_path / "other")
    assert found == tmp_path / "other" / "checkpoint-5"
    assert folders.verify(found) == []
    assert (found / "model.bin").read_text() == "weights5"
    assert (found / "manifest.json").read_bytes() == (original / "manifest.json").read_bytes()
    elsewhere = bring_named(f"{store.url}/checkpoint-5", None, tmp_path / "other")
    assert elsewhere == Path(staging_folder(store.url), "checkpoint-5")


def test_without_its_manifest_a_checkpoint_is_none_and_is_cleared(store: ObjectStore, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    store.upload_checkpoint(make_checkpoint(folder, 5), "checkpoint-5")
    store.upload_checkpoint(make_checkpoint(folder, 7), "checkpoint-7")
    store.delete(["checkpoint-7/manifest.json"])
    store.write(f"checkpoint-7/{MARKER_NAME}", b"")
    store.write(f"checkpoint-5/{MARKER_NAME}", b"")  # killed between the manifest and the end
    assert list(store.checkpoints()) == ["checkpoint-5"]
    assert bring_run(store.url, tmp_path / "other", lambda _: None) == tmp_path / "other" / "checkpoint-5"
    assert store.clear_unfinished() == ["checkpoint-7"]
    assert {name.partition("/")[0] for name in store.names()} == {"checkpoint-5"}
    assert store.read(f"checkpoint-5/{MARKER_NAME}") is None
    store.write("checkpoint-9/foreign", b"of another program, without a marker")
    assert store.clear_unfinished() == []


def test_a_replaced_checkpoint_holds_nothing_of_the_earlier_one(store: ObjectStore, tmp_path: Path) -> None:
    earlier = make_checkpoint(tmp_path / "first", 5)
    (earlier / "model.bin").rename(earlier / "model-00001.bin")
    folders.seal(earlier)
    store.upload_checkpoint(earlier, "checkpoint-5")
    store.upload_checkpoint(make_checkpoint(tmp_path / "second", 5, "newer"), "checkpoint-5")
    assert not any("00001" in name for name in store.names())
    found = bring_named(f"{store.url}/checkpoint-5", None, tmp_path)
    assert (found / "model.bin").read_text() == "newer5"


def test_damage_is_passed_over(store: ObjectStore, tmp_path: Path) -> None:
    folder, said = tmp_path / "run", list[str]()
    for step in (3, 5):
        store.upload_checkpoint(make_checkpoint(folder, step), f"checkpoint-{step}")
    store.write("checkpoint-5/model.bin", b"other bytes")
    assert bring_run(store.url, tmp_path / "other", said.append) == tmp_path / "other" / "checkpoint-3"
    assert any("checkpoint-5 is skipped: model.bin" in sentence for sentence in said)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["checkpoint-3"]
    with pytest.raises(StoreError, match=r"Can't resume from .*checkpoint-5: model.bin"):
        bring_named(f"{store.url}/checkpoint-5", store.url, tmp_path / "third")
    with pytest.raises(ValueError, match="Can't resume"):
        bring_named(f"{store.url}/checkpoint-99", store.url, tmp_path / "third")


def test_the_newer_of_folder_and_store_is_taken(store: ObjectStore, tmp_path: Path) -> None:
    store.upload_checkpoint(make_checkpoint(tmp_path / "a", 5), "checkpoint-5")
    local = tmp_path / "b"
    make_checkpoint(local, 7)
    assert bring_run(store.url, local, lambda _: None) == local / "checkpoint-7"
    assert [path.name for path in local.iterdir()] == ["checkpoint-7"]
    (local / "checkpoint-7" / "model.bin").write_text("damaged")
    assert bring_run(store.url, local, lambda _: None) == local / "checkpoint-5"


def test_what_stands_beside_comes_back_where_it_is_missing(store: ObjectStore, tmp_path: Path) -> None:
    store.write("log.jsonl", b"old rows")
    store.write("runs/a/events", b"drawn")
    store.write("model.safetensors", b"large")
    store.upload_checkpoint(make_checkpoint(tmp_path / "a", 5), "checkpoint-5")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "log.jsonl").write_bytes(b"own rows")
    bring_files(store, tmp_path / "b")
    names = sorted(path.relative_to(tmp_path / "b").as_posix() for path in (tmp_path / "b").rglob("*"))
    assert names == ["log.jsonl", "runs", "runs/a", "runs/a/events"]
    assert (tmp_path / "b" / "log.jsonl").read_bytes() == b"own rows"
