"""Files of TensorFlow's checkpoints and models, damaged or made to attack: noticed, named, and nothing in them runs."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tf_models import Linear, make_data, make_model, make_trainer, weights

from paceline import TFTrainer
from paceline.checkpoint import folders
from paceline.tensorflow.checkpoint.model_files import load_model, save_model
from paceline.tensorflow.checkpoint.variables import CheckpointError, changing_variables, restore_variables, values_of
from paceline.tensorflow.framework import keras, tf

DATA = make_data(16)
NEWEST = 4
FILES = ("variables.index", "variables.data-00000-of-00001", "progress.json", "trainer_state.json")
VALUES: list[Any] = [None, -1, 10**30, 1e308, "3", [], {}, [[]], {"a": {}}, "9" * 5000]


def make(folder: Path, **options: Any) -> TFTrainer:
    return make_trainer(folder, make_model(), DATA, **{"save_steps": 2, "max_steps": NEWEST, **options})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make(folder, save_strategy="steps").train()
    return folder


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> TFTrainer:
    return make(tmp_path_factory.mktemp("cases") / "out", save_strategy="no")


def damaged(data: st.DataObject, content: bytes, name: str) -> bytes:
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "bytes", *["json"] * 4 * name.endswith(".json")]))
    at = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    if kind == "insert":
        return content[:at] + data.draw(st.binary(min_size=1, max_size=20)) + content[at:]
    if kind == "bytes":
        return data.draw(st.binary(max_size=200))
    values = json.loads(content)
    key = data.draw(st.sampled_from(sorted(values)))
    inner = values[key]
    if isinstance(inner, dict) and inner and data.draw(st.booleans()):
        inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(st.sampled_from(VALUES))
    else:
        values[key] = data.draw(st.sampled_from(VALUES))
    return json.dumps(values).encode()


@pytest.mark.slow
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.generate],  # each case takes a tenth of a second: none are made smaller
)
@given(data=st.data())
def test_damaged_files_of_a_checkpoint(data: st.DataObject, run: Path, trainer: TFTrainer) -> None:
    case = Path(str(trainer.args.output_dir)).with_name("case")
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(run, case)
    folder = case / f"checkpoint-{NEWEST}"
    name = data.draw(st.sampled_from(FILES))
    before = (folder / name).read_bytes()
    after = damaged(data, before, name)
    (folder / name).write_bytes(after)
    if after != before:
        assert folders.newest_valid(case, lambda sentence: None) == case / "checkpoint-2"
    folders.seal(folder)  # as if it had been written so
    failure = ""
    try:
        trainer.train(resume_from_checkpoint=str(folder))
    except (ValueError, OSError) as error:
        failure = str(error)
    assert not failure or folder.name in failure


def check_refused(checkpoint: Path, model: Any, optimizer: Any = None) -> None:
    """A checkpoint is refused, and leaves the values that were."""
    variables = changing_variables(model, optimizer)
    before = values_of(variables)
    with pytest.raises(CheckpointError, match=f"{checkpoint.name} does not fit this model"):
        restore_variables(checkpoint, model, optimizer)
    assert all(np.array_equal(*pair) for pair in zip(values_of(variables), before, strict=True))


def test_damaged_variables_leave_the_values_that_were(tmp_path: Path, run: Path) -> None:
    """Damage of some bytes of the index shows only when variables before have been assigned."""
    checkpoint = Path(shutil.copytree(run / f"checkpoint-{NEWEST}", tmp_path / "case"))
    model, optimizer = make_model(seed=1), keras.optimizers.AdamW()
    optimizer.build(model.trainable_variables)
    index = (checkpoint / "variables.index").read_bytes()
    for place in range(0, len(index), 9):
        damage = bytes([index[place] ^ 255])
        (checkpoint / "variables.index").write_bytes(index[:place] + damage + index[place + 1 :])
        check_refused(checkpoint, model, optimizer)
    (checkpoint / "variables.index").write_bytes(index)
    data = checkpoint / "variables.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-1])
    check_refused(checkpoint, model, optimizer)


def test_variables_of_another_model_leave_the_values_that_were(run: Path) -> None:
    layers = keras.layers
    larger = keras.Sequential([keras.Input((8,)), layers.Dense(16), layers.Dense(3), layers.Dense(3)])
    wider = keras.Sequential([keras.Input((8,)), layers.Dense(16), layers.Dense(4)])
    for model in (larger, wider):
        check_refused(run / f"checkpoint-{NEWEST}", model)


def test_a_saved_module_of_another_shape_leaves_the_values_that_were(tmp_path: Path) -> None:
    save_model(Linear(), tmp_path)
    other = Linear(inputs=4)  # its bias has the shape of the saved one
    other.weight.assign_add(tf.ones_like(other.weight))
    other.bias.assign_add(tf.ones_like(other.bias))
    before = weights(other)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        load_model(other, tmp_path)
    assert np.array_equal(weights(other), before)


def test_a_saved_model_is_read_as_weights_alone(tmp_path: Path) -> None:
    """Its description may name what is to be called: it is not read."""
    model, other = make_model(), make_model(seed=1)
    path = save_model(model, tmp_path)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**files, "config.json": b"no description"}.items():
            archive.writestr(name, content)
    load_model(other, tmp_path)
    assert np.array_equal(weights(other), weights(model))


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_damaged_model_leaves_the_weights_that_were(tmp_path: Path, place: float) -> None:
    model = make_model()
    path = save_model(model, tmp_path)
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 255
    path.write_bytes(content)
    other = make_model(seed=1)
    before = weights(other)
    failure = None
    try:
        load_model(other, tmp_path)
    except CheckpointError as error:
        failure = error
    if failure is not None:
        assert "model.keras does not fit this model" in str(failure)
        assert np.array_equal(weights(other), before)


def test_a_model_of_another_shape_leaves_the_weights_that_were(tmp_path: Path) -> None:
    layers = keras.layers
    larger = keras.Sequential([keras.Input((8,)), layers.Dense(16), layers.Dense(3), layers.Dense(3)])
    for model in (larger, keras.Sequential([keras.Input((8,)), layers.Dense(16), layers.Dense(4)])):
        save_model(model, tmp_path)
        other = make_model()
        before = weights(other)
        with pytest.raises(CheckpointError, match="does not fit this model"):
            load_model(other, tmp_path)
        assert np.array_equal(weights(other), before)
