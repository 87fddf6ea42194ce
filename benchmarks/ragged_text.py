"""The cost of padding: training a small causal model on texts of ragged lengths, packed, grouped and padded.

Lengths are drawn once, with a mean of 90 tokens and a longest of 476. The number is the CPU time for each useful token,
one that is no padding, after the first steps, on one thread; its inverse is the useful tokens of a second of one core.
`limit` is the same model on the same number of tokens in rows of one length. The loop by hand, accelerate's and
Lightning have padded batches.

    python benchmarks/ragged_text.py [--quick] [--rounds 5]
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import tempfile
import time
import warnings
from typing import Any

import peers
from measure import (
    Measured,
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

THEIRS = {"padded": {}, "grouped": {"train_sampling_strategy": "group_by_length"}, "flattened": {}}
OURS = {"padded": None, "grouped": "group", "packed": "pack", "flattened": "flatten"}
NEEDS = {
    "limit": "transformers",
    **{f"paceline {name}": "transformers" for name in OURS},
    **{f"transformers {name}": "accelerate" for name in THEIRS},
    **{f"{name}, padded": needed for name, needed in peers.NEEDS.items()},
}
BEST = "paceline flattened"
MEAN, LONGEST, SHORTEST, BATCH_SIZE = 90, 476, 8, 16
STEPS, QUICK_STEPS, FIRST_STEPS = 40, 4, 2
MODEL = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
VOCABULARY = 4096
LIMIT_RATIO = 1 / 0.9

Sample = dict[str, list[int]]


def make_lengths(number: int) -> list[int]:
    """Lengths with the mean and the longest that the page names."""
    generator = random.Random(0)
    drawn = [min(max(generator.lognormvariate(0, 0.8), 0.05), 20) for _ in range(number)]
    scale = MEAN / statistics.mean(drawn)
    lengths = [min(max(round(each * scale), SHORTEST), LONGEST) for each in drawn]
    lengths[number // 2] = LONGEST
    return lengths


def make_texts(lengths: list[int]) -> list[Sample]:
    generator = random.Random(1)
    rows = [[generator.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def make_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**MODEL, vocab_size=VOCABULARY, max_position_embeddings=512, pad_token_id=0)
    return LlamaForCausalLM(config)


def pad(samples: list[Sample]) -> dict[str, Any]:
    """Rows of the longest sample, padded on the right."""
    import torch

    width = max(len(sample["input_ids"]) for sample in samples)
    fill = [width - len(sample["input_ids"]) for sample in samples]
    ids = [sample["input_ids"] + [0] * empty for sample, empty in zip(samples, fill, strict=True)]
    labels = [sample["labels"] + [-100] * empty for sample, empty in zip(samples, fill, strict=True)]
    mask = [[1] * (width - empty) + [0] * empty for empty in fill]
    return {
        "input_ids": torch.tensor(ids),
        "labels": torch.tensor(labels),
        "attention_mask": torch.tensor(mask),
    }


def make_clock(library: Any, marks: list[tuple[float, int]]) -> Any:
    """A callback that notes the CPU time after the first steps and at the end, with the steps that were made."""

    class Clock(library.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (FIRST_STEPS, state.max_steps):
                marks.append((time.process_time(), state.global_step))

    return Clock()


def train(contender: str, steps: int) -> dict[str, float]:
    """CPU microseconds for each useful token."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lengths = make_lengths(steps * BATCH_SIZE)
    if contender == "limit":
        lengths = [MEAN] * len(lengths)
    counted: list[int] = []
    marks: list[tuple[float, int]] = []
    peer = contender.removesuffix(", padded")
    if peer in peers.NEEDS:
        train_peer(peer, make_texts(lengths), steps, counted, marks)
    else:
        train_trainer(contender, make_texts(lengths), steps, counted, marks)
    (begin, first), (end, last) = marks
    tokens = sum(counted[first:last])
    seconds = end - begin
    return {"us_per_token": 1e6 * seconds / tokens, "tokens_per_second": tokens / seconds}


def counting(collate: Any, counted: list[int]) -> Any:
    """A collator that notes the tokens of each batch that are no padding."""

    def collate_and_count(samples: list[Sample]) -> Any:
        counted.append(sum(len(sample["input_ids"]) for sample in samples))
        return collate(samples)

    return collate_and_count


def train_peer(peer: str, texts: list[Sample], steps: int, counted: list[int], marks: list[tuple[float, int]]) -> None:
    def note(step: int) -> None:
        if step in (FIRST_STEPS, steps):
            marks.append((time.process_time(), step))

    with contextlib.redirect_stdout(sys.stderr):
        peers.fit(peer, peers.Job(make_model(), texts, BATCH_SIZE, steps, note, counting(pad, counted)))


def train_trainer(
    contender: str, texts: list[Sample], steps: int, counted: list[int], marks: list[tuple[float, int]]
) -> None:
    library, options, collate = choose(contender)
    with tempfile.TemporaryDirectory() as folder:
        arguments = library.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=steps,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            **options,
        )
        trainer = library.Trainer(
            make_model(),
            arguments,
            train_dataset=texts,
            data_collator=counting(collate, counted),
            callbacks=[make_clock(library, marks)],
        )
        trainer.train()


def choose(contender: str) -> tuple[Any, dict[str, Any], Any]:
    """The library, its options, and the collator."""
    if contender.startswith("transformers"):
        import transformers

        name = contender.split()[1]
        collate = transformers.DataCollatorWithFlattening() if name == "flattened" else pad
        return transformers, THEIRS[name], collate
    import paceline

    return paceline, {"packing": None if contender == "limit" else OURS[contender.split()[1]]}, pad


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=5)
    arguments = parser.parse_args()
    steps = QUICK_STEPS if arguments.quick else STEPS
    if arguments.child:
        report_from_child(train(arguments.child, steps))
        return
    if arguments.quick:
        arguments.rounds = 1
    contenders = choose_contenders(NEEDS, arguments.contenders)
    quick = ["--quick"] if arguments.quick else []

    def measure(name: str) -> Measured:
        return run_child(__file__, ["--child", name, *quick], num_threads=1)

    measured = take_turns(contenders, arguments.rounds, measure)
    over_limit = ratios(measured, "us_per_token", "limit")
    rows = {
        name: {
            "tokens_per_second": summarize([row["tokens_per_second"] for row in measured[name]]),
            "over_limit": over_limit.get(name),
        }
        for name in contenders
    }
    own = rows.get(BEST, {}).get("over_limit")
    targets = [target(f"CPU time of a useful token over the limit's, {BEST}", own and own["median"], LIMIT_RATIO, "x")]
    for name in THEIRS:
        found = ratios(measured, "us_per_token", f"transformers {name}").get(BEST)
        targets.append(
            target(f"CPU time of a useful token, {BEST} over transformers {name}", found and found["median"], 1.0, "x")
        )
    write_result(
        arguments,
        "ragged_text",
        {
            "settings": {
                "threads": 1,
                "batch_size": BATCH_SIZE,
                "steps": steps - FIRST_STEPS,
                "mean": MEAN,
                "longest": LONGEST,
                "parameters": sum(parameter.numel() for parameter in make_model().parameters()),
            },
            "rows": rows,
            "measured": measured,
            "targets": targets,
        },
    )


if __name__ == "__main__":
    main()
