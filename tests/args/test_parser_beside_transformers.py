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
    """Returns the values that a parser reads from a command line, with their types; or the type of its error."""
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
    assert len(refused) < 50


# ---- the boolean options of training arguments, on every command line that a script may have


def own_fields(base: Any) -> Any:
    """A user's subclass, with truth values of its own."""

    @dataclass
    class Own(base):  # type: ignore[misc]
        pack: bool = False
        shuffle_documents: bool = True
        use_lora: Optional[bool] = None  # noqa: UP045
        freeze: bool = field(default=True, metadata={"help": "Why."})

    Own.__annotations__ = {"pack": bool, "shuffle_documents": bool, "use_lora": Optional[bool], "freeze": bool}  # noqa: UP045
    return Own


def read_flags(parser: Any, words: list[str]) -> Any:
    """Returns the values that a parser reads before it makes a dataclass; None if it refuses the command line."""
    try:
        namespace, remaining = parser.parse_known_args(words)
    except SystemExit:
        return None
    return None if remaining else namespace


def switches_of(parser: Any) -> dict[str, Any]:
    """The options of a parser that take a truth value."""
    return {
        action.dest: action
        for action in parser._actions
        if action.const is True or getattr(action.type, "__name__", "") == "string_to_bool"
    }


@pytest.mark.parametrize("name", ["TrainingArguments", "Seq2SeqTrainingArguments"])
@pytest.mark.parametrize("is_subclass", [False, True])
def test_every_boolean_option_as_a_flag(name: str, is_subclass: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Bare, with a value and negated, through both parsers: what the reference's own arguments take, ours take alike.

    An own option of paceline, and one that the reference wants a value for, may be bare as well.
    """
    import paceline

    kinds = [getattr(package, name) for package in (transformers, paceline)]
    theirs, ours = [own_fields(kind) if is_subclass else kind for kind in kinds]
    reference = transformers.HfArgumentParser(theirs)
    switches = switches_of(reference)
    assert {"gradient_checkpointing", "bf16", "tf32", "fsdp", "remove_unused_columns"} <= switches.keys()
    for parser in (HfArgumentParser(ours), transformers.HfArgumentParser(ours)):
        for option in switches_of(parser).keys() | switches.keys():
            for words in ([f"--{option}"], [f"--{option}", "true"], [f"--{option}", "0"], [f"--no_{option}"]):
                expected = read_flags(reference, words)
                found = read_flags(parser, words)
                if len(words) == 1 and option != "use_lora" and words[0] == f"--{option}":
                    assert getattr(found, option) is True, words
                if expected is not None:
                    assert found is not None, words
                    as_given = getattr(expected, option), getattr(found, option)
                    assert to_value(option, as_given[0]) == to_value(option, as_given[1]), words
                elif option in switches and words[-1] != f"--{option}":
                    assert found is None, words
    capsys.readouterr()  # usage lines of the refusals


def to_value(option: str, given: Any) -> Any:
    """The value of an option, of which text is read when the arguments are made."""
    if isinstance(given, str) and option == "include_num_input_tokens_seen":
        return given in ("true", "1")
    return given


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "line",
    [
        "--gradient_checkpointing",
        "--activation_checkpointing --bf16 --use_cpu --no_remove_unused_columns",
        "--gradient_checkpointing false --disable_tqdm true",
        "--include_num_input_tokens_seen",
        "--fsdp",
        "--load_best_model_at_end --eval_strategy epoch --save_strategy epoch --greater_is_better false",
        "--log_level detail",
    ],
)
def test_arguments_from_flags(line: str) -> None:
    import paceline

    words = ["--output_dir", "out", *line.split()]
    names = ("gradient_checkpointing", "activation_checkpointing", "bf16", "remove_unused_columns", "disable_tqdm")
    names += ("include_num_input_tokens_seen", "load_best_model_at_end", "greater_is_better", "metric_for_best_model")
    (theirs,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses(
        words, look_for_args_file=False
    )
    for parser_class in (HfArgumentParser, transformers.HfArgumentParser):
        (ours,) = parser_class(paceline.TrainingArguments).parse_args_into_dataclasses(words, look_for_args_file=False)
        assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
        assert bool(ours.fsdp) == bool(theirs.fsdp)


def test_boolean_options_for_tensorflow_as_flags() -> None:
    """Those of `TrainingArguments`, and its own: each bare flag is true, or refused by name."""
    from paceline.args.errors import UnsupportedOption
    from paceline.tensorflow.arguments import TFTrainingArguments

    for parser in (HfArgumentParser(TFTrainingArguments), transformers.HfArgumentParser(TFTrainingArguments)):
        assert "xla" in switches_of(parser)
        for option in switches_of(parser):
            assert getattr(read_flags(parser, [f"--{option}"]), option) is True
        (made,) = parser.parse_args_into_dataclasses(["--xla", "--no_remove_unused_columns"], look_for_args_file=False)
        assert (made.xla, made.remove_unused_columns) == (True, False)
        with pytest.raises(UnsupportedOption, match="activation_checkpointing=True"):
            parser.parse_args_into_dataclasses(["--gradient_checkpointing"], look_for_args_file=False)
