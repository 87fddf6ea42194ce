"""`paceline demo`: trains a small language model on text, in about two minutes on two cores."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.args.training import TrainingArguments
from paceline.cli.demo.byte_pairs import BytePairTokenizer
from paceline.cli.demo.corpus import Corpus, load_corpus
from paceline.cli.demo.language_model import LanguageModel, Shape, generate
from paceline.cli.demo.options import DemoOptions, make_arguments
from paceline.cli.demo.plot import can_draw_unicode, draw_curve
from paceline.cli.display import say, show_evaluations
from paceline.cli.jobs import Job, Say, Show, check_same, open_job, train_or_restore
from paceline.core.outputs import EvalPrediction
from paceline.pytorch.trainer import Trainer

VOCABULARY = 512
CONTEXT = 64
MAX_EPOCHS = 7  # with more, a model of this size only overfits
MIN_STEPS, MEASURE_SECONDS = 280, 3.0
SAMPLE_TOKENS = 220
BREAK = "\n\n"
TOKENIZER_FILE = "tokenizer.json"
DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/demo",
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 32,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.05},
    "warmup_steps": 0.08,
    "weight_decay": 0.1,
    "adam_beta2": 0.99,
    "logging_steps": 0.025,
    "eval_strategy": "steps",
    "eval_steps": 0.125,
    "save_steps": 0.125,
    "save_total_limit": 2,
    "report_to": "jsonl",
    "include_num_input_tokens_seen": "all",
    "loss_weight": "tokens",
}


class Blocks(Dataset[dict[str, Tensor]]):
    """A text split into sequences of equal length; the target of each token is the next one.

    Args:
        ids: the whole text, 1-dim.
        length: tokens per sequence.
    """

    def __init__(self, ids: Tensor, length: int) -> None:
        if len(ids) <= length:
            raise ValueError(f"the text has {len(ids)} tokens; more than {length} are needed")
        self.length = length
        count = (len(ids) - 1) // length
        self.inputs = ids[: count * length].view(count, length)
        self.targets = ids[1 : count * length + 1].view(count, length)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.inputs[index], "labels": self.targets[index]}


@dataclass(frozen=True)
class TextTask:
    """Text, tokenizer and the tokenized sequences.

    Attributes:
        bytes_per_token: mean bytes per token of the held-out text, to convert nats per token to bits per byte.
    """

    corpus: Corpus
    tokenizer: BytePairTokenizer
    train: Blocks
    held_out: Blocks
    bytes_per_token: float


def prepare_task(corpus: Corpus, vocabulary: int, context: int) -> TextTask:
    """Trains the tokenizer on the training passages, and splits training and held-out text into sequences."""
    tokenizer = BytePairTokenizer.learn(corpus.train, vocabulary)

    def encode(passages: Iterable[str]) -> Tensor:
        return torch.tensor([index for passage in passages for index in tokenizer.encode(passage + BREAK)])

    held_out = Blocks(encode(corpus.held_out), context)
    bytes_per_token = tokenizer.num_bytes(held_out.targets.flatten().tolist()) / held_out.targets.numel()
    return TextTask(corpus, tokenizer, Blocks(encode(corpus.train), context), held_out, bytes_per_token)


def run(options: DemoOptions, say: Say = say) -> int:
    """Runs the demonstration; returns the exit code."""
    args = make_arguments(DEFAULTS, options)
    folder = Path(str(args.output_dir))
    say(f"paceline demo: a small language model on real text. Everything goes to {folder}{'/'}")
    task = prepare_task(load_corpus(), VOCABULARY, CONTEXT)
    shape = choose_shape(task.tokenizer.vocabulary_size)
    resume = args.resume_from_checkpoint
    job = open_job(folder, "demo", identify(task, shape), fresh=options.fresh, say=say, resume=resume)
    trainer = build_trainer(args, options, job, task, say)
    show_evaluations(
        trainer, {"eval_loss": "held out", "eval_perplexity": "perplexity", "eval_bits_per_byte": "bits per byte"}
    )
    code = train_or_restore(trainer, job, options.arguments, say, resume)
    if code:
        return code
    (folder / TOKENIZER_FILE).write_text(json.dumps({"merges": task.tokenizer.merges}) + "\n", encoding="utf-8")
    show_results(trainer, task, options, say)
    return 0


def build_trainer(args: TrainingArguments, options: DemoOptions, job: Job, task: TextTask, say: Say) -> Trainer:
    """Builds the model and the Trainer, and sets the run's length. The seed is set before the model is created."""
    torch.manual_seed(args.seed)
    model = LanguageModel(choose_shape(task.tokenizer.vocabulary_size))
    describe(task, model, say)
    return make_trainer(model, settle_length(args, options, job, model, task, say), task)


