"""Our parser beside transformers', over many kinds of fields: the same objects, or both refuse."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Dict, List, Literal, Optional, Union  # noqa: UP035  As users write them.

import pytest

from paceline.args.parser import HfArg, HfArgumentParser

transformers = pytest.importorskip("transformers", minversion="5.23")


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(str, Enum):  # noqa: UP042  As users write it.
    LOW = "low"
    HIGH = "high"


class Number(Enum):
    ONE = 1
    TWO = 2


@dataclass
class Plain:
    a_word: str
    an_int: int = 3
    a_float: float = 0.5
    text: str = "x"


@dataclass
class Switches:
    off: bool = False
    on: bool = True
    unset: Optional[bool] = None  # noqa: UP045
    also_unset: bool | None = None
    explained: bool = field(default=True, metadata={"help": "Why."})


@dataclass
class Choices:
    colour: Colour = Colour.RED
    level: Level = Level.LOW
    number: Number = Number.ONE
    word: Literal["a", "b"] = "a"
    mixed: Literal["a", 1, 2.5] = "a"
    listed: str = field(default="x", metadata={"choices": ["x", "y"]})


@dataclass
class Lists:
    ints: list[int] = field(default_factory=list)
    words: List[str] = field(default_factory=lambda: ["p", "q"])  # noqa: UP006
    floats: list[float] = field(default_factory=lambda: [0.1])
    maybe: Optional[list[str]] = None  # noqa: UP045
    older: Optional[List[int]] = None  # noqa: UP006, UP045


@dataclass
class Maybes:
    an_int: Optional[int] = None  # noqa: UP045
    a_float: float | None = None
    text: str | None = None
    older: Union[str, None] = None  # noqa: UP007
    path: Optional[Path] = None  # noqa: UP045


@dataclass
class Dicts:
    settings: dict | None = None  # type: ignore[type-arg]
    older: Optional[Dict[str, Any]] = None  # noqa: UP006, UP045
    either: dict | str | None = None  # type: ignore[type-arg]


@dataclass
class Required:
    ints: list[int]
    colour: Colour
    flag: bool
    word: Literal["a", "b"]

    def __post_init__(self) -> None:
        self.colour = Colour(self.colour)


@dataclass
class Aliased:
    name: str = HfArg(default="n", aliases=["-n", "--called"], help="Whose.")
    steps: int = HfArg(default=1, aliases="-s")
    made: int = field(init=False, default=7)


LINES: list[tuple[Any, str]] = [
    (Plain, "--a_word w"),
    (Plain, "--a-word w --an-int 4 --a-float 2"),
    (Plain, "--a_word=w --an_int=-4 --a_float=1e-3 --text="),
    (Plain, ""),
    (Plain, "--a_word w --an_int 1.5"),
    (Plain, "--a_word w --an_int x"),
    (Switches, ""),
    (Switches, "--off --no_on --unset true --also_unset false"),
    (Switches, "--off yes --on no --unset 0 --also_unset 1"),
    (Switches, "--off TRUE --no-on --explained f"),
    (Switches, "--off t --on y --no_explained"),
    (Switches, "--off maybe"),
    (Switches, "--no_off"),
    (Switches, "--unset"),
    (Choices, ""),
    (Choices, "--colour blue --level high --number 2 --word b --mixed 1 --listed y"),
    (Choices, "--mixed 2.5"),
    (Choices, "--colour green"),
    (Choices, "--number 3"),
    (Choices, "--word c"),
    (Choices, "--listed z"),
    (Lists, ""),
    (Lists, "--ints 1 2 3 --words a --floats 1 2.5 --maybe x y --older 4"),
    (Lists, "--ints 1 x"),
    (Lists, "--ints"),
    (Maybes, ""),
    (Maybes, "--an_int 3 --a_float 0.25 --text t --older u --path a/b"),
    (Maybes, "--an_int none"),
    (Dicts, ""),
    (Dicts, "--either file.json"),
    (Required, "--ints 1 2 --colour blue --word a"),
    (Required, "--ints 1 --colour blue --word a --flag"),
    (Required, "--colour blue --word a"),
    (Required, "--ints 1 --colour blue"),
    (Aliased, "-n x -s 4"),
    (Aliased, "--called y"),
    (Aliased, "--made 1"),
]


def outcome(parser_class: Any, kind: Any, words: list[str], **keywords: Any) -> Any:
    """What a parser makes of a command line, as plain values with their types; or the kind of its refusal."""
    try:
        made = parser_class(kind).parse_args_into_dataclasses(words, look_for_args_file=False, **keywords)
    except SystemExit as stop:
        return f"exit {stop.code}"
    except ValueError:
        return "ValueError"
    return [
        [(name, type(value), value) for name, value in vars(item).items()] if dataclasses.is_dataclass(item) else item
        for item in made
    ]


@pytest.mark.parametrize(("kind", "line"), LINES)
def test_command_lines(kind: Any, line: str) -> None:
    ours = outcome(HfArgumentParser, kind, line.split())
    assert ours == outcome(transformers.HfArgumentParser, kind, line.split())


def test_dicts_as_json_where_theirs_refuses() -> None:
    line = ["--settings", '{"a":[1,{"b":null}]}', "--older", '{"c":1}', "--either", '{"d":2}']
    assert outcome(transformers.HfArgumentParser, Dicts, line) == "exit 2"
    (made,) = HfArgumentParser(Dicts).parse_args_into_dataclasses(line, look_for_args_file=False)
    assert (made.settings, made.older, made.either) == ({"a": [1, {"b": None}]}, {"c": 1}, {"d": 2})


def test_remaining_words_and_several_dataclasses() -> None:
    words = ["--a_word", "w", "--ints", "5", "--stray", "1", "more"]
    kinds = (Plain, Lists)
    for keywords in ({"return_remaining_strings": True}, {}):
        ours = outcome(HfArgumentParser, kinds, words, **keywords)
        assert ours == outcome(transformers.HfArgumentParser, kinds, words, **keywords)


@pytest.mark.parametrize("allows", [True, False])
@pytest.mark.parametrize(
    "values", [{"a_word": "w", "ints": [1]}, {"a_word": "w", "on": False}, {"a_word": "w", "stray": 1}, {"ints": [1]}]
)
def test_dicts_and_files(values: dict[str, Any], allows: bool, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.yaml").write_text(json.dumps(values))  # JSON is YAML
    results = []
    for parser_class in (HfArgumentParser, transformers.HfArgumentParser):
        parser = parser_class((Plain, Lists, Switches))
        for read, source in (
            (parser.parse_dict, values),
            (parser.parse_json_file, tmp_path / "a.json"),
            (parser.parse_yaml_file, tmp_path / "a.yaml"),
        ):
            try:
                results.append(read(source, allow_extra_keys=allows))
            except (ValueError, TypeError) as error:
                results.append(type(error))
    assert results[:3] == results[3:]


def test_arguments_files(tmp_path: Path) -> None:
    first, second = tmp_path / "first.args", tmp_path / "second.args"
    first.write_text("--a_word one\n--an_int 1 --off")
    second.write_text("--an_int 2")
    for given in (
        {"args": ["--text", "t"], "args_filename": str(first)},
        {"args": ["--from", str(first), "--from", str(second), "--a_float", "9"], "args_file_flag": "--from"},
        {"args": ["--from", str(first), "--an_int", "5"], "args_file_flag": "--from"},
    ):
        made = [
            parser((Plain, Switches)).parse_args_into_dataclasses(**given)
            for parser in (HfArgumentParser, transformers.HfArgumentParser)
        ]
        assert made[0] == made[1]


def test_defaults_set_on_the_parser() -> None:
    for parser_class in (HfArgumentParser, transformers.HfArgumentParser):
        parser = parser_class((Plain, Switches))
        parser.set_defaults(an_int=9, on=False)
        plain, switches = parser.parse_args_into_dataclasses(["--a_word", "w"], look_for_args_file=False)
        assert (plain.an_int, switches.on) == (9, False)


def test_their_parser_on_every_option_of_ours() -> None:
    """Each flag by itself, with a value of its type: the reference's parser makes of our dataclass what ours does."""
    from paceline import Seq2SeqTrainingArguments

    ours = HfArgumentParser(Seq2SeqTrainingArguments)
    theirs = transformers.HfArgumentParser(Seq2SeqTrainingArguments)
    flags = {action.dest: action for action in theirs._actions}
    refused = []
    for item in dataclasses.fields(Seq2SeqTrainingArguments):
        action, hint = flags[item.name], str(item.type)
        if "dict" in hint and "str |" not in hint.replace("dict[str", ""):
            continue  # theirs takes no dict
        values = [str(choice) for choice in action.choices or ()]
        words = values[-1:] or (["true"] if "bool" in hint and "dict" not in hint else ["1"])
        line = [f"--{item.name}", *words]
        mine, other = (outcome(type(parser), Seq2SeqTrainingArguments, line) for parser in (ours, theirs))
        assert mine == other, line
        refused += [item.name] if isinstance(mine, str) else []
    assert len(refused) < 45
