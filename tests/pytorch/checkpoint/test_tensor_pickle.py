"""Files of `torch.save` with the pickler of plain tensors: torch reads from them what it reads from its own."""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.pytorch.checkpoint import tensor_pickle
from paceline.pytorch.checkpoint.tensors import load_tensors, save_plain
from paceline.pytorch.checkpoint.torch_files import read_torch_file

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


def saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def loaded(value: Any) -> Any:
    return torch.load(io.BytesIO(saved(value, pickle_module=tensor_pickle)), weights_only=True)


def some_tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24).reshape(4, 6)
    found = {str(dtype): base.to(dtype) for dtype in DTYPES}
    found |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 3), "transposed": torch.randn(3, 4).T}
    found |= {"part": torch.randn(10)[3:7:2], "expanded": torch.randn(1, 3).expand(4, 3)}
    found |= {"conjugate": torch.randn(3, dtype=torch.complex64).conj(), "sparse": torch.eye(3).to_sparse()}
    found |= {"negative": torch.randn(3, dtype=torch.complex64).conj().imag}
    return found


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
    if one.is_sparse:
        return alike and torch.equal(one.to_dense(), other.to_dense())
    return alike and one.stride() == other.stride() and one.tolist() == other.tolist()


@pytest.mark.parametrize("name", some_tensors())
def test_every_kind_of_tensor_is_read_back(name: str) -> None:
    tensor = some_tensors()[name]
    expected = torch.load(io.BytesIO(saved({"a": tensor})), weights_only=True)["a"]
    found = loaded({"a": tensor})["a"]
    assert is_same(found, expected)
    assert is_same(found, tensor)
    if name == "sparse":
        return
    assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()


def test_tensors_of_one_storage_stay_so() -> None:
    base = torch.arange(10.0)
    found = loaded([base, base[2:5], base, torch.arange(10.0)])
    found[0][3] = 7.0
    assert found[1].tolist() == [2.0, 7.0, 4.0]
    assert found[0].data_ptr() == found[2].data_ptr() != found[3].data_ptr()
    with pytest.raises(RuntimeError, match="different types"):
        saved([base, base.view(torch.int32)], pickle_module=tensor_pickle)


def test_nested_values_without_tensors_are_written_by_the_c_pickler() -> None:
    random_state = (3, tuple(range(2**31, 2**31 + 624)), None)
    value = {
        "python": random_state,
        "options": {"a": "same", "b": "same", "c": None, "d": 2**70},
        "none": (),
        "t": [()],
    }
    value["mixed"] = ("same", [torch.ones(2), {"same": ("same", torch.zeros(1))}])
    pickled: list[object] = []
    pickle_one = tensor_pickle.Pickler._pickled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tensor_pickle.Pickler, "_pickled", lambda self, item: (pickled.append(item), pickle_one(self, item))[1]
        )
        found = loaded(value)
    assert str(found) == str(value)
    assert not any(isinstance(item, (str, int, float)) and item in (3, "same", None) for item in pickled)
    assert not any(type(item) in (list, dict) for item in pickled)


def test_tensors_with_more_to_them_go_torchs_own_way() -> None:
    with_attribute = torch.ones(2)
    with_attribute.note = "x"  # type: ignore[attr-defined]
    tensors = [torch.ones(2, requires_grad=True), with_attribute, torch.nn.Parameter(torch.ones(2))]
    found = torch.load(io.BytesIO(saved(tensors, pickle_module=tensor_pickle)), weights_only=False)
    assert [tensor.requires_grad for tensor in found] == [True, False, True]
    assert found[1].note == "x"
    assert isinstance(found[2], torch.nn.Parameter)


def test_the_hooks_of_two_tensors_are_their_own() -> None:
    first, second = loaded([torch.ones(1), torch.ones(1)])
    calls: list[str] = []
    first.requires_grad_().register_hook(lambda grad: calls.append("first"))
    second.requires_grad_().mul(2).sum().backward()
    assert calls == []


def test_the_state_of_an_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    save_plain(optimizer.state_dict(), tmp_path / "optimizer.pt")
    for found in (load_tensors(tmp_path / "optimizer.pt"), read_torch_file(tmp_path / "optimizer.pt", is_mapped=True)):
        assert found["param_groups"] == optimizer.state_dict()["param_groups"]
        for index, entry in optimizer.state_dict()["state"].items():
            assert all(torch.equal(found["state"][index][name], value) for name, value in entry.items())


def test_containers_within_containers() -> None:
    deep = OrderedDict(a=(torch.ones(2), [torch.zeros(1), {"b": {3: torch.tensor(1)}}]))
    value = {"deep": deep, (1, "x"): [], "empty": {}, "\udc80": [[1, 2.5], None], True: [deep["a"][0]], 2**70: b"\x00"}
    found = loaded(value)
    assert list(found) == list(value)
    assert str(found) == str(value)
    assert type(found["deep"]) is OrderedDict
    assert found[True][0].data_ptr() == found["deep"]["a"][0].data_ptr()


def test_only_storages_are_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[type] = []

    class Spy(tensor_pickle.Pickler):
        def persistent_id(self, value: object) -> Any:
            asked.append(type(value))
            return "storage", torch.FloatStorage, "key", "cpu", 3

    Spy(io.BytesIO(), protocol=2).dump({"step": torch.ones(1), "numbers": [1, 2.0, "a"], "parameter": torch.ones(3)})
    assert asked == [torch.storage.TypedStorage] * 2