def rebuild(job: Job, overrides: Mapping[str, Any]) -> tuple[Trainer, Show]:
    """Rebuilds the Trainer of a run as at its start, with the formatter of a sample.

    Raises:
        UsageError: the text of this Python version differs from the run's.
    """
    options = DemoOptions(arguments={**job.settings["given"], **overrides})
    task = prepare_task(load_corpus(), VOCABULARY, CONTEXT)
    check_same(job, identify(task, choose_shape(task.tokenizer.vocabulary_size)))
    trainer = build_trainer(make_arguments(DEFAULTS, options), options, job, task, lambda text: None)
    return trainer, lambda sample: task.tokenizer.decode(sample["input_ids"].tolist())


def choose_shape(vocabulary: int) -> Shape:
    """Returns the size of a model that two cores can train in two minutes."""
    return Shape(vocabulary, context=CONTEXT, width=192, layers=4, heads=6)


def identify(task: TextTask, shape: Shape) -> dict[str, Any]:
    """Returns the properties that must be equal for a checkpoint to fit."""
    digest = hashlib.sha256(BREAK.join([*task.corpus.train, *task.corpus.held_out]).encode()).hexdigest()
    return {"text": task.corpus.name, "text_sha256": digest[:16], "model": asdict(shape)}


def describe(task: TextTask, model: LanguageModel, say: Say) -> None:
    """Describes the text and the model."""
    count = sum(parameter.numel() for parameter in model.parameters())
    say(
        f"  text       {task.corpus.name}: {task.train.inputs.numel():,} tokens to train on, "
        f"{task.held_out.inputs.numel():,} held out ({task.bytes_per_token:.2f} bytes per token)\n"
        f"  model      {count:,} parameters: {model.shape.layers} layers of width {model.shape.width}, "
        f"context {model.shape.context}, vocabulary {model.shape.vocabulary}"
    )


def settle_length(
    args: TrainingArguments, options: DemoOptions, job: Job, model: LanguageModel, task: TextTask, say: Say
) -> TrainingArguments:
    """Sets the number of steps: the given one, else that of the first start, else one from a speed measurement."""
    if {"max_steps", "num_train_epochs"} & options.arguments.keys():
        return args
    if "max_steps" not in job.settings:
        sequences = args.train_batch_size * args.gradient_accumulation_steps
        seconds, threads = measure_threads(model, task.train, args)
        steps = choose_steps(seconds, options.seconds, math.ceil(len(task.train) / sequences))
        job.settings.update(max_steps=steps, threads=threads)
        say(
            f"  length     {steps:,} steps of {sequences * task.train.length:,} tokens: {1000 * seconds:.0f} ms a step "
            f"here, measured (with {threads} of {torch.get_num_threads()} threads)"
        )
    # the same number of threads at every start: another number changes the order of floating-point sums
    torch.set_num_threads(int(job.settings.get("threads", torch.get_num_threads())))
    return make_arguments({**DEFAULTS, "max_steps": job.settings["max_steps"]}, options)


