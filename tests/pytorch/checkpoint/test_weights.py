import errno
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from paceline.pytorch.checkpoint import safetensors_file
from paceline.pytorch.checkpoint.tensors import CheckpointError
from paceline.pytorch.checkpoint.weights import alias_groups, read_weights, write_weights

torch.set_num_threads(1)
LARGE = 10**9


def write(state: dict[str, Any], folder: Path, max_shard_bytes: int = LARGE) -> list[str]:
    return write_weights(state, folder, max_shard_bytes=max_shard_bytes)


def read(folder: Path) -> dict[str, Any]:
    state = read_weights(folder)
    assert state is not None
    return state


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous(), b.contiguous())

    return first.keys() == second.keys() and all(equal(first[name], second[name]) for name in first)


def keys_in(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"  # transformers refuses a file without it
        return sorted(file.keys())


def test_plain_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert write(model.state_dict(), tmp_path) == ["model.safetensors"]
    assert same(read(tmp_path), model.state_dict())


@pytest.mark.skipif(os.name == "nt", reason="has no such modes")
def test_files_may_be_read_by_those_who_may_read_other_files(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    write({"a": torch.ones(2)}, tmp_path)
    mode = stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode)
    assert mode == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    shared = torch.randn(1000, 10)
    state = {"embed": shared, "body": torch.ones(3), "head": shared}
    assert alias_groups(state) == {"head": "embed"}
    write(state, tmp_path)
    assert keys_in(tmp_path / "model.safetensors") == ["body", "embed"]
    assert (tmp_path / "model.safetensors").stat().st_size < 45_000
    loaded = read(tmp_path)
    assert same(loaded, dict(sorted(state.items())) | {})
    assert loaded["head"] is loaded["embed"]


def test_parts_and_other_layouts_are_stored_as_their_values(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "base": base,
        "row": base[1],
        "transposed": base.t(),
        "overlapping": base[1:3],
        "expanded": torch.ones(1).expand(5),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(0, 3),
        "empty_too": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
        "bfloat16": torch.randn(3).bfloat16(),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    write(state, tmp_path)
    assert same(read(tmp_path), state)


def test_what_safetensors_cannot_hold_goes_beside(tmp_path: Path) -> None:
    counts = torch.ones(3, dtype=torch.uint16)
    state = {
        "weight": torch.ones(2),
        "complex": torch.tensor([1 + 2j]),
        "sparse": torch.eye(3).to_sparse(),
        "uint16": counts,
        "uint16_too": counts,
        "_extra_state": {"scale": 2.0, "history": [torch.ones(1)]},
    }
    assert write(state, tmp_path) == ["model.safetensors", "model_extra_state.pt"]
    loaded = read(tmp_path)
    assert loaded.keys() == state.keys()
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(loaded["complex"], torch.tensor([1 + 2j]))
    assert loaded["_extra_state"]["scale"] == 2.0


def test_extra_state_that_cannot_be_read_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"_extra_state"):
        write({"weight": torch.ones(2), "_extra_state": object()}, tmp_path)


def test_meta_tensors_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layer is on the meta device"):
        write({"layer": torch.empty(2, device="meta")}, tmp_path)


def test_lazy_tensors_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet"):
        write(nn.Sequential(nn.LazyLinear(2)).state_dict(), tmp_path)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 50), max_size=12), limit=st.integers(1, 400), ties=st.integers(0, 3))
def test_any_sharding_gives_the_same_weights(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int, ties: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    state = {f"w{number}": torch.randn(size) for number, size in enumerate(sizes)}
    state |= {f"tied{number}": state[name] for number, name in enumerate(list(state)[:ties]) if state[name].numel()}
    names = write(state, folder, limit)
    assert same(read(folder), {name: state[name] for name in read(folder)})
    assert read(folder).keys() == state.keys()
    assert sorted(os.listdir(folder)) == sorted(names)
    for name in names:
        if name.endswith(".safetensors"):
            kept = keys_in(folder / name)
            assert len(kept) <= 1 or sum(state[key].numel() * 4 for key in kept) <= limit


def test_index_is_the_usual_one(tmp_path: Path) -> None:
    state = {"a": torch.ones(10), "b": torch.ones(10), "c": torch.ones(10)}
    write(state, tmp_path, 80)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 120
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }


def test_weights_of_an_earlier_save_go(tmp_path: Path) -> None:
    (tmp_path / "model-notes.txt").write_text("mine")
    write({"a": torch.zeros(10), "b": torch.zeros(10), "c": torch.tensor([1j])}, tmp_path, 40)
    write({"a": torch.ones(10), "b": torch.ones(10)}, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["model-notes.txt", "model.safetensors"]
    write({"a": torch.zeros(10), "b": torch.zeros(10)}, tmp_path, 40)
    assert read(tmp_path)["a"].sum() == 0


def test_pickled_weights_of_other_trainers(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.zeros(2)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert same(read(tmp_path), state)
    (tmp_path / "pytorch_model.bin").unlink()
    torch.save({"a": state["a"]}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": state["b"]}, tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same(read(tmp_path), state)


def test_no_weights(tmp_path: Path) -> None:
    assert read_weights(tmp_path) is None


class TestDamage:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write({"a": torch.ones(10), "b": torch.ones(10)}, tmp_path, 40)
        return tmp_path

    def test_missing_shard(self, folder: Path) -> None:
        (folder / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
            read_weights(folder)

    def test_truncated_shard(self, folder: Path) -> None:
        path = folder / "model-00002-of-00002.safetensors"
        path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors cannot be read"):
            read_weights(folder)

    def test_tensor_that_no_shard_holds(self, folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
        path.write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="ghost"):
            read_weights(folder)

    @pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a\\b"])
    def test_index_cannot_point_outside(self, folder: Path, name: str) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match="not a file of its folder"):
            read_weights(folder)

    @pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{"])
    def test_index_that_is_none(self, folder: Path, content: str) -> None:
        (folder / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            read_weights(folder)

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_damage_gives_one_kind_of_error(self, tmp_path: Path, data: st.DataObject) -> None:
        write({"a": torch.ones(4), "b": torch.zeros(2)}, tmp_path)
        path = tmp_path / "model.safetensors"
        content = bytearray(path.read_bytes())
        content = content[: data.draw(st.integers(0, len(content)))]
        for _ in range(data.draw(st.integers(0, 4))):
            if content:
                content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        with suppress(CheckpointError):
            read_weights(tmp_path)


def test_full_disk_is_an_oserror_and_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write({"a": torch.ones(2)}, tmp_path)

    def refuse(tensor: torch.Tensor) -> memoryview:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors_file, "octets", refuse)
    with pytest.raises(OSError, match="No space left") as caught:
        write({"a": torch.zeros(2)}, tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "model.safetensors")
    assert torch.equal(read(tmp_path)["a"], torch.ones(2))
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_real_refusal_to_write(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    write({"a": torch.ones(2)}, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError):
            write({"a": torch.zeros(100_000)}, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(read(tmp_path)["a"], torch.ones(2))
    assert os.listdir(tmp_path) == ["model.safetensors"]
