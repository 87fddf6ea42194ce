"""Every file of a checkpoint, damaged or made to attack: it is noticed, it is named, and nothing in it runs."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import Classifier, classification, make_trainer, weights
from torch.utils.data import IterableDataset

from paceline import Trainer, TrainerCallback
from paceline.checkpoint import folders

DATA = classification(24)
NEWEST = 4


class Average(TrainerCallback):
    """Has states of both kinds: plain values, and tensors."""

    def __init__(self) -> None:
        self.count = 0
        self.average = torch.zeros(4)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1
        self.average = self.average + 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.average = int(state["count"]), torch.as_tensor(state["average"])


def make(folder: Path, **options: Any) -> Trainer:
    model = Classifier(dropout=0.1)
    return make_trainer(
        folder,
        model,
        DATA,
        **{
            "save_strategy": "steps",
            "save_steps": 2,
            "max_steps": NEWEST + 1,
            "num_train_epochs": 2,
            "logging_strategy": "no",
            "callbacks": [Average()],
            "report_to": [],
            **options,
        },
    )


def undamaged(folder: Path) -> Path:
    make(folder, max_steps=NEWEST).train()
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undamaged(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases")


# ---- attacks


class Attack:
    """As a pickle: a call that leaves a mark when it is made."""

    def __init__(self, mark: Path, how: int) -> None:
        self.mark, self.how = str(mark), how

    def __reduce__(self) -> Any:
        code = f"open({self.mark!r}, 'w').close()"
        calls: list[Any] = [
            (os.system, (f"touch {self.mark}",)),
            (exec, (code,)),
            (eval, (f"open({self.mark!r}, 'w')",)),
            (os.mkdir, (self.mark,)),
            (shutil.copy, (__file__, self.mark)),
        ]
        return calls[self.how % len(calls)]


def in_archive(data: bytes) -> bytes:
    """A pickle inside the zip form that torch writes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", bytes(64))
    return buffer.getvalue()


