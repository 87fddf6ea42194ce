"""The words of `paceline launch` that belong to the command itself, and not to what it starts."""

from __future__ import annotations

from collections.abc import Sequence

JOB_SUFFIXES = (".yaml", ".yml", ".json")


def own_words(words: Sequence[str]) -> list[str]:
    """Returns the words that may ask for help on `launch`.

    With `--on` those before the script or configuration; else the first one, because a later --help may belong to the
    script.
    """
    return list(words[: _target(words)] if is_for_service(words) else words[:1])


def is_for_service(words: Sequence[str]) -> bool:
    """True if the words ask for the file of a service: `--on` before the script, or anywhere about a configuration."""
    target = _target(words)
    is_job = target < len(words) and words[target].endswith(JOB_SUFFIXES)
    is_module = "-m" in words[:target] or "--module" in words[:target]
    searched = words if is_job and not is_module else words[:target]
    return any(word.partition("=")[0] == "--on" for word in searched)


def _target(words: Sequence[str]) -> int:
    """Returns the index of the first word that names a script or a configuration."""
    for index, word in enumerate(words):
        is_value = index > 0 and words[index - 1] in ("--output", "--image")
        if word.endswith((".py", *JOB_SUFFIXES)) and not word.startswith("-") and not is_value:
            return index
    return len(words)
