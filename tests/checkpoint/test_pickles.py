"""Pickles made to attack: none runs code, none follows an address of its own choice, each is refused by name.

What could end the process is read in one child, which tells each case before it reads it.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.checkpoint.pickles import Refused, check_nest
from paceline.pytorch.checkpoint.tensors import CheckpointError, load_stream, load_tensors, save_tensors
from paceline.pytorch.checkpoint.torch_files import read_torch_file

# ---- pickles by opcode


def name(path: str) -> bytes:
    module, _, attribute = path.rpartition(".")
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def put(value: Any) -> bytes:
    """The opcodes that push a value; bytes stand for themselves."""
    if isinstance(value, bytes):
        return value
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        content = value.to_bytes(9, "little", signed=True)
        return b"\x8a" + bytes([len(content)]) + content
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    if isinstance(value, tuple):
        return b"(" + b"".join(map(put, value)) + b"t"
    return b"](" + b"".join(map(put, value)) + b"e"


def call(path: str, *values: Any) -> bytes:
    return name(path) + put(values) + b"R"


def binary(content: bytes) -> bytes:
    return call("_codecs.encode", content.decode("latin1"), "latin1")


def build(target: bytes, state: Any) -> bytes:
    return target + put(state) + b"b"


def whole(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def archive(body: bytes, contents: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr("archive/data.pkl", whole(body))
        file.writestr("archive/version", "3\n")
        for key, content in (contents if contents is not None else {"0": b"\x7f" * 64}).items():
            file.writestr(f"archive/data/{key}", content)
    return buffer.getvalue()


def storage(kind: str = "FloatStorage", numel: Any = 16, key: str = "0") -> bytes:
    return put(("storage", name(f"torch.{kind}"), key, "cpu", numel)) + b"Q"


def tensor(
    offset: Any = 0, size: Any = (4,), stride: Any = (1,), held: bytes | None = None, kind: str = "_v2"
) -> bytes:
    body = (storage() if held is None else held, offset, size, stride, False, call("collections.OrderedDict"))
    return call(f"torch._utils._rebuild_tensor{kind}", *(body if kind else body[:4]))


NUMPY = "numpy._core.multiarray"


def dtype(text: str = "f8", state: Any = (3, "<", None, None, None, -1, -1, 0)) -> bytes:
    return build(call("numpy.dtype", text, False, True), state)


def array(kind: bytes, shape: Any, content: Any, subtype: str = "numpy.ndarray") -> bytes:
    made = call(f"{NUMPY}._reconstruct", name(subtype), (0,), binary(b"b"))
    return build(made, (1, shape, kind, False, content))


def quantized(*scheme: Any, size: Any = (2, 2), numel: int = 4) -> bytes:
    held = storage("QInt8Storage", numel)
    hooks = call("collections.OrderedDict")
    return call("torch._utils._rebuild_qtensor", held, 0, size, (2, 1), scheme, False, hooks)


def sparse(layout: str, *parts: Any) -> bytes:
    return call("torch._utils._rebuild_sparse_tensor", call("torch.serialization._get_layout", layout), parts)


LONGS = storage("LongStorage", 8)
HUGE = 1 << 50
DEEP = b")" + b"\x85" * 200_000  # a tuple in a tuple in a tuple ...
LAUGHS = b"]q\0" + b"".join(b"](" + b"h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(60))

ATTACKS: dict[str, bytes] = {
    # objects in arrays are addresses
    "array of objects": array(dtype("O8", (3, "|", None, None, None, -1, -1, 63)), (1,), binary(b"A" * 8)),
    "list of objects": array(dtype("O8", (3, "|", None, None, None, -1, -1, 63)), (1,), ["a"]),
    "scalar object": call(f"{NUMPY}.scalar", dtype("O8"), binary(b"A" * 8)),
    "type becomes objects": array(dtype("f8", (3, "|", None, "O", None, 8, 1, 63)), (1,), binary(b"A" * 8)),
    "structured type": call("numpy.dtype", "O,O", False, True),
    "fields": dtype("V8", (3, "|", None, ("a",), None, 8, 1, 63)),
    "text type": array(dtype("U2"), (1,), binary(b"A" * 8)),
    "dates": array(dtype("M8"), (1,), binary(b"A" * 8)),
    "array that is short": array(dtype(), (1000,), binary(b"A" * 8)),
    "array of negative size": array(dtype(), (-1,), binary(b"A" * 8)),
    "huge array of nothing": array(dtype(), (0, HUGE, HUGE), binary(b"")),
    "array of another class": array(dtype(), (1,), binary(b"A" * 8), "numpy.memmap"),
    "matrix": array(dtype(), (1,), binary(b"A" * 8), "numpy.matrix"),
    "array without a state": call(f"{NUMPY}._reconstruct", name("numpy.ndarray"), (HUGE,), binary(b"b")),
    "scalar that is short": call(f"{NUMPY}.scalar", dtype(), binary(b"A")),
    "array called": call("numpy.ndarray", (HUGE,)),
    # tensors beyond their bytes
    "size": tensor(size=(HUGE,)),
    "offset": tensor(offset=HUGE),
    "offset of one": tensor(offset=13),
    "negative offset": tensor(offset=-4),
    "negative size": tensor(size=(-1,)),
    "negative stride": tensor(offset=8, stride=(-1,)),
    "stride": tensor(stride=(HUGE,)),
    "stride of one": tensor(size=(2, 4), stride=(13, 1)),
    "overflow": tensor(size=(1 << 40, 1 << 40), stride=(0, 0)),
    "expanded": tensor(size=(1 << 40,), stride=(0,)),
    "strides missing": tensor(size=(2, 2), stride=(1,)),
    "size of text": tensor(size="ab", stride=(1, 1)),
    "first form": tensor(size=(HUGE,), kind=""),
    "storage claim": tensor(size=(HUGE,), held=storage(numel=HUGE)),
    "storage of more than its record": tensor(size=(1 << 22,), held=storage(numel=1 << 22)),
    "negative storage": tensor(held=storage(numel=-1)),
    "no such storage": tensor(held=storage(key="9")),
    "storage elsewhere": tensor(held=storage(key="../version")),
    "no storage": tensor(held=put(3)),
    "wider type": call("torch._utils._rebuild_tensor_v3", storage(), 0, (16,), (1,), False, None,
                       name("torch.complex128")),
    "storage set on a tensor": build(call("torch.Tensor"), (storage(), 0, (HUGE,), (1,))),
    "empty tensor of any size": call("torch.Tensor", HUGE),
    "tensor of a class": call("torch.FloatTensor", HUGE),
    "without values": call("torch._utils._rebuild_meta_tensor_no_storage", name("torch.float32"), (4,), (1,), False),
    "wrapper": call("torch._utils._rebuild_wrapper_subclass", name("torch.Tensor"), name("torch.float32"), (4,), (1,),
                    0, call("torch.serialization._get_layout", "torch.strided"), call("torch.device", "cpu"), False),
    "wrapper by type": call("torch._tensor._rebuild_from_type_v2", name("torch._utils._rebuild_wrapper_subclass"),
                            name("torch.Tensor"), (name("torch.Tensor"), name("torch.float32"), (4,), (1,), 0,
                            call("torch.serialization._get_layout", "torch.strided"), None, False), None),
    "any function by type": call("torch._tensor._rebuild_from_type_v2", name("builtins.set"), name("torch.Tensor"),
                                 ([1],), b"}" + put("__class__") + name("torch.Size") + b"s"),
    "nested": call("torch._utils._rebuild_nested_tensor", tensor(), tensor(), tensor(), tensor()),
    # sparse, quantized
    "coordinates": sparse("torch.sparse_coo", call("torch._utils._rebuild_tensor", LONGS, 0, (1, 4), (4, 1)),
                          tensor(), (2,)),
    "rows": sparse("torch.sparse_csr", call("torch._utils._rebuild_tensor", LONGS, 0, (4,), (1,)),
                   call("torch._utils._rebuild_tensor", LONGS, 0, (4,), (1,)), tensor(), (3, 1)),
    "layout": sparse("torch._mkldnn", tensor(), tensor(), (2,)),
    "axis": quantized(name("torch.per_channel_affine"), [1.0, 1.0], [0, 0], 7),
    "negative axis": quantized(name("torch.per_channel_affine"), [1.0, 1.0], [0, 0], -3),
    "scales": quantized(name("torch.per_channel_affine"), [1.0], [0], 0),
    "quantized beyond": quantized(name("torch.per_tensor_affine"), 1.0, 0, size=(HUGE, HUGE)),
    "two elements in a byte": call("torch._utils._rebuild_qtensor", storage("QUInt4x2Storage", 4), 0, (8,), (1,),
                                   (name("torch.per_tensor_affine"), 1.0, 0), False, None),
    # deep, endless, growing
    "deep key": b"}" + DEEP + b"Ns",
    "deep key of a set": call("builtins.set", [DEEP]),
    "deep key of a counter": call("collections.Counter", [DEEP]),
    "deep key of a mapping": call("collections.OrderedDict", [[DEEP, 1]]),
    "deep": DEEP,
    "deep lists": b"]" * 100_000 + b"a" * 99_999,
    "itself": b"]q\0h\0a",
    "itself in a mapping": b"}q\0X\1\0\0\0ah\0s",
    "laughs": LAUGHS,
    # memory
    "bytes": call("builtins.bytearray", HUGE),
    "text": b"\x8e" + struct.pack("<Q", HUGE),
    "long text": b"X" + struct.pack("<I", (1 << 32) - 1),
    "bytes that are claimed": b"\x96" + struct.pack("<Q", HUGE),
    "memo": b"Nr\xff\xff\xff\xff" + b"\x82\x01",
    "copies of bytes": binary(b"a" * (1 << 20)) + b"q\0" + b"c__builtin__\nbytearray\nh\0\x85R" * 3000,
    "copies of a list": b"](" + b"K\1" * (1 << 17) + b"eq\0" + b"cbuiltins\nset\nh\0\x85R" * 3000,
    "copies in arrays": binary(b"a" * (1 << 20)) + b"q\0" + dtype("i1") + b"q\1"
                        + (call(f"{NUMPY}._reconstruct", name("numpy.ndarray"), (0,), b"N")
                           + b"(K\1J\0\0\x10\0\x85h\1\x89h\0tb") * 3000,
    "expanded and widened": call("torch._utils._rebuild_device_tensor_from_cpu_tensor",
                                 tensor(size=(1 << 26,), stride=(0,)), name("torch.complex128"), "cpu", False),
    "expanded scales": quantized(name("torch.per_channel_affine"), tensor(size=(1 << 26,), stride=(0,)),
                                 tensor(size=(1 << 26,), stride=(0,)), 0, size=(1 << 26, 1)),
    "growing key": b"N\x85q\0" + b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1])
                                                for n in range(60)) + b"}h<Ns",
    "integer": b"\x8b" + struct.pack("<i", (1 << 31) - 1),
    "codec": call("_codecs.encode", "a", "zip"),
    # code
    "system": call("os.system", "touch mark"),
    "exec": call("builtins.exec", "open('mark', 'w')"),
    "getattr": call("builtins.getattr", name("torch.Tensor"), "__init__"),
    "nested name": name("torch.Tensor.__init__.__globals__"),
    "import of a module": name("this.s"),
    "state of a class": name("collections.OrderedDict") + b"}" + put("update") + put(1) + b"sb",
    "state of a tensor": tensor() + b"}" + put("data") + put(1) + b"sb",
    "slots": call("torch.device", "cpu") + b"N}" + put("type") + put(1) + b"s\x86b",
    "items of a tensor": tensor() + put(0) + put(1) + b"s",
    "items of a class": name("torch.Tensor") + put("a") + put(1) + b"s",
    "append to a tensor": tensor() + put(1) + b"a",
    "module by id": put(("module", name("torch.Tensor"), "a", "b")) + b"Q",
    "instance": b"(" + put(1) + b"ios\nsystem\n",
    "object": b"(" + name("torch.Tensor") + put(1) + b"o",
    "text id": b"P123\n",
    "extension": b"\x82\x01",
    "by keyword": name("torch.Tensor") + b")}\x92",
}  # fmt: skip

CHILD = """
import pickle, resource, sys, time
import torch
from paceline.pytorch.checkpoint.tensors import CheckpointError, load_stream
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import io
with open(sys.argv[1], "rb") as file:
    cases = pickle.load(file)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for case, content in cases:
    print(case, end=" ", flush=True)
    start = time.monotonic()
    try:
        value = load_stream(io.BytesIO(content), "it")
        if sys.argv[2] == "use":
            repr(value)
            torch.save(value, io.BytesIO()) if not isinstance(value, bytes) else None
    except CheckpointError:
        pass
    seconds = time.monotonic() - start
    print("ok" if seconds < 20 else f"took {seconds:.0f} s", flush=True)
