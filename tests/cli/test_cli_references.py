"""`package.module:name`: found, called with what it takes, and wrong names said with the nearest right one."""

import sys
from pathlib import Path

import pytest

from paceline.cli.errors import UsageError, need
from paceline.cli.references import Reference, put_on_path, read_reference, require_reference

MODULE = """
class Net:
    def __init__(self, width, depth=1):
        self.width, self.depth = width, depth

def make(size=3, tokenizer=None):
    return size, tokenizer

def anything(**options):
    return options

def metrics(prediction, scale=1):
    return prediction * scale

VALUE = 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"references_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    put_on_path(tmp_path)
    return name


def test_names_are_told_from_paths():
    assert read_reference("model", "a.b:c") == Reference("model", "a.b:c")
    assert read_reference("model", {"factory": "a:b", "x": 1}) == Reference("model", "a:b", {"x": 1})
    for other in ("gpt2", "folder/file.txt", r"C:\folder", "https://host", {"path": "x"}, None, 3):
        assert read_reference("model", other) is None


@pytest.mark.parametrize("value", ["nothing", {"x": 1}, 3])
def test_where_a_reference_is_needed_nothing_else_is_taken(value: object):
    with pytest.raises(UsageError, match=r"package\.module:name"):
        require_reference("trainer", value)


def test_a_wrong_form_is_said():
    with pytest.raises(UsageError, match=r"model\.factory: 'a\.b'"):
        read_reference("model", {"factory": "a.b"})


def test_calling_passes_options_and_what_is_offered_and_wanted(module: str):
    assert Reference("data", f"{module}:make", {"size": 5}).call(tokenizer="t", other=1) == (5, "t")
    assert Reference("data", f"{module}:anything", {"a": 1}).call(tokenizer="t") == {"a": 1}
    assert Reference("model", f"{module}:Net", {"width": 2}).call(tokenizer="t").width == 2


def test_binding_keeps_functions_and_makes_objects_of_classes(module: str):
    assert Reference("compute_metrics", f"{module}:metrics").bind()(3) == 3
    assert Reference("compute_metrics", f"{module}:metrics", {"scale": 2}).bind()(3) == 6
    assert Reference("data_collator", f"{module}:Net", {"width": 2}).bind().width == 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Nett", {}, "has no 'Nett'; did you mean 'Net'"),
        ("Net", {"widht": 1}, "model.widht: .*takes no 'widht'; did you mean 'width'"),
        ("Net", {}, "missing a required argument: 'width'"),
        ("VALUE", {}, "is a int, not something to call"),
    ],
)
def test_what_is_wrong_is_said(module: str, name: str, options: dict[str, int], message: str):
    with pytest.raises(UsageError, match=message):
        Reference("model", f"{module}:{name}", options).call()


def test_a_missing_module_is_said_but_an_error_inside_one_is_raised(module: str, tmp_path: Path):
    with pytest.raises(UsageError, match="there is no module 'nowhere'"):
        Reference("model", "nowhere.at_all:x").load()
    (tmp_path / f"{module}_broken.py").write_text("import not_there_either", encoding="utf-8")
    with pytest.raises(ModuleNotFoundError, match="not_there_either"):
        Reference("model", f"{module}_broken:x").load()


def test_the_first_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    put_on_path(tmp_path / "a", tmp_path / "b")
    put_on_path(tmp_path / "a", tmp_path / "b")
    assert sys.path[:2] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert sys.path.count(str(tmp_path / "a")) == 1


def test_a_missing_package_names_its_extra():
    with pytest.raises(UsageError, match=r"digits: .*paceline\[demo\]"):
        need("not_there_at_all", "demo", "digits")
