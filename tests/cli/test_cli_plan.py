"""`paceline plan`: the options that it prints."""

from __future__ import annotations

import json
import sys
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


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_json_is_alone_in_the_output_of_a_job_that_prints(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["init", "module", f"loud_{command}.yaml"]) == 0
    (module,) = tmp_path.glob("*.py")
    with module.open("a", encoding="utf-8") as file:
        file.write('\nprint("made aloud")\n')
    capsys.readouterr()
    main([command, f"loud_{command}.yaml", "--json"])
    output, other = capsys.readouterr()
    assert isinstance(json.loads(output), dict)
    assert "made aloud\n" in other
