"""Real text that every Python carries: the language reference that `help()` shows, else the library's own sources."""

from __future__ import annotations

import importlib
import logging
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

PASSAGE_CHARACTERS = 3_000
SOURCE_CHARACTERS = 600_000
BLANK_LINES = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Corpus:
    """Text cut into passages, some of them held out.

    Attributes:
        name: where the text comes from, for people.
        train: passages to train on.
        held_out: passages never trained on. No paragraph stands in both.
    """

    name: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]


def load_corpus() -> Corpus:
    """The text of `pydoc_data.topics`, or, where a distribution leaves it out, sources of the standard library."""
    documents = read_topics()
    if documents:
        return split_corpus("the English of pydoc_data.topics", documents)
    logger.warning("pydoc_data.topics is not part of this Python: the standard library's sources are used instead.")
    documents = read_sources(Path(sysconfig.get_path("stdlib")))
    return split_corpus("sources of the standard library", documents)


def read_topics() -> list[str]:
    """The topics in alphabetical order; an empty list where the module is missing."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return []
    return [topics[name] for name in sorted(topics)]


def read_sources(folder: Path, limit: int = SOURCE_CHARACTERS) -> list[str]:
    """The `.py` files of a folder in alphabetical order, until `limit` characters are read.

    Raises:
        FileNotFoundError: the folder holds no source at all.
    """
    documents: list[str] = []
    total = 0
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        documents.append(text)
        total += len(text)
        if total >= limit:
            break
    if not documents:
        raise FileNotFoundError(f"{folder} holds no .py file: there is no text to train on in this Python")
    return documents


def split_corpus(name: str, documents: Iterable[str], hold_out_every: int = 12) -> Corpus:
    """Drop repeated paragraphs, cut the rest into passages, and hold out every n-th passage.

    The reference repeats whole sections under several topics; left in, they would stand in both halves.
    """
    passages = [passage for text in drop_repeats(documents) for passage in cut_passages(text)]
    held_out = passages[hold_out_every // 2 :: hold_out_every]
    kept = [passage for i, passage in enumerate(passages) if i % hold_out_every != hold_out_every // 2]
    return Corpus(name, tuple(kept), tuple(held_out))


def drop_repeats(documents: Iterable[str]) -> list[list[str]]:
    """The paragraphs of each document, every paragraph kept where it is first seen (spacing aside)."""
    seen: set[str] = set()
    results = []
    for text in documents:
        fresh = []
        for paragraph in BLANK_LINES.split(text):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                fresh.append(paragraph.strip("\n").rstrip())
        if fresh:
            results.append(fresh)
    return results


def cut_passages(paragraphs: list[str], size: int = PASSAGE_CHARACTERS) -> list[str]:
    """Join neighbouring paragraphs into passages of at least `size` characters (the last may be shorter)."""
    passages: list[str] = []
    current: list[str] = []
    length = 0
    for paragraph in paragraphs:
        current.append(paragraph)
        length += len(paragraph) + 2
        if length >= size:
            passages.append("\n\n".join(current))
            current, length = [], 0
    if current:
        passages.append("\n\n".join(current))
    return passages
