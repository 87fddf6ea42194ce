"""Files of options that are made to attack: aliases that explode, nests without an end, tags that make objects."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from paceline.args.serialize import read_mapping
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
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"job\.yaml cannot be read"):
        read_mapping(path)
    with pytest.raises(UsageError, match=r"job\.yaml"):
        read_config(path)
    with pytest.raises(UsageError, match="--data"):
        parse_value("--data", HOSTILE[case])
    assert time.monotonic() - start < 5


def test_deep_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"a\.json cannot be read"):
        read_mapping(tmp_path / "a.json")


def test_aliases_of_real_files_stay(tmp_path: Path) -> None:
    text = "base: &base {lr: 0.1, list: [1, 2]}\nruns:\n" + "\n".join(
        f"  r{n}: {{<<: *base, seed: {n}}}" for n in range(200)
    )
    assert parse_yaml(text)["runs"]["r7"] == {"lr": 0.1, "list": [1, 2], "seed": 7}
    large = json.dumps({"a": [{"n": n, "list": [n] * 5} for n in range(3000)]})
    assert len(parse_yaml(large)["a"]) == 3000