def choose_steps(step_seconds: float, seconds: float, steps_per_epoch: int) -> int:
    """Returns the steps that fit into `seconds`, in multiples of 40; at most `MAX_EPOCHS`, but at least `MIN_STEPS`."""
    fitting = seconds / step_seconds
    return max(MIN_STEPS, int(min(fitting, MAX_EPOCHS * steps_per_epoch)) // 40 * 40)


def measure_threads(model: LanguageModel, dataset: Blocks, args: TrainingArguments) -> tuple[float, int]:
    """Returns the seconds per optimizer step with the fastest number of CPU threads, and that number.

    On shared cores, or in a container limited to fewer cores than are visible, all threads can be much slower than one.
    """
    most = torch.get_num_threads()
    numbers = [most] if args.device.type != "cpu" else sorted({number for number in (1, 2, most) if number <= most})
    measured: dict[int, float] = {}
    try:
        for number in numbers:
            torch.set_num_threads(number)
            measured[number] = measure_step(model, dataset, args, MEASURE_SECONDS / len(numbers))
    finally:
        torch.set_num_threads(most)
    threads = max(number for number, seconds in measured.items() if seconds <= 1.1 * min(measured.values()))
    return measured[threads], threads


def measure_step(model: LanguageModel, dataset: Blocks, args: TrainingArguments, seconds: float) -> float:
    """Returns the seconds per optimizer step on a copy of the model: the lower quartile, because of other load."""
    trial = copy.deepcopy(model).to(args.device)
    optimizer = torch.optim.AdamW(trial.parameters())
    samples = [dataset[i] for i in range(min(args.train_batch_size, len(dataset)))]
    batch = {name: torch.stack([sample[name] for sample in samples]).to(args.device) for name in samples[0]}
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 4 or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(args.gradient_accumulation_steps):
            loss = trial(**batch)["loss"]
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())  # synchronizes the device
        times.append(time.perf_counter() - start)
    return float(np.quantile(times[2:], 0.25))  # the first two steps are warm-up


def make_trainer(model: LanguageModel, args: TrainingArguments, task: TextTask) -> Trainer:
    """Builds the Trainer."""

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        nats = float(np.mean(prediction.predictions, dtype=np.float64))
        return {"perplexity": math.exp(min(nats, 700.0)), "bits_per_byte": nats / math.log(2) / task.bytes_per_token}

    return Trainer(
        model=model,
        args=args,
        train_dataset=task.train,
        eval_dataset=task.held_out,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=token_losses,
    )


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns nats per token, `(batch, tokens)`: enough for the metrics, at 1/vocabulary of the logits' size."""
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    return losses.view(labels.shape)


def show_results(trainer: Trainer, task: TextTask, options: DemoOptions, say: Say) -> None:
    """Shows the loss curve, metrics, a generated sample, and the output files."""
    folder = Path(str(trainer.args.output_dir))
    history = trainer.state.log_history
    losses = [(row["step"], row["loss"]) for row in history if "loss" in row]
    evaluations = [row for row in history if "eval_loss" in row]
    say("\nLoss in nats per token")
    say(draw_curve(losses, [(row["step"], row["eval_loss"]) for row in evaluations], unicode=can_draw_unicode()))
    if evaluations:
        last = evaluations[-1]
        say(
            f"\nOn held-out text: loss {last['eval_loss']:.3f}, perplexity {last['eval_perplexity']:.1f}, "
            f"{last['eval_bits_per_byte']:.3f} bits per byte (8 before any learning)"
        )
    ids = task.tokenizer.encode(options.prompt) or task.tokenizer.encode("\n")
    model = trainer.model
    assert isinstance(model, LanguageModel)
    text = task.tokenizer.decode(generate(model, ids, SAMPLE_TOKENS, seed=trainer.args.seed))
    say(f"\nThe model continues {options.prompt!r}:\n")
    say("\n".join("  | " + line for line in (options.prompt + text).splitlines()))
    trainer.log_table("samples", ["prompt", "continuation"], [[options.prompt, text]])
    say(
        f"\nOutput files\n"
        f"  {folder}/model.safetensors      the weights (with tokenizer.json)\n"
        f"  {folder}/checkpoint-*           to resume from\n"
        f"  {folder}/log.jsonl              every row of metrics\n"
        f"  {folder}/report.html            the page of the run: curves, evaluations, settings\n"
        f"  {folder}/run.json               arguments, plan, seeds, versions, git commit\n"
        f"  {folder}/eval_results.json      the numbers above"
    )
