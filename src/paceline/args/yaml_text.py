"""Reads and writes YAML. PyYAML takes 10 ms to import, so this module is imported only when needed."""

from __future__ import annotations

import re
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]  # the stubs are in a separate package

_MOST_DEPTH = 100
_MOST_SHARING = 100  # maximum ratio of a file's expanded size to its stored size
_LEAST_VALUES = 10_000  # values; smaller files are not checked

# the parser's message -> the expected content at the position that it reports
_EXPECTED = [
    (
        r"mapping values are not allowed",
        "expected one 'name: value' in a line, names indented equally, and quotes around a text with ': '",
    ),
    (r"found character '\\t'", "expected spaces: YAML allows no tab here"),
    (r"found character '(.+)' that cannot start", "expected quotes around a text that begins with {0}"),
    (r"found undefined alias '(.+)'", "expected an earlier &{0}, or quotes around a text that begins with *"),
    (r"while scanning an? (?:alias|anchor)", "expected a name after * or &, or quotes around the text"),
    (r"found unknown escape character '(.+)'", "expected \\\\ for a backslash in double quotes, or single quotes"),
    (r"expected escape sequence", "expected hexadecimal digits after \\x or \\u in double quotes"),
    (r"but found another document", "expected one document; this is a second one"),
    (r"found unhashable key", "expected a text as name, not a list or a mapping"),
    (r"expected a mapping(?: or list of mappings)? for merging", "expected a mapping, or a list of them, after <<"),
    (
        r"could not determine a constructor for the tag '(?:tag:yaml.org,2002:|)(.+)'",
        "expected a plain value without the tag {0}, or quotes around a text that begins with !",
    ),
    (
        r"while (?:scanning|parsing) a (?:tag|directive)|undefined tag handle|expected URI|version 1|YAML directive",
        "expected 'name: value', or quotes around a text that begins with ! or %",
    ),
    (
        r"expected <block end>|expected '<document start>'",
        "expected names of one mapping, or the items of a list, indented equally, and one value after each name",
    ),
    (r"expected the node content", "expected a value"),
    (r"found duplicate anchor '(.+)'", "expected a new name; the anchor &{0} exists"),
]
# as above, for errors that begin at the position of the message's context
_EXPECTED_FROM = [
    (
        r"found unexpected (?:end of stream|document separator)",
        "expected a closing quote for the text from here",
    ),
    (r"could not find expected ':'", "expected 'name: value'"),
    (r"expected ',' or '(.)'", "expected commas between the values, and a closing {0} for the bracket that opens here"),
]


class _Refused(yaml.MarkedYAMLError):  # type: ignore[misc, unused-ignore]  # Any without the stubs
    """Valid YAML that is refused here. The message gives the reason."""

    def __init__(self, message: str, mark: Any) -> None:
        super().__init__(problem=message, problem_mark=mark)


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]  # Any without the stubs
    """Loads YAML's safe types; refuses repeated keys and files whose aliases expand out of proportion.

    An alias refers to a whole part of the file: a few lines of nested aliases expand to billions of values.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._num_nodes, self._depth = 0, 0
        self._sizes: dict[int, int] = {}  # node -> number of values in it after expansion of aliases

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise _Refused(f"values are nested deeper than {_MOST_DEPTH}", self.get_mark())
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise _Refused("an alias refers to a value that contains it", self.get_mark())
        if id(node) not in self._sizes:
            self._sizes[id(node)] = 1 + sum(self._sizes.get(id(each), 1) for each in _nodes_in(node))
            self._num_nodes += 1
        if self._sizes[id(node)] > max(_LEAST_VALUES, _MOST_SHARING * self._num_nodes):
            text = f"aliases make {self._sizes[id(node)]:,} values of {self._num_nodes:,}"
            raise _Refused(text, self.get_mark())
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen and key != "<<":
                raise _Refused(f"{key!r} is given twice; expected it once", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, OverflowError) as error:  # an invalid number, date or boolean
            kind = str(node.tag).rpartition(":")[2]
            text = f"expected a valid {kind}, or quotes around a text; this is none: {str(node.value)[:40]!r}"
            raise _Refused(text, node.start_mark) from error


def _nodes_in(node: object) -> list[Any]:
    """Returns the child nodes of a node."""
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def read(text: str) -> Any:
    """Parses YAML text with safe types only.

    Raises:
        ValueError: invalid YAML, repeated names, aliases that expand out of proportion, or deep nesting; the message
            gives line, column and the expected content.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        raise ValueError(_describe(error)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"line {line}: expected text; this is the control character {error.character:#04x}") from None
    except RecursionError:
        raise ValueError(f"values are nested deeper than {_MOST_DEPTH}") from None


def _describe(error: Any) -> str:
    """Returns the position of an error and the content that was expected there."""
    problem = f"{error.context or ''} {error.problem or ''}".strip()
    mark = error.problem_mark or error.context_mark
    expected = "" if not isinstance(error, _Refused) else str(error.problem)
    for pattern, text in _EXPECTED:
        found = re.search(pattern, problem)
        if found and not expected:
            expected = text.format(*found.groups())
    for pattern, text in _EXPECTED_FROM:
        found = re.search(pattern, problem)
        if found and not expected:
            expected = text.format(*found.groups())
            mark = error.context_mark or mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return where + (expected or "expected 'name: value' in each line, values of text, numbers, lists or mappings")


def write(values: object) -> str:
    """Converts plain values to YAML, in their order."""
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
