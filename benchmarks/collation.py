"""The cost of collating: paceline's collators and transformers', on the same samples of up to 512 tokens.

Samples are lists of token ids, as a tokenizer gives them. The time is the CPU time of one batch, the median of many in
a process; one thread.

    python benchmarks/collation.py [--quick] [--rounds 9]
"""

from __future__ import annotations

import importlib
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

from measure import (
    choose_contenders,
    make_parser,
    ratios,
    report_from_child,
    run_child,
    summarize,
    take_turns,
    target,
    write_result,
)

NEEDS = {"transformers": "transformers", "paceline": "transformers"}  # the tokenizer is transformers' in both
NUM_SAMPLES, NUM_CHOICES, TOKENS, VOCABULARY = 32, 4, 512, 30_000
REPEATS, QUICK_REPEATS = 15, 2
LIMIT_RATIO = 1.0

Sample = dict[str, Any]


def make_tokenizer() -> Any:
    """A tokenizer of words, made here."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    tokens = [*special.values(), *(f"word{number}" for number in range(VOCABULARY - len(special)))]
    words = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="[PAD]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def make_sample(generator: random.Random, length: int) -> Sample:
    """Token ids and their mask, as lists."""
    ids = [1, *(generator.randrange(4, VOCABULARY) for _ in range(length - 2)), 2]
    return {"input_ids": ids, "attention_mask": [1] * length}


def make_samples(generator: random.Random) -> dict[str, list[Sample]]:
    """Samples of the kinds that the collators take; those in `texts` have half the tokens to all of them."""
    lengths = [generator.randint(TOKENS // 2, TOKENS) for _ in range(NUM_SAMPLES - 1)] + [TOKENS]
    texts = [make_sample(generator, length) for length in lengths]
    whole = [make_sample(generator, TOKENS) for _ in range(NUM_SAMPLES)]
    offsets = [(place + place // 3, place + place // 3 + 1) for place in range(TOKENS)]  # words of three tokens
    choices = [[make_sample(generator, length) for _ in range(NUM_CHOICES)] for length in lengths[::NUM_CHOICES]]
    return {
        "texts": texts,
        "classes": [{**text, "labels": [number % 9 for number in text["input_ids"]]} for text in texts],
        "pairs": [{**text, "labels": text["input_ids"][::2]} for text in texts],
        "whole": whole,
        "words": [{**text, "offset_mapping": offsets} for text in whole],
        "choices": [{"labels": 1, **{name: [choice[name] for choice in row] for name in row[0]}} for row in choices],
    }


def make_collators(library: Any, tokenizer: Any) -> dict[str, tuple[Any, str]]:
    """Returns, by the name of each case, its collator and the samples of a batch."""
    language = library.DataCollatorForLanguageModeling
    return {
        "padding": (library.DataCollatorWithPadding(tokenizer), "texts"),
        "token classes": (library.DataCollatorForTokenClassification(tokenizer), "classes"),
        "multiple choice": (library.DataCollatorForMultipleChoice(tokenizer), "choices"),
        "text to text": (library.DataCollatorForSeq2Seq(tokenizer), "pairs"),
        "next token": (language(tokenizer, mlm=False), "texts"),
        "masked tokens": (language(tokenizer), "texts"),
        "masked words": (language(tokenizer, whole_word_mask=True), "words"),
        "permutation": (library.DataCollatorForPermutationLanguageModeling(tokenizer), "whole"),
        "flattening": (library.DataCollatorWithFlattening(return_flash_attn_kwargs=True), "texts"),
    }


def time_calls(call: Callable[[], Any], repeats: int) -> float:
    """CPU milliseconds of one call: the median."""
    call()
    times = []
    for _ in range(repeats):
        before = time.process_time()
        call()
        times.append(1e3 * (time.process_time() - before))
    return statistics.median(times)


def time_collators(contender: str, repeats: int) -> dict[str, float]:
    """CPU milliseconds of a batch, by what is measured."""
    warnings.simplefilter("ignore")
    samples = make_samples(random.Random(0))
    collators = make_collators(importlib.import_module(contender), make_tokenizer())
    return {
        name: time_calls(lambda: collator(samples[kind]), repeats)  # noqa: B023 called before the loop goes on
        for name, (collator, kind) in collators.items()
    }


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=9)
    arguments = parser.parse_args()
    repeats = QUICK_REPEATS if arguments.quick else REPEATS
    if arguments.child:
        report_from_child(time_collators(arguments.child, repeats))
        return
    if arguments.quick:
        arguments.rounds = 1
    contenders = choose_contenders(NEEDS, arguments.contenders)
    quick = ["--quick"] if arguments.quick else []
    measured = take_turns(
        contenders, arguments.rounds, lambda name: run_child(__file__, ["--child", name, *quick], num_threads=1)
    )
    names = list(measured[contenders[0]][0]) if contenders else []
    rows: dict[str, Any] = {}
    for name in names:
        of_theirs = ratios(measured, name, "transformers").get("paceline")
        milliseconds = {contender: summarize([row[name] for row in measured[contender]]) for contender in contenders}
        rows[name] = {"ms": milliseconds, "of_transformers": of_theirs}
    worst = max((row["of_transformers"]["median"] for row in rows.values() if row["of_transformers"]), default=None)
    write_result(
        arguments,
        "collation",
        {
            "settings": {"threads": 1, "samples": NUM_SAMPLES, "tokens": TOKENS},
            "rows": rows,
            "measured": measured,
            "targets": [
                target("CPU time of a batch over that of transformers, the worst collator", worst, LIMIT_RATIO, "x")
            ],
        },
    )


if __name__ == "__main__":
    main()
