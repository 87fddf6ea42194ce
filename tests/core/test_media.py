"""Figures and tables of a run: their files, what is refused, the report, and the trackers that take them."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Classifier, classification, make_trainer

from paceline import TrainerCallback
from paceline.core.media import PNG_START, make_figure, make_table
from paceline.report.media import read_media

DATA = classification(8)
SECRET = "hf_" + "secret" * 5


def size_of(path: Path) -> tuple[int, int]:
    """Width and height of a PNG file."""
    content = path.read_bytes()
    assert content.startswith(PNG_START)
    width, height = struct.unpack(">II", content[16:24])
    return width, height


@pytest.mark.parametrize(
    "picture",
    [
        np.zeros((3, 5)),
        np.zeros((3, 5, 3), dtype=np.uint8),
        np.ones((3, 5, 4)),
        np.ones((3, 5), dtype=bool),
        torch.rand(3, 5, requires_grad=True),
        torch.full((3, 5), 255),
    ],
)
def test_arrays(tmp_path: Path, picture: Any) -> None:
    media = make_figure(tmp_path, "eval/map", 7, picture)
    assert size_of(media.path) == (5, 3)
    assert media.path == tmp_path / "media" / "eval%2Fmap-7.png"
    assert [path.name for path in media.path.parent.iterdir()] == [media.path.name]


def test_pixels(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    media = make_figure(tmp_path, "a", 1, np.array([[0.0, 0.5, 1.0]]))
    assert np.asarray(image.open(media.path)).tolist() == [[0, 128, 255]]
    assert make_figure(tmp_path, "b", 1, image.open(media.path)).path.read_bytes().startswith(PNG_START)
    assert make_figure(tmp_path, "c", 1, media.path).path.read_bytes() == media.path.read_bytes()


def test_a_figure_of_matplotlib(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure()
    figure.subplots().plot([1, 2])
    assert make_figure(tmp_path, "curve", 1, figure).is_figure


@pytest.mark.parametrize(
    ("figure", "kind", "message"),
    [
        (np.zeros(3), ValueError, r"shape \(3,\) is no picture"),
        (np.zeros((3, 3, 2)), ValueError, "is no picture"),
        (np.zeros((0, 3)), ValueError, "is no picture"),
        (np.full((2, 2), 1.5), ValueError, "values outside of 0 to 1"),
        (np.full((2, 2), np.nan), ValueError, "not finite"),
        (np.full((2, 2), 256), ValueError, "0 to 255"),
        (np.array([["a"]]), ValueError, "values outside"),
        ({"x": 1}, TypeError, "dict is none of: a figure of matplotlib"),
    ],
)
def test_no_figures(tmp_path: Path, figure: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make_figure(tmp_path, "a", 1, figure)
    assert not (tmp_path / "media").exists()


def test_a_file_that_is_no_png(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("hello")
    with pytest.raises(ValueError, match="is no PNG file"):
        make_figure(tmp_path, "a", 1, tmp_path / "x.png")


@pytest.mark.parametrize("name", ["", "x" * 101, 3])
def test_names_that_are_none(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ValueError, match="expected a text of 1 to 100 characters"):
        make_table(tmp_path, name, 1, ["a"], [[1]])


@pytest.mark.parametrize("name", ["../../up", "a/b", "a-b", "ümläut", "a\\b", "con:", "..", "x-3", "sp ace"])
def test_any_name_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    media = make_table(tmp_path, name, 3, ["a"], [[1]])
    assert media.path.parent == tmp_path / "media"
    assert [(each.name, each.step) for each in read_media(tmp_path)] == [(name, 3)]


def test_tables(tmp_path: Path) -> None:
    media = make_table(tmp_path, "t", 1, ["text", 2], [[SECRET, np.float32(0.5)], ["a|b\nc", torch.tensor(3)]])
    kept = json.loads(media.path.read_text())
    assert kept["columns"] == ["text", "2"]
    assert kept["rows"][1] == ["a|b\nc", 3]
    assert SECRET not in media.path.read_text()
    assert SECRET not in media.as_markdown()
    assert media.as_markdown().splitlines()[3] == "| a\\|b c | 3 |"
    with pytest.raises(ValueError, match="row 1 of 't' has 1 cells, for 2 columns"):
        make_table(tmp_path, "t", 1, ["a", "b"], [[1, 2], [3]])


def test_a_full_disk_costs_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with caplog.at_level(logging.WARNING):
        make_table(tmp_path, "t", 1, ["a"], [[1]])
    assert "could not be written, and the run goes on" in caplog.text
    assert list((tmp_path / "media").iterdir()) == []


@pytest.mark.parametrize("name", ["t", "混同行列" * 10])  # each of these letters takes nine bytes of the file's name
def test_a_file_that_cannot_be_made_ends_no_run(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    if name == "t":
        (tmp_path / "media").write_text("in the way")
    make_table(tmp_path, name, 1, ["a"], [[1]])
    assert "could not be written, and the run goes on" in caplog.text


class Heard(TrainerCallback):
    def __init__(self) -> None:
        self.media: list[Any] = []

    def on_media(self, args: Any, state: Any, control: Any, media: Any, **kwargs: Any) -> None:
        self.media.append((media.name, media.step, media.is_figure))


def test_the_trainer(tmp_path: Path) -> None:
    """Callbacks are told, and the report shows the newest of each name, also of what is recorded afterwards."""
    heard = Heard()
    trainer = make_trainer(tmp_path, Classifier(), DATA, max_steps=2, callbacks=[heard])
    trainer.log_table("samples", ["text"], [["before"]])
    trainer.train()
    assert "before" in (tmp_path / "report.html").read_text()
    trainer.log_table("samples", ["text"], [["<b>afterwards</b>"]])
    trainer.log_figure("picture", np.eye(4))
    assert heard.media == [("samples", 0, False), ("samples", 2, False), ("picture", 2, True)]
    page = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;afterwards" in page
    assert "<b>afterwards" not in page
    assert ">before<" not in page
    assert 'src="data:image/png;base64,' in page
    assert "1 of earlier steps in the folder media" in page


def test_other_processes_record_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, Classifier(), DATA, max_steps=1)
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    trainer.log_table("samples", ["text"], [["x"]])
    assert not (tmp_path / "media").exists()


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("a-1.png", b"hello", "the file is no PNG"),
        ("a-1.json", b"{", "the file is no table"),
        ("a-1.json", b"[]", "the file is no table"),
        ("a-1.json", b'{"columns": 1, "rows": []}', "the file is no table"),
        ("a-1.json", b"[" * 100_000, "the file is no table"),
        ("a-1.png", PNG_START + bytes(2**20), "too large to be shown"),
    ],
)
def test_files_of_another(tmp_path: Path, file: str, content: bytes, problem: str) -> None:
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / file).write_bytes(content)
    (tmp_path / "media" / "unknown.txt").write_text("x")
    (found,) = read_media(tmp_path)
    assert problem in found.problem


def test_tensorboard(tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = str(tmp_path / "tb")
    trainer = make_trainer(tmp_path, Classifier(), DATA, max_steps=2, report_to="tensorboard", logging_dir=folder)
    trainer.train()
    trainer.log_figure("eval/picture", np.eye(8))
    trainer.log_table("eval/samples", ["text", "label"], [["a", 1]])
    events = loading.EventAccumulator(folder, size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    (picture,) = events.Images("eval/picture")
    assert (picture.step, picture.width, picture.height) == (2, 8, 8)
    (text,) = events.Tensors("eval/samples/text_summary")
    assert b"| a | 1 |" in text.tensor_proto.string_val[0]


def test_a_cell_without_a_value_is_empty(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Classifier(), DATA, max_steps=1)
    trainer.log_table("samples", ["label", "confidence"], [["a", None], [None, 0.5]])
    (found,) = read_media(tmp_path)
    assert found.rows == [["a", ""], ["", "0.5"]]
    table = make_table(tmp_path, "samples", 1, ["label", "confidence"], [["a", None]])
    assert table.as_markdown().splitlines()[-1] == "| a |  |"
    assert table.rows == [["a", None]]  # trackers that have tables get the value
