"""A small byte-pair tokenizer, learned from the text it will encode (Sennrich et al., 2016, arXiv:1508.07909).

It works on UTF-8 bytes, so that there are no unknown characters; ids 0-255 are the bytes, then one id per merge.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

# a word with the blank before it, a run of line breaks and indentation, or a run of punctuation
PIECES = re.compile(r" ?[A-Za-z_]+| ?[0-9]+| ?[^\sA-Za-z_0-9]+|\s+(?=\S)|\s+")
Pair = tuple[int, int]


class BytePairTokenizer:
    """Encodes text to ids and back, losslessly.

    Args:
        merges: pairs of ids in the order of learning; the n-th becomes the id `256 + n`.
    """

    def __init__(self, merges: Sequence[Pair]) -> None:
        self.merges: list[Pair] = [(int(left), int(right)) for left, right in merges]
        self._ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        self._bytes = [bytes([value]) for value in range(256)]
        for left, right in self.merges:
            self._bytes.append(self._bytes[left] + self._bytes[right])
        self._known: dict[str, list[int]] = {}

    @property
    def vocabulary_size(self) -> int:
        return len(self._bytes)

    @classmethod
    def learn(cls, texts: Iterable[str], vocabulary_size: int) -> BytePairTokenizer:
        """Merges the most frequent pair until there are `vocabulary_size` ids, or no pair occurs twice.

        Ties are broken by the smaller pair, so that the tokenizer is a function of the text.

        Raises:
            ValueError: `vocabulary_size` is below 256, the number of bytes.
        """
        if vocabulary_size < 256:
            raise ValueError(f"vocabulary_size={vocabulary_size}: at least 256 are needed, one per byte")
        counts = Counter(piece for text in texts for piece in PIECES.findall(text))
        words = [list(piece.encode()) for piece in counts]
        return cls(_learn_merges(words, list(counts.values()), vocabulary_size - 256))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        ids: list[int] = []
        for piece in PIECES.findall(text):
            known = self._known.get(piece)
            if known is None:
                known = self._known[piece] = self._encode_piece(piece)
            ids.extend(known)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids; invalid UTF-8 becomes replacement characters."""
        return b"".join(self._bytes[index] for index in ids).decode("utf-8", errors="replace")

    def num_bytes(self, ids: Iterable[int]) -> int:
        """Returns the number of bytes of text that the ids encode."""
        return sum(len(self._bytes[index]) for index in ids)

    def _encode_piece(self, piece: str) -> list[int]:
        ids = list(piece.encode())
        while len(ids) > 1:
            best = min(pairwise(ids), key=lambda pair: self._ranks.get(pair, len(self.merges)))
            rank = self._ranks.get(best)
            if rank is None:
                break
            ids = _merge(ids, best, 256 + rank)
        return ids


def _learn_merges(words: list[list[int]], counts: list[int], num_merges: int) -> list[Pair]:
    totals: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)  # words that contain a pair: a merge changes only those
    for index, (word, count) in enumerate(zip(words, counts, strict=True)):
        for pair in pairwise(word):
            totals[pair] += count
            places[pair].add(index)
    merges: list[Pair] = []
    while len(merges) < num_merges and totals:
        best = min(totals, key=lambda pair: (-totals[pair], pair))
        if totals[best] < 2:
            break
        new_id = 256 + len(merges)
        merges.append(best)
        for index in places.pop(best):
            word, count = words[index], counts[index]
            for pair in pairwise(word):
                totals[pair] -= count
            words[index] = word = _merge(word, best, new_id)
            for pair in pairwise(word):
                totals[pair] += count
                places[pair].add(index)
        totals += Counter()  # drops pairs with a count of 0
    return merges


def _merge(ids: list[int], pair: Pair, new_id: int) -> list[int]:
    merged: list[int] = []
    position = 0
    while position < len(ids):
        if position + 1 < len(ids) and ids[position] == pair[0] and ids[position + 1] == pair[1]:
            merged.append(new_id)
            position += 2
        else:
            merged.append(ids[position])
            position += 1
    return merged
