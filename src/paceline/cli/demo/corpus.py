"""Loads text that comes with Python: the language reference of `help()`, else sources of the standard library."""

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
    """Text split into passages, some of them held out.

    Attributes:
        name: the source of the text, for display.
        train: passages to train on.
        held_out: passages never trained on. No paragraph is in both.
    """

    name: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]


def load_corpus() -> Corpus:
    """Returns the text of `pydoc_data.topics`, or sources of the standard library if a distribution omits it."""
    documents = read_topics()
    if documents:
        return split_corpus("the English of pydoc_data.topics", documents)
    logger.warning("pydoc_data.topics is not part of this Python: the standard library's sources are used instead.")
    documents = read_sources(Path(sysconfig.get_path("stdlib")))
    return split_corpus("sources of the standard library", documents)


def read_topics() -> list[str]:
    """Returns the topics in alphabetical order; an empty list if the module is missing."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return []
    return [topics[name] for name in sorted(topics)]


def read_sources(folder: Path, limit: int = SOURCE_CHARACTERS) -> list[str]:
    """Reads the `.py` files of a folder in alphabetical order, up to `limit` characters.

    Raises:
        FileNotFoundError: the folder has no sources.
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
    """Drops repeated paragraphs, splits the rest into passages, and holds out every n-th passage.

    The reference repeats whole sections under several topics; without the first step they would be in both halves.
    """
    passages = [passage for text in drop_repeats(documents) for passage in cut_passages(text)]
    held_out = passages[hold_out_every // 2 :: hold_out_every]
    kept = [passage for i, passage in enumerate(passages) if i % hold_out_every != hold_out_every // 2]
    return Corpus(name, tuple(kept), tuple(held_out))


def drop_repeats(documents: Iterable[str]) -> list[list[str]]:
    """Returns the paragraphs of each document without later repetitions (ignoring spacing)."""
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
    """Joins neighbouring paragraphs into passages of at least `size` characters (the last may be shorter)."""
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
