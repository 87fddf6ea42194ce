"""Reading and writing of YAML. PyYAML takes 10 ms to import, so this module is imported only when needed."""

from __future__ import annotations

from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]  # the stubs are a package of their own

_MOST_DEPTH = 100
_MOST_SHARING = 100  # maximum ratio of a file's expanded size to its stored size
_LEAST_VALUES = 10_000  # values; smaller files are not checked


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
            raise yaml.YAMLError(f"values are nested deeper than {_MOST_DEPTH}")
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise yaml.YAMLError("an alias refers to a value that contains it")
        if id(node) not in self._sizes:
            self._sizes[id(node)] = 1 + sum(self._sizes.get(id(each), 1) for each in _nodes_in(node))
            self._num_nodes += 1
        if self._sizes[id(node)] > max(_LEAST_VALUES, _MOST_SHARING * self._num_nodes):
            raise yaml.YAMLError(f"aliases make {self._sizes[id(node)]:,} values of {self._num_nodes:,}")
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen and key != "<<":
                raise ValueError(f"{key!r} is given twice{key_node.start_mark}.")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _nodes_in(node: object) -> list[Any]:
    """Returns the child nodes of a node."""
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def read(text: str) -> Any:
    """Parses YAML text, of safe types only.

    Raises: ValueError, for invalid YAML, repeated keys, aliases that expand out of proportion, and deep nesting.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def write(values: object) -> str:
    """Converts plain values to YAML, in their order."""
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
