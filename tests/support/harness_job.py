"""Tasks of the lm-evaluation-harness over a local dataset, on one and on two processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from samples_job import llama

from paceline import EvaluationHarness, Trainer, TrainerCallback, TrainingArguments

WORDS = [f"w{number}" for number in range(28)]
QUESTIONS = [
    {
        "question": f"w{place} w{place + 1} w{place + 2}",
        "choices": [f"w{place + 3}", f"w{25 - place}"],
        "gold": place % 2,
    }
    for place in range(8)
]
TASK = """task: {name}
dataset_path: json
dataset_name: null
dataset_kwargs:
  data_files: {{test: {path}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def write_tasks(folder: Path, names: tuple[str, ...]) -> None:
    """Writes tasks of the same questions, in other orders."""
    folder.mkdir(parents=True)
    for place, name in enumerate(names):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS[place:]))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, path=data))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "</s>": 1, "<s>": 2, **{word: place + 3 for place, word in enumerate(WORDS)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


class Rows(TrainerCallback):
    """Keeps the metrics of each evaluation."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.rows.append(metrics)


def run(folder: Path, harness: EvaluationHarness | None, **options: Any) -> tuple[Trainer, list[dict[str, float]]]:
    """Trains a model for four steps with an evaluation every two; returns the metrics of each."""
    ids = torch.randint(3, 30, (16, 6), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    defaults: dict[str, Any] = {
        "max_steps": 4, "learning_rate": 0.05, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4,
    }  # fmt: skip
    watch = Rows()
    trainer = Trainer(
        llama(),
        TrainingArguments(str(folder), **{**defaults, **options}),
        train_dataset=rows,
        eval_dataset=rows[:4],
        processing_class=tokenizer(),
        callbacks=[watch, *([harness] if harness is not None else [])],
    )
    trainer.train()
    return trainer, watch.rows


def accuracy(model: Any, questions: list[dict[str, Any]]) -> float:
    """Returns the share of questions whose likelier choice is right."""
    tokens, right = tokenizer(), 0
    with torch.no_grad():
        for row in questions:
            scores = []
            for choice in row["choices"]:
                ids = torch.tensor([tokens.encode(f"{row['question']} {choice}", add_special_tokens=False)])
                scores.append(model(input_ids=ids).logits[0, -2].log_softmax(-1)[ids[0, -1]].item())
            right += int(scores[row["gold"]] > scores[1 - row["gold"]])
    return right / len(questions)


def main() -> None:
    folder = Path(sys.argv[1])
    harness = EvaluationHarness(["one", "two"], include_path=folder / "tasks")
    trainer, rows = run(folder / "run", harness, parallel="ddp", per_device_train_batch_size=2)
    trainer.model.eval()
    found = {"rows": rows, "one": accuracy(trainer.model, QUESTIONS), "two": accuracy(trainer.model, QUESTIONS[1:])}
    (folder / f"{trainer.args.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
