"""The index of a sharded checkpoint is a pickle: it is read as data, whatever it asks for."""

from __future__ import annotations

import os
import pathlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_folders import ALONE, write
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from paceline.checkpoint.layout import METADATA_NAME
from paceline.pytorch.checkpoint.metadata import read_metadata
from paceline.pytorch.checkpoint.shards import Plans, Shards
from paceline.pytorch.checkpoint.tensors import CheckpointError


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    state = {"a": {"b": torch.arange(6.0).view(2, 3), "n": 3, "betas": (0.9, 0.99)}, "l": [torch.ones(2), {"x": None}]}
    shards = Shards(write(tmp_path, state))
    assert shards.tensors == {"a.b": (torch.Size([2, 3]), torch.float32), "l.0": (torch.Size([2]), torch.float32)}
    assert torch.equal(shards.read("a.b"), state["a"]["b"])  # type: ignore[call-overload]
    assert shards.read("a.betas") == (0.9, 0.99)
    assert shards.read("l.1.x") is None


def test_a_pickle_that_asks_for_more_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(2)})
    for attack in (Attack(tmp_path / "made"), {"deep": [Attack(tmp_path / "made")]}):
        (tmp_path / METADATA_NAME).write_bytes(pickle.dumps(attack))
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read safely: .*mkdir"):
            read_metadata(tmp_path)
    assert not (tmp_path / "made").exists()


def test_an_attack_hidden_in_a_real_index_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(2)})
    metadata: Metadata = pickle.loads((tmp_path / METADATA_NAME).read_bytes())
    metadata.planner_data = Attack(tmp_path / "made")
    (tmp_path / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="mkdir"):
        read_metadata(tmp_path)
    assert not (tmp_path / "made").exists()


def test_plain_values_are_read_without_running_anything(tmp_path: Path) -> None:
    """A value beside the tensors is a pickle of its own, in the file of the process that wrote it."""
    part = Plans().make(ALONE, {"part": {"n": 1}})["part"]
    part.planner.values = {"n": Attack(tmp_path / "made")}
    part.write_index(tmp_path, [part.write(tmp_path)])
    with pytest.raises(CheckpointError, match="cannot be read safely"):
        Shards(tmp_path).read("n")
    assert not (tmp_path / "made").exists()


class Slots:
    """Pickled as a real path, of which a BUILD then sets slots: `PosixPath.name` is looked up on the object."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return (pathlib.PurePosixPath, ("a",), self.state)


@pytest.mark.parametrize("state", [(None, {"name": "../../outside"}), {"name": "../outside"}, (None, {"_drv": "x"}), 5])
def test_states_set_on_allowed_classes_change_nothing(tmp_path: Path, state: Any) -> None:
    write(tmp_path, {"a": torch.ones(2)})
    metadata: Metadata = pickle.loads((tmp_path / METADATA_NAME).read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = Slots(state)
    (tmp_path / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata (cannot be read safely|is damaged)"):
        read_metadata(tmp_path)
    assert pathlib.PurePosixPath("a").name == "a"


def test_no_class_is_reached(tmp_path: Path) -> None:
    """Items, attributes and elements can be set on what the pickle holds alone, never on what it names."""
    for body in (
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n}X\1\0\0\0aK\1sb.",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nX\1\0\0\0aK\1s.",
        b"ccollections\nOrderedDict\nK\1a.",
        b"ctorch.serialization\n_get_layout\n.",
        b"cpathlib\nPosixPath\n.",
    ):
        (tmp_path / METADATA_NAME).write_bytes(b"\x80\x04" + body)
        with pytest.raises(CheckpointError):
            read_metadata(tmp_path)


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/b", "..", "", "..\\other", "C:other", "a\0"])
def test_files_outside_the_folder_are_not_read(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"a": torch.ones(2)})
    metadata: Metadata = pickle.loads((tmp_path / METADATA_NAME).read_bytes())
    place = next(iter(metadata.storage_data.values()))
    place.relative_path = name
    (tmp_path / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="the place of 'a' is none in this folder"):
        read_metadata(tmp_path)


def test_an_index_of_other_things_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(2)})
    good: Metadata = pickle.loads((tmp_path / METADATA_NAME).read_bytes())
    for wrong in (
        MetadataIndex("a"),
        Metadata({"a": MetadataIndex("a")}, storage_data={}),  # type: ignore[dict-item]
        Metadata(good.state_dict_metadata),
    ):
        (tmp_path / METADATA_NAME).write_bytes(pickle.dumps(wrong))
        with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
            read_metadata(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_damage_is_noticed_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / METADATA_NAME
    if not (tmp_path / "whole").exists():
        write(tmp_path, {"a": torch.ones(2), "n": 4})
        (tmp_path / "whole").write_bytes(path.read_bytes())
    raw = bytearray((tmp_path / "whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    try:
        shards = Shards(tmp_path)
        for name in (*shards.tensors, *shards.plain):
            shards.read(name)
    except CheckpointError:
        pass
