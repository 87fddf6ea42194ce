"""`paceline plan`: the options that it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.args import yaml_text
from paceline.cli.main import main
from paceline.cli.plan import print_options


@pytest.mark.parametrize(
    "name", ["rocket \U0001f680", "名前", "\\ud83d\\ude00", "tab\tline\n", "\x7f\x85\u2028\ufeff", "# no"]
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_printed_options_are_those_of_the_run(name: str, encoding: str) -> None:
    """Python's JSON writes one character as a pair of escapes, which YAML reads as two halves of a character."""
    text = print_options({"run_name": name, "seed": 1}, ["run_name"]).encode(encoding, "backslashreplace").decode()
    assert yaml_text.read(text) == {"arguments": {"run_name": name, "seed": 1}}


@pytest.mark.slow
def test_printed_options_are_a_file_of_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["init", "module", "first.yaml"]) == 0

    def printed(name: str) -> str:
        capsys.readouterr()
        assert main(["plan", name, "--print-config"]) == 0
        return capsys.readouterr().out

    out = printed("first.yaml")
    parts = (tmp_path / "first.yaml").read_text("utf-8").split("\narguments:\n")[0]
    (tmp_path / "second.yaml").write_text(parts + out[out.index("\narguments:\n") :], "utf-8")
    assert printed("second.yaml") == out
    assert "  hub_token: null\n" in out
