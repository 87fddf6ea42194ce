"""Samples per second of training loaders: tokenized text, images and a stream, without workers and with two.

The loaders are paceline's, the Hugging Face Trainer's and torch's alone, over the same data with the same batches. The
time is the wall time of the batches after the first of an epoch, so that starting workers does not count.

    python benchmarks/data_loading.py [--quick] [--rounds 7]
"""

from __future__ import annotations

import importlib
import itertools
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

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

NEEDS = {"torch": "torch", "transformers": "accelerate", "paceline": "transformers"}  # the tokenizer is transformers'
BATCH, WORKERS = 32, (0, 2)
NUM_SAMPLES, QUICK_SAMPLES = 8_192, 256
MEAN_TOKENS, VOCABULARY = 128, 30_000
IMAGE = (3, 64, 64)
LIMIT_RATIO = 1.0

Sample = dict[str, Any]


class Model(nn.Module):
    """Names the inputs, of which the Trainers drop no column then."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, pixel_values: Any = None, labels: Any = None
    ) -> Tensor:
        return self.weight


class Images(Dataset[Sample]):
    """Random images, as unsigned bytes."""

    def __init__(self, size: int) -> None:
        self.pixels = np.random.default_rng(0).integers(0, 256, (min(size, 1024), *IMAGE), dtype=np.uint8)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return {"pixel_values": self.pixels[index % len(self.pixels)], "labels": index % 10}


class Stream(IterableDataset[Sample]):
    """Tensors of token ids; each of several workers yields its own part."""

    def __init__(self, size: int) -> None:
        self.rows = torch.randint(4, VOCABULARY, (256, MEAN_TOKENS), generator=torch.Generator().manual_seed(0))
        self.size = size

    def __iter__(self) -> Iterator[Sample]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, self.size, step):
            yield {"input_ids": self.rows[index % len(self.rows)], "labels": index % 10}


def make_texts(size: int) -> Any:
    """Token ids and their mask, of ragged lengths, in the types that tokenizers store."""
    import datasets

    generator = np.random.default_rng(0)
    lengths = generator.integers(MEAN_TOKENS // 4, 2 * MEAN_TOKENS - MEAN_TOKENS // 4, size)
    value = datasets.Value
    features = {"input_ids": datasets.List(value("int32")), "attention_mask": datasets.List(value("int8"))}
    columns = {
        "input_ids": [generator.integers(4, VOCABULARY, length, dtype=np.int32) for length in lengths],
        "attention_mask": [np.ones(length, np.int8) for length in lengths],
        "labels": generator.integers(0, 10, size),
    }
    return datasets.Dataset.from_dict(columns, datasets.Features({**features, "labels": value("int64")}))


def make_tokenizer() -> Any:
    """A tokenizer that pads; it knows no words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[PAD]": 0}, unk_token="[PAD]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")


def pad(samples: list[Sample]) -> dict[str, Tensor]:
    """A collator as one writes it for torch."""
    rows = nn.utils.rnn.pad_sequence
    batch = {
        name: rows([torch.tensor(sample[name]) for sample in samples], batch_first=True)
        for name in ("input_ids", "attention_mask")
    }
    return {**batch, "labels": torch.tensor([sample["labels"] for sample in samples])}


def make_loader(contender: str, data: Any, is_text: bool, workers: int, folder: str) -> Any:
    """The loader of a contender over this data."""
    if contender == "torch":
        shuffle = not isinstance(data, IterableDataset)
        return DataLoader(
            data, BATCH, shuffle=shuffle, num_workers=workers, collate_fn=pad if is_text else None, drop_last=True
        )
    library = importlib.import_module(contender)
    args = library.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=BATCH, dataloader_num_workers=workers, use_cpu=True,
        max_steps=1_000, report_to=[], dataloader_drop_last=True, disable_tqdm=True,
    )  # fmt: skip
    options = {"processing_class": make_tokenizer()} if is_text else {}
    return library.Trainer(model=Model(), args=args, train_dataset=data, **options).get_train_dataloader()


def microseconds(loader: Any) -> float:
    """Wall time of a sample in the second epoch, after its first batch."""
    for _ in itertools.islice(loader, 2):
        pass
    batches = iter(loader)
    next(batches)
    begun, count = time.perf_counter(), 0
    for batch in batches:
        count += len(batch["labels"])
    return 1e6 * (time.perf_counter() - begun) / count


def time_loaders(contender: str, size: int) -> dict[str, float]:
    """Microseconds of a sample, by the kind of data and the number of workers."""
    warnings.simplefilter("ignore")
    datasets = {"text": make_texts(size), "images": Images(size), "stream": Stream(size)}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for (kind, data), workers in itertools.product(datasets.items(), WORKERS):
            loader = make_loader(contender, data, kind == "text", workers, folder)
            found[f"{kind}, {workers} workers"] = microseconds(loader)
    return found


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=7)
    arguments = parser.parse_args()
    size = QUICK_SAMPLES if arguments.quick else NUM_SAMPLES
    if arguments.child:
        report_from_child(time_loaders(arguments.child, size))
        return
    if arguments.quick:
        arguments.rounds = 1
    contenders = choose_contenders(NEEDS, arguments.contenders)
    quick = ["--quick"] if arguments.quick else []
    measured = take_turns(
        contenders, arguments.rounds, lambda name: run_child(__file__, ["--child", name, *quick], num_threads=1)
    )
    rows: dict[str, Any] = {}
    for name in measured[contenders[0]][0] if contenders else ():
        rates = {each: summarize([1e6 / row[name] for row in measured[each]]) for each in contenders}
        over = {base: ratios(measured, name, base).get("paceline") for base in ("torch", "transformers")}
        rows[name] = {"samples_per_second": rates, "of_torch": over["torch"], "of_transformers": over["transformers"]}
    worst = max((row["of_transformers"]["median"] for row in rows.values() if row["of_transformers"]), default=None)
    write_result(
        arguments,
        "data_loading",
        {
            "settings": {"threads": 1, "samples": size, "batch_size": BATCH, "tokens": MEAN_TOKENS, "image": IMAGE},
            "rows": rows,
            "measured": measured,
            "targets": [
                target("time of a sample over that of the Hugging Face Trainer's loader, the worst", worst,
                       LIMIT_RATIO, "x"),
            ],
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
