"""Files of options: what is wrong is said with file and line; what is made to attack is refused at once."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from paceline.args.option_files import MOST_BYTES, read_mapping
from paceline.args.training import TrainingArguments
from paceline.args.yaml_text import read as parse_yaml
from paceline.cli.config import parse_value, read_config
from paceline.cli.errors import UsageError


def laughs(levels: int = 40) -> str:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, levels)]
    return "\n".join(lines)


def merges(levels: int = 40) -> str:
    lines = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{k: *a{n - 1}, l: *a{n - 1}}}" for n in range(1, levels)]
    return "\n".join(lines)


HOSTILE = {
    "sequences": laughs(),
    "mappings": merges(),
    "one line": "a: " + laughs().replace("\n", "\nb"),
    "merge keys": "a0: &a0 {x: 1}\n"
    + "\n".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)),
    "depth": "a: " + "[" * 5000 + "]" * 5000,
    "blocks": "a:\n" + "\n".join(" " * n + "b:" for n in range(1, 300)),
    "itself": "a: &a [*a]",
    "itself in a mapping": "a: &a {b: *a}",
    "object": "a: !!python/object/apply:os.system [true]",
    "name": "a: !!python/name:os.system",
}


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_hostile_files_are_refused_at_once(tmp_path: Path, case: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(HOSTILE[case])
    start = time.process_time()
    with pytest.raises(ValueError, match=r"job\.yaml cannot be read"):
        read_mapping(path)
    with pytest.raises(UsageError, match=r"job\.yaml"):
        read_config(path)
    with pytest.raises(UsageError, match="--data"):
        parse_value("--data", HOSTILE[case])
    assert time.process_time() - start < 5


def test_deep_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"a\.json cannot be read"):
        read_mapping(tmp_path / "a.json")


@pytest.mark.slow
def test_aliases_of_real_files_stay(tmp_path: Path) -> None:
    text = "base: &base {lr: 0.1, list: [1, 2]}\nruns:\n" + "\n".join(
        f"  r{n}: {{<<: *base, seed: {n}}}" for n in range(200)
    )
    assert parse_yaml(text)["runs"]["r7"] == {"lr": 0.1, "list": [1, 2], "seed": 7}
    large = json.dumps({"a": [{"n": n, "list": [n] * 5} for n in range(3000)]})
    assert len(parse_yaml(large)["a"]) == 3000


# content -> the place, and what was expected there
WRONG_YAML = {
    "model: a\ndata: *b\n": "line 2, column 7: expected an earlier &b",
    "model: a\n\tdata: b\n": "line 2, column 1: expected spaces: YAML allows no tab",
    "model: a\ndata: b: c\n": "line 2, column 8: expected one 'name: value' in a line",
    "model: a\n data: c\n": "line 2, column 6: expected one 'name: value' in a line",
    "model a\ndata b\nx: 1\n": "line 3, column 2: expected one 'name: value' in a line",
    "model: @a\n": "line 1, column 8: expected quotes around a text that begins with @",
    'model: "C:\\data"\n': r"line 1, column 12: expected \\ for a backslash",
    "data: x\nmodel: 'abc\nmore: c\n": "line 2, column 8: expected a closing quote",
    "data: x\nmodel: [a, b\nmore: c\n": "line 2, column 8: expected commas between the values, and a closing ]",
    "model: a\n---\nmodel: b\n": "line 2, column 1: expected one document",
    "model: a\nmodel: b\n": "line 2, column 1: 'model' is given twice",
    "a:\n  b: 1\n  b: 2\n": "line 3, column 3: 'b' is given twice",
    "? [a]\n: b\n": "line 1, column 3: expected a text as name",
    "<<: 3\n": "line 1, column 5: expected a mapping",
    "a: !foo b\n": "line 1, column 4: expected a plain value without the tag !foo",
    "a: !!bool b\n": "line 1, column 4: expected a valid bool",
    "a: 2020-13-45\n": "line 1, column 4: expected a valid timestamp",
    f"a: {'9' * 5000}\n": "line 1, column 4: expected a valid int",
    "a: b\nc: d\x07\n": "line 2: expected text; this is the control character 0x07",
    "a:\n  - b\n c: d\n": "line 3",
    "%model: a\n": "expected 'name: value', or quotes",
    "a: !!omap [a]": "expected 'name: value' in each line",
}
# the parser of Python 3.13 knows a last comma
LAST_COMMA = (
    "line 1, column 8: expected no comma after the last value"
    if sys.version_info >= (3, 13)
    else "line 2, column 1: expected a name in double quotes"
)
WRONG_JSON = {
    "": "it is empty",
    '{"a": 1,\n}': LAST_COMMA,
    "{'a': 1}": "line 1, column 2: expected a name in double quotes",
    '{"a": 1} x': "line 1, column 10: expected nothing after",
    '{"a": "b': "line 1, column 7: expected a closing double quote",
    '{"a": b}': "line 1, column 7: expected a value",
    '{"a" 1}': "line 1, column 6: expected ':'",
    '{"a": 1 "b": 2}': "line 1, column 9: expected ','",
    '{"a": "\t"}': r"line 1, column 8: expected no line break or tab",
    '{"a": "\\d"}': "line 1, column 8: expected one of",
    '{"a": 1,\n "a": 2}': "line 1, 2: 'a' is given twice",
    '{"a": ' + "9" * 5000 + "}": "a number has too many digits",
    "[1]": "holds a list; expected names and values",
}
OF_PARSERS = ("<unicode string>", "Expecting", "(char ", "while ", "found ", "codec", "Exceeds", "recursion")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        *[("job.yaml", text, message) for text, message in WRONG_YAML.items()],
        *[("job.json", text, message) for text, message in WRONG_JSON.items()],
        ("job.yaml", "- a\n", "holds a list; expected names and values"),
        ("job.yaml", "model:a\n", "needs a space after the colon"),
    ],
)
def test_a_mistake_is_reported_with_file_line_and_what_was_expected(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_mapping(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not any(words in str(caught.value) for words in OF_PARSERS), caught.value


def test_a_file_that_is_no_text_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"a: b\nc: \xe9\n")
    with pytest.raises(ValueError, match=r"job\.yaml cannot be read: line 2 is not text in UTF-8"):
        read_mapping(path)
    path.write_bytes("a: b\n".encode("utf-16"))
    with pytest.raises(ValueError, match="UTF-16; expected UTF-8"):
        read_mapping(path)
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ValueError, match="expected a file of options"):
        read_mapping(path)


@pytest.mark.parametrize("name", ["job.yaml", "job.json"])
def test_a_byte_order_mark_is_no_content(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_mapping(tmp_path / name) == {"a": 1}


@pytest.mark.parametrize("option", ["fsdp_config", "deepspeed", "lr_scheduler_kwargs", "accelerator_config"])
def test_a_file_that_an_option_names_is_reported_the_same(tmp_path: Path, option: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"a": 1,\n "b": }')
    with pytest.raises(ValueError, match=r"settings\.json cannot be read: line 2, column 7: expected a value"):
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True, fsdp=option == "fsdp_config", **{option: str(path)})