print("MiB", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def in_a_child(tmp_path: Path, cases: list[tuple[str, bytes]], how: str = "read") -> list[str]:
    """Read all of them in one process. Returns what it printed."""
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    child = [sys.executable, "-c", CHILD, str(tmp_path / "cases"), how]
    done = subprocess.run(child, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"{lines[-1:]} ended it with {done.returncode}: {done.stderr[-2000:]}"
    assert all(line.endswith(" ok") for line in lines[:-1]), lines
    assert len(lines) == len(cases) + 1
    return lines


# ---- what must hold


@pytest.mark.slow
def test_attacks_end_no_process_and_take_no_memory(tmp_path: Path) -> None:
    cases = [(case.replace(" ", "-"), archive(body)) for case, body in ATTACKS.items()]
    cases += [(f"bare-{case}".replace(" ", "-"), whole(body)) for case, body in ATTACKS.items()]
    lines = in_a_child(tmp_path, cases)
    assert int(lines[-1].split()[1]) < 700, lines[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cases"]


@pytest.mark.parametrize("case", sorted(set(ATTACKS) - {"nested name", "import of a module"}))
def test_attacks_are_refused(case: str) -> None:
    content = archive(ATTACKS[case])
    if case == "array without a state":
        assert type(load_stream(io.BytesIO(content), "it")).__name__ == "_Array"  # inert, and no array
        return
    with pytest.raises(CheckpointError, match="it cannot be read safely: "):
        load_stream(io.BytesIO(content), "it")


def test_what_is_refused_is_said() -> None:
    for case, words in {
        "array of objects": "'O8', which is none of numbers",
        "storage of more than its record": "16777216 bytes, and the file has 64",
        "offset of one": r"a tensor of \(4,\) reaches beyond its 16 elements",
        "system": "it names os.system",
        "laughs": "parts are used again so often",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            load_stream(io.BytesIO(archive(ATTACKS[case])), "it")


def test_archives_that_are_no_plain_ones_are_refused() -> None:
    good = archive(tensor())
    assert load_stream(io.BytesIO(good), "it").shape == (4,)
    twice = io.BytesIO(good)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(twice, "a") as file:
        file.writestr("archive/data.pkl", whole(put(1)))
    other = io.BytesIO(good)
    with zipfile.ZipFile(other, "a") as file:
        file.writestr("another/data.pkl", whole(put(1)))
    for content in (twice.getvalue(), other.getvalue(), archive(tensor(), compression=zipfile.ZIP_DEFLATED)):
        with pytest.raises(CheckpointError):
            load_stream(io.BytesIO(content), "it")


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per")
@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_everything_that_was_read_is_read(tmp_path: Path, is_zip: bool, is_mapped: bool) -> None:
    base = torch.arange(24.0)
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    order = OrderedDict(a=torch.ones(2))
    order._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    state: dict[str, Any] = {
        "view": base.view(4, 6).t()[1:3],
        "shared": base[3:],
        "expanded": torch.ones(1).expand(5),
        "types": [
            torch.ones(3).to(t) for t in (torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64)
        ],
        "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(dense, 0.5, 1, torch.qint8),
        "channels": torch.quantize_per_channel(dense, torch.tensor([0.5, 1.0]), torch.tensor([0, 1]), 0, torch.quint8),
        "order": order,
        "counter": Counter("aab"),
        "sets": [{1, "a"}, (1, (2, 3)), b"bytes", b"", bytearray(b"ab"), 1 + 2j, None, -(2**70), torch.device("cpu")],
        "size": torch.Size([1, 2]),
        "numbers": [np.float32(1.5), np.int64(3), np.bool_(True)],
        "arrays": [np.arange(6, dtype=">i4").reshape(2, 3), np.asfortranarray(np.eye(2)), np.zeros((0, 3))],
        "random": {"numpy": np.random.get_state(), "python": random.getstate()},
    }
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    found = load_tensors(tmp_path / "a.pt", is_mapped=is_mapped)
    assert list(found) == list(state)
    for key in ("view", "shared", "expanded", "parameter", "conjugate"):
        assert torch.equal(found[key], state[key])
        assert found[key].stride() == state[key].stride()
    assert found["view"].untyped_storage().data_ptr() == found["shared"].untyped_storage().data_ptr()
    assert isinstance(found["parameter"], torch.nn.Parameter)
    assert all(torch.equal(one, other) for one, other in zip(found["types"], state["types"], strict=True))
    assert [one.dtype for one in found["types"]] == [one.dtype for one in state["types"]]
    for key in ("coo", "csr"):
        assert torch.equal(found[key].to_dense(), dense)
    assert found["coo"].is_coalesced()
    for key in ("quantized", "channels"):
        assert torch.equal(found[key].dequantize(), state[key].dequantize())
    assert found["order"]._metadata == {"": {"version": 1}}
    for key in ("counter", "sets", "size", "numbers"):
        assert found[key] == state[key]
        assert type(found[key]) is type(state[key])
    for one, other in zip(found["arrays"], state["arrays"], strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
        assert one.flags.writeable
    np.random.set_state(found["random"]["numpy"])
    random.setstate(found["random"]["python"])


def test_classes_that_the_user_allowed_are_made(tmp_path: Path) -> None:
    torch.save({"a": Allowed(3)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"it names .*Allowed"):
        load_tensors(tmp_path / "a.pt")
    with torch.serialization.safe_globals([Allowed]):
        assert load_tensors(tmp_path / "a.pt")["a"].number == 3


class Allowed:
    def __init__(self, number: int) -> None:
        self.number = number


def test_saved_keys_are_read(tmp_path: Path) -> None:
    state = {(1, (2, 3)): 4, ((0, "a"), 1): {((1, 2), (3, 4)): 5}}
    save_tensors(state, tmp_path / "state.pt")
    assert load_tensors(tmp_path / "state.pt") == state


def test_large_nests_are_no_attack() -> None:
    check_nest({number: [number, (number,)] for number in range(100_000)})
    shared = [list(range(1000))] * 50
    check_nest([shared, shared])
    with pytest.raises(Refused, match="contains itself"):
        check_nest(loop())


def loop() -> list[Any]:
    value: list[Any] = []
    value.append([value])
    return value


@pytest.mark.slow
def test_damaged_files_end_no_process(tmp_path: Path) -> None:
    """Flipped, cut and exchanged bytes of whole files, of both forms, by a fixed seed; what is read is used too."""
    rng, cases = random.Random(7), []
    state = {
        "a": torch.arange(6.0).view(2, 3), "n": np.arange(3), "s": torch.eye(2).to_sparse(), "m": np.random.get_state()
    }  # fmt: skip
    for is_zip in (True, False):
        buffer = io.BytesIO()
        torch.save(state, buffer, _use_new_zipfile_serialization=is_zip)
        content = buffer.getvalue()
        start = content.index(b"\x80\x02")
        for number in range(400):
            damaged = bytearray(content)
            for _ in range(rng.randint(1, 4)):
                place = rng.randrange(start, min(start + 1200, len(damaged)))
                damaged[place] = rng.choice([rng.randrange(256), damaged[rng.randrange(start, start + 800)], 0, 255])
            if not rng.randrange(8):
                del damaged[rng.randrange(len(damaged)) :]
            cases.append((f"{is_zip}-{number}", bytes(damaged)))
    in_a_child(tmp_path, cases, "use")


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_tensors(tmp_path / "optimizer.pt")


def test_a_mapped_file_costs_no_memory(tmp_path: Path) -> None:
    save_tensors({"a": torch.arange(1 << 20)}, tmp_path / "a.pt")
    found = read_torch_file(tmp_path / "a.pt", is_mapped=True)["a"]
    found[0] = 5  # its own copy
    assert load_tensors(tmp_path / "a.pt")["a"][0] == 0
