"""The tokenizer: lossless on any text, repeatable, shorter than bytes on the text it learned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.demo.byte_pairs import BytePairTokenizer

TEXT = "the theme of the thesis is the theory of themes. " * 20
TOKENIZER = BytePairTokenizer.learn([TEXT], 300)


@given(st.text())
def test_any_text_comes_back(text: str):
    encodable = text.encode("utf-8", errors="replace").decode("utf-8")
    assert TOKENIZER.decode(TOKENIZER.encode(encodable)) == encodable


@given(st.text(alphabet="them s.\n"))
def test_the_bytes_are_counted_right(text: str):
    assert TOKENIZER.num_bytes(TOKENIZER.encode(text)) == len(text.encode())


def test_the_same_text_gives_the_same_merges_however_it_is_cut():
    assert BytePairTokenizer.learn([TEXT], 300).merges == TOKENIZER.merges
    assert BytePairTokenizer.learn([TEXT[:49], TEXT[49:]], 300).merges == TOKENIZER.merges


def test_the_first_merge_is_the_most_frequent_pair():
    tokenizer = BytePairTokenizer.learn(["ab ab ab cd"], 257)
    assert tokenizer.merges == [(ord("a"), ord("b"))]
    assert tokenizer.encode("abcd") == [256, ord("c"), ord("d")]


def test_a_known_word_is_one_token():
    assert len(TOKENIZER.encode(" the")) == 1
    assert len(TOKENIZER.encode(TEXT)) < len(TEXT) / 2


def test_learning_ends_when_nothing_repeats():
    assert BytePairTokenizer.learn(["abc"], 1000).vocabulary_size == 256


def test_fewer_ids_than_bytes_are_refused():
    with pytest.raises(ValueError, match="vocabulary_size=255"):
        BytePairTokenizer.learn(["a"], 255)


def test_bytes_that_are_no_text_are_shown_as_such():
    assert TOKENIZER.decode([0xFF]) == "\N{REPLACEMENT CHARACTER}"