def bombs() -> list[bytes]:
    """Pickles and headers that promise more than there is."""
    huge = (1 << 40).to_bytes(8, "little")
    return [
        b"\x80\x02cbuiltins\nbytearray\nL1099511627776L\n\x85R.",
        b"\x80\x02" + b"(" * 100_000 + b".",
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        b"\x80\x04\x8e" + huge + b"x",
        huge + b"{}",
        (1 << 63).to_bytes(8, "little") + b"{}",
        b'\x40\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}',
        b"[" * 100_000,
        b'{"global_step": ' + b"9" * 5000 + b"}",
        b'{"a":' * 50_000,
    ]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([-1, 0, 3, 10**9, -(10**9), 1e308, "epoch", "3"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def replace_somewhere(data: st.DataObject, tree: Any) -> Any:
    """Another value, or none, at some place of a JSON tree."""
    if isinstance(tree, dict) and tree and data.draw(st.integers(0, 4)):
        key = data.draw(st.sampled_from(sorted(tree)))
        if not data.draw(st.integers(0, 5)):
            return {name: value for name, value in tree.items() if name != key}
        return {**tree, key: replace_somewhere(data, tree[key])}
    if isinstance(tree, list) and tree and data.draw(st.booleans()):
        index = data.draw(st.integers(0, len(tree) - 1))
        return [*tree[:index], replace_somewhere(data, tree[index]), *tree[index + 1 :]]
    return data.draw(values)


def replace_in_state(data: st.DataObject, state: Any) -> Any:
    """Another value at some place of what torch.save wrote."""
    if isinstance(state, dict) and state and data.draw(st.integers(0, 4)):
        key = data.draw(st.sampled_from(sorted(state, key=str)))
        return {**state, key: replace_in_state(data, state[key])}
    if isinstance(state, list) and state and data.draw(st.booleans()):
        return [replace_in_state(data, state[0]), *state[1:]]
    return data.draw(values | st.just(torch.zeros(3)) | st.just(torch.zeros(2, 2, dtype=torch.int64)))


def damage(data: st.DataObject, content: bytes, name: str, mark: Path) -> bytes:
    kinds = ["bytes", "cut", "flip", "insert", "attack", "archive", "bomb", "empty"]
    if name.endswith(".json"):
        kinds += ["json"] * 6
    if name.endswith((".pt", ".pth", ".bin")):
        kinds += ["state"] * 4
    kind = data.draw(st.sampled_from(kinds), label="kind")
    at = data.draw(st.integers(0, max(len(content) - 1, 0)), label="at")
    if kind == "bytes":
        return data.draw(st.binary(max_size=200))
    if kind == "cut":
        return content[:at]
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    if kind == "insert":
        return content[:at] + data.draw(st.binary(min_size=1, max_size=20)) + content[at:]
    if kind in ("attack", "archive"):
        attack = Attack(mark, data.draw(st.integers(0, 4)))
        pickled = pickle.dumps({"state": attack}, protocol=data.draw(st.integers(0, 5)))
        return pickled if kind == "attack" else in_archive(pickled)
    if kind == "bomb":
        return data.draw(st.sampled_from(bombs()))
    if kind == "json":
        return json.dumps(replace_somewhere(data, json.loads(content))).encode()
    if kind == "state":
        state = torch.load(io.BytesIO(content), weights_only=True)
        buffer = io.BytesIO()
        torch.save(replace_in_state(data, state), buffer)
        return buffer.getvalue()
    return b""


# ---- what must hold


def try_one(data: st.DataObject, run: Path, place: Path) -> None:
    case = place / "case"
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(run, case)
    mark = place / "mark"
    folder = case / f"checkpoint-{NEWEST}"
    names = sorted(path.name for path in folder.iterdir())
    name = data.draw(st.sampled_from(names), label="file")
    before = (folder / name).read_bytes()
    after = damage(data, before, name, mark)
    (folder / name).write_bytes(after)
    if after != before:
        assert folders.verify(folder)
        taken = folders.newest_valid(case, lambda sentence: None)
        assert taken is not None
        assert taken.name == "checkpoint-2"
    if name == folders.MANIFEST_NAME:
        return
    folders.seal(folder)  # as if it had been written so
    go_on(case, name)
    assert not mark.exists()


def go_on(case: Path, name: str) -> None:
    """Resume: it works, or the error names the file; the model is as it was, or has one checkpoint's weights."""
    trainer = make(case, save_strategy="no")
    fresh = weights(trainer.model).clone()
    trained = []

    class Note(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trained.append(state.global_step)

    trainer.add_callback(Note())
    checkpoint = case / f"checkpoint-{NEWEST}"
    failure: Exception | None = None
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    except (ValueError, OSError) as error:
        failure = error
    if failure is None:
        assert len(trained) <= NEWEST + 2
        return
    assert name in str(failure)
    assert not trained
    saved = Classifier()
    if name != "model.safetensors":
        trainer._load_from_checkpoint(str(checkpoint), saved)
    assert any(torch.equal(weights(trainer.model), other) for other in (fresh, weights(saved)))


class Endless(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return itertools.cycle(DATA)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["consumed", "num_read"])
def test_a_place_that_cannot_have_been_reached_in_an_endless_stream(tmp_path: Path, name: str) -> None:
    def stream(**options: Any) -> Trainer:
        options = {"save_strategy": "steps", "save_steps": 2, **options}
        return make_trainer(tmp_path, Classifier(), Endless(), max_steps=4, **options)

    stream().train()
    file = tmp_path / "checkpoint-2" / "progress.json"
    progress = json.loads(file.read_text())
    place = progress["feed"] if name == "consumed" else progress["feed"]["stream"]["workers"][0]
    assert place[name] == 8
    place[name] = 10**15
    file.write_text(json.dumps(progress))
    folders.seal(file.parent)
    with pytest.raises(ValueError, match=r"progress\.json is damaged"):
        stream(save_strategy="no").train(resume_from_checkpoint=str(file.parent))


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large])
@given(data=st.data())
def test_damaged_and_hostile_files(data: st.DataObject, run: Path, place: Path) -> None:
    try_one(data, run, place)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large])
@given(data=st.data())
def test_hundreds_of_damaged_and_hostile_files(data: st.DataObject, run: Path, place: Path) -> None:
    try_one(data, run, place)
