"""Modules that are imported on first use."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.optional import LateModule, require


def test_a_late_module_is_copied_and_pickled_by_its_name() -> None:
    late = LateModule("colorsys")
    for again in (copy.copy(late), copy.deepcopy(late), pickle.loads(pickle.dumps(late))):
        assert again.rgb_to_hsv(0, 0, 0) == (0, 0, 0)


def test_nothing_is_loaded_by_asking_for_a_special_name() -> None:
    sys.modules.pop("colorsys", None)
    assert not hasattr(LateModule("colorsys"), "__wrapped__")
    assert "colorsys" not in sys.modules


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
try:
    from paceline import {name}
except ImportError as error:
    print(error)
import paceline
paceline.TrainingArguments("out", learning_rate=1e-3)
"""


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [
        ("torch", "Trainer", "torch"),
        ("torch", "DataCollatorForLanguageModeling", "torch"),
        ("tensorflow", "TFTrainer", "tf"),
    ],
)
def test_a_missing_framework_is_named_with_its_extra(module: str, name: str, extra: str) -> None:
    """In a process of its own, where the framework cannot be imported; arguments need neither."""
    command = [sys.executable, "-c", WITHOUT.format(module=module, name=name)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "is required for" in result.stdout
    assert f'pip install "paceline[{extra}]"' in result.stdout


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(ImportError, match=r'no_such_package.part is required: pip install "paceline\[some\]"'):
        require("no_such_package.part", "some")


@pytest.mark.parametrize("line", ["import no_such_package", "from os import no_such_name"])
def test_what_an_installed_package_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """The extra would install the package that is there."""
    (tmp_path / "broken_package.py").write_text(line)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ImportError, match=r"broken_package is installed, but its import fails: .*no_such_") as caught:
        require("broken_package", "some")
    assert "pip" not in str(caught.value)
