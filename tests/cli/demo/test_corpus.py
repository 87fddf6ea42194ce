"""The text: no paragraph in both halves, repeatable, and a fallback where the topics are missing."""

import sys
from pathlib import Path

import pytest

from paceline.cli.demo.corpus import (
    BLANK_LINES,
    cut_passages,
    drop_repeats,
    load_corpus,
    read_sources,
    read_topics,
    split_corpus,
)


def paragraphs(passages: tuple[str, ...]) -> set[str]:
    return {" ".join(part.split()) for passage in passages for part in BLANK_LINES.split(passage)}


def test_the_real_text_is_large_and_its_halves_share_no_paragraph():
    corpus = load_corpus()
    assert sum(map(len, corpus.train)) > 200_000
    assert sum(map(len, corpus.held_out)) > 10_000
    assert not paragraphs(corpus.train) & paragraphs(corpus.held_out)
    assert corpus == load_corpus()


def test_repeated_paragraphs_are_dropped_whatever_their_spacing():
    assert drop_repeats(["a  b\n\nc", "a b\n\n\nd", "c"]) == [["a  b", "c"], ["d"]]


def test_passages_keep_every_paragraph_in_order():
    parts = [f"{i} " + "x" * 50 for i in range(20)]
    passages = cut_passages(parts, size=200)
    assert "\n\n".join(passages) == "\n\n".join(parts)
    assert all(len(passage) >= 200 for passage in passages[:-1])


def test_every_nth_passage_is_held_out():
    corpus = split_corpus("x", [f"{i} " + "y" * 4000 for i in range(24)])
    assert len(corpus.held_out) == 2
    assert len(corpus.train) == 22


def test_without_the_topics_the_sources_of_the_library_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert read_topics() == []
    for i in range(30):
        (tmp_path / f"m{i:02}.py").write_text(f"# {i}\n\n" + f"line {i}\n" * 400, encoding="utf-8")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    corpus = load_corpus()
    assert corpus.name == "sources of the standard library"
    assert corpus.held_out
    assert len(read_sources(tmp_path, limit=5_000)) == 2


def test_a_library_without_sources_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no text to train on"):
        read_sources(tmp_path)
