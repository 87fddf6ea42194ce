"""Compare the runs of two commits bit for bit: losses, norms, weights, files, order of events.

    python tools/same_runs.py compare REVISION            # the working tree beside a commit, some minutes
    python tools/same_runs.py compare REVISION --only plain ddp
    python tools/same_runs.py record FOLDER               # the working tree alone

For changes that are to change nothing. Uses public names only, so that it runs on either side of any change of the
inside. The working tree also resumes from the checkpoints that the other commit wrote.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# keys of log rows, and files, that hold a time or a size of this machine
VOLATILE_KEYS = ("runtime", "per_second", "memory", "time")
VOLATILE_FILES = ("events.out", "runs/")
FIRST = "PACELINE_SAME_RUNS_FIRST"  # where the first of two commits was recorded

Record = dict[str, Any]
Case = Callable[[Path], Record]
CASES: dict[str, tuple[int, Case]] = {}


def case(num_processes: int = 1) -> Callable[[Case], Case]:
    """Register a run under its function's name, to be made by so many processes."""

    def register(run: Case) -> Case:
        CASES[run.__name__] = (num_processes, run)
        return run

    return register


# ---- models and data


def make_tagger(dropout: float = 0.1) -> Any:
    """Returns a token classifier: embedding, two layers, dropout; its loss is a mean over the targets."""
    import torch
    from torch import nn

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers: Any = nn.Sequential(
                nn.Embedding(13, 16), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 13)
            )

        def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
            logits = self.layers(input_ids)
            if labels is None:
                return {"logits": logits}
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

        def pipeline_stages(self, num_stages: int) -> list[nn.Module]:
            return [FirstStage(self.layers[:2]), LastStage(nn.Sequential(*self.layers[2:]))]

    class FirstStage(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Any) -> Any:
            return self.inner(input_ids)

    class LastStage(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: Any, labels: Any = None) -> dict[str, Any]:
            logits = self.inner(hidden)
            if labels is None:
                return {"logits": logits}
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    torch.manual_seed(0)
    return Tagger()


def make_samples(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns samples of 9 token ids whose targets are ragged."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(number):
        ids = torch.randint(1, 13, (9,), generator=generator)
        labels = (ids * 3) % 13
        labels[int(torch.randint(2, 10, (1,), generator=generator)) :] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


class Stream:
    """An iterable dataset without a length."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.samples)


def make_text_model(kind: str) -> Any:
    """Returns a tiny model of transformers: "gpt2" or "bart"."""
    import torch
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=13, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        return transformers.GPT2LMHeadModel(config)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = transformers.BartConfig(vocab_size=13, max_position_embeddings=16, **sizes, **heads, **tokens)
    return transformers.BartForConditionalGeneration(config)


# ---- what is recorded


def public_name(name: str) -> Any:
    """Returns a public name of the package under test, loaded when a run needs it."""
    return getattr(importlib.import_module("paceline"), name)


def make_recorder() -> Any:
    """Returns a callback that notes its events in order, without on_save, which follows an asynchronous write."""
    base: Any = public_name("TrainerCallback")

    class Recorder(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self.events: list[str] = []

    def listen(name: str) -> Callable[..., None]:
        def note(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.events.append(f"{name}@{state.global_step}")

        return note

    for name in [name for name in dir(base) if name.startswith("on_") and name != "on_save"]:
        setattr(Recorder, name, listen(name))
    return Recorder()


def run(folder: Path, model: Any, data: Any, cls: Any = None, resume: Any = None, **options: Any) -> Record:
    """Train, evaluate and predict; returns what another commit must give bit for bit."""
    arguments_class = options.pop("arguments_class", public_name("TrainingArguments"))
    defaults: dict[str, Any] = {
        "learning_rate": 0.01,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "report_to": "none",
        "disable_tqdm": True,
    }
    evaluated = options.pop("eval_dataset", make_samples(11, seed=1))
    collator = options.pop("data_collator", None)
    args = arguments_class(str(folder), **{**defaults, **options})
    recorder = make_recorder()
    trainer = (cls or public_name("Trainer"))(
        model, args, train_dataset=data, eval_dataset=evaluated, data_collator=collator, callbacks=[recorder]
    )
    trainer.train(resume_from_checkpoint=resume)
    output = trainer.predict(evaluated)
    trainer.save_model(str(folder / "final"))
    return {
        "log": [steady(row) for row in trainer.state.log_history],
        "predictions": digest(output.predictions),
        "metrics": steady(output.metrics),
        "events": recorder.events,
    }


def steady(row: Any) -> dict[str, Any]:
    """Returns a row of the log without times; numbers as they print, which tells every bit."""
    return {key: repr(value) for key, value in row.items() if not any(word in key for word in VOLATILE_KEYS)}


def digest(value: Any) -> str:
    """Returns a hash of arrays, also nested ones."""
    import numpy as np

    found = hashlib.sha256()
    for part in value if isinstance(value, tuple | list) else [value]:
        found.update(np.ascontiguousarray(part).tobytes())
    return found.hexdigest()


def weights_of(folder: Path) -> dict[str, str]:
    """Returns a hash of each saved tensor, by name; of whole files where they are no safetensors."""
    from safetensors.numpy import load_file

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, array in sorted(load_file(path).items()):
            found[name] = hashlib.sha256(array.tobytes()).hexdigest()
    return found


def files_of(folder: Path) -> list[str]:
    """Returns the names of all files below a folder."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    return [name for name in names if not any(word in name for word in VOLATILE_FILES)]


# ---- the runs

ACCUMULATED: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}


@case()
def plain(folder: Path) -> Record:
    return run(folder, make_tagger(), make_samples(37))


@case()
def accumulated(folder: Path) -> Record:
    return run(folder, make_tagger(), make_samples(37), **ACCUMULATED)


@case()
def best(folder: Path) -> Record:
    options = {"load_best_model_at_end": True, "save_steps": 4, "save_total_limit": 2}
    return run(folder, make_tagger(), make_samples(37), metric_for_best_model="loss", **options)


@case()
def resumed(folder: Path) -> Record:
    """Resumes from a checkpoint that the first of the two compared commits wrote."""
    first = Path(os.environ[FIRST]) / "accumulated" / "run" / "checkpoint-5"
    return run(folder, make_tagger(), make_samples(37), **ACCUMULATED, resume=str(first))


@case()
def streamed(folder: Path) -> Record:
    return run(folder, make_tagger(), Stream(make_samples(37)), max_steps=14, gradient_accumulation_steps=2)


@case()
def causal(folder: Path) -> Record:
    return run(folder, make_text_model("gpt2"), make_samples(29), gradient_accumulation_steps=2, optim="adafactor")


@case()
def generated(folder: Path) -> Record:
    options = {"predict_with_generate": True, "generation_max_length": 7}
    classes = {"cls": public_name("Seq2SeqTrainer"), "arguments_class": public_name("Seq2SeqTrainingArguments")}
    return run(folder, make_text_model("bart"), make_samples(21), **classes, **options)


@case()
def tensorflow(folder: Path) -> Record:
    import numpy as np

    keras: Any = importlib.import_module("keras")
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(45, 8)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")
    layers = [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dropout(0.1), keras.layers.Dense(2)]
    options: dict[str, Any] = {"logging_steps": 1, "save_steps": 5, "eval_strategy": "epoch", "report_to": "none"}
    args = public_name("TFTrainingArguments")(str(folder), gradient_accumulation_steps=2, disable_tqdm=True, **options)
    recorder = make_recorder()
    model = keras.Sequential(layers)
    parts = (x[:32], y[:32]), (x[32:], y[32:])
    trainer = public_name("TFTrainer")(model, args, *parts, callbacks=[recorder])
    trainer.train()
    return {
        "log": [steady(row) for row in trainer.state.log_history],
        "predictions": digest(trainer.predict(parts[1]).predictions),
        "events": recorder.events,
        "variables": [digest(weight) for weight in model.get_weights()],
    }


@case(2)
def ddp(folder: Path) -> Record:
    return run(folder, make_tagger(), make_samples(37), gradient_accumulation_steps=2)


@case(2)
def fsdp(folder: Path) -> Record:
    return run(folder, make_tagger(), make_samples(37), gradient_accumulation_steps=2, fsdp=True)


@case(2)
def fsdp_shards(folder: Path) -> Record:
    return run(folder, make_tagger(), make_samples(37), fsdp=True, checkpoint_format="sharded")


@case(2)
def pipeline(folder: Path) -> Record:
    options: dict[str, Any] = {"parallel": {"pp": 2}, "eval_strategy": "no"}
    return run(folder, make_tagger(dropout=0.0), make_samples(37), gradient_accumulation_steps=2, **options)


@case(2)
def deepspeed(folder: Path) -> Record:
    return run(folder, make_tagger(), make_samples(37), deepspeed={"zero_optimization": {"stage": 2}})


# ---- running and comparing


def record(folder: Path, source: Path, names: list[str], first: Path | None = None) -> dict[str, list[Record]]:
    """Run the cases with the package of `source`; returns what each process recorded, by case."""
    found = {}
    for name in names:
        size = CASES[name][0]
        place = folder / name
        place.mkdir(parents=True)
        print(f"{source}: {name}", flush=True)
        processes = start(name, place, source, size, first or folder)
        texts = [process.communicate()[0] for process in processes]
        for rank, process in enumerate(processes):
            if process.returncode != 0:
                raise SystemExit(f"{name}: process {rank} ended with {process.returncode}:\n{texts[rank][-4000:]}")
        found[name] = [json.loads((place / f"{rank}.json").read_text()) for rank in range(size)]
        found[name][0] |= {"weights": weights_of(place / "run" / "final"), "files": files_of(place / "run")}
    return found


def start(name: str, place: Path, source: Path, size: int, first: Path) -> list[subprocess.Popen[str]]:
    """Start the processes of a case as torchrun does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in range(size):
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        if size > 1:
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
            environment |= {key: str(value) for key, value in ranks.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
        environment[FIRST] = str(first)
        command = [sys.executable, __file__, "run", name, str(place)]
        output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, env=environment, **output))
    return processes


def run_case(name: str, place: Path) -> None:
    """Make one run in this process and write what it gave."""
    if name != "tensorflow":
        import torch

        torch.set_num_threads(1)
    found = CASES[name][1](place / "run")
    (place / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found, indent=1))


def compare(revision: str, names: list[str]) -> int:
    """Compare the working tree with a commit. Returns the number of cases that differ."""
    with tempfile.TemporaryDirectory(prefix="paceline-same-runs-") as folder:
        other = Path(folder) / "source"
        subprocess.run(["git", "worktree", "add", "--detach", str(other), revision], cwd=ROOT, check=True)
        try:
            before = record(Path(folder) / "before", other / "src", names)
            after = record(Path(folder) / "after", ROOT / "src", names, first=Path(folder) / "before")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=True)
        different = 0
        for name in names:
            lines = [line for old, new in zip(before[name], after[name], strict=True) for line in differences(old, new)]
            different += bool(lines)
            print(f"{name}: {'DIFFERENT' if lines else 'the same'}")
            print("".join(f"    {line}\n" for line in lines[:10]), end="")
    return different


def differences(old: Record, new: Record) -> list[str]:
    """Returns a line for each part of a record that is not the same."""
    lines = []
    for key in old:
        if old[key] == new[key]:
            continue
        if not isinstance(old[key], list):
            lines.append(f"{key}: {str(old[key])[:150]} -> {str(new[key])[:150]}")
            continue
        pairs = zip(old[key], new[key], strict=False)
        place = next((i for i, (one, two) in enumerate(pairs) if one != two), min(len(old[key]), len(new[key])))
        lines.append(
            f"{key}[{place}]: {str(old[key][place : place + 1])[:150]} -> {str(new[key][place : place + 1])[:150]}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command, words in (("compare", ["revision"]), ("record", ["folder"]), ("run", ["name", "folder"])):
        subparser = commands.add_parser(command)
        for word in words:
            subparser.add_argument(word)
        if command != "run":
            subparser.add_argument("--only", nargs="+", choices=sorted(CASES), default=list(CASES))
    options = parser.parse_args()
    if options.command == "run":
        run_case(options.name, Path(options.folder))
        return 0
    if "resumed" in options.only and "accumulated" not in options.only:
        options.only.insert(0, "accumulated")  # whose checkpoint it resumes from
    if options.command == "record":
        record(Path(options.folder).absolute(), ROOT / "src", options.only)
        return 0
    return min(compare(options.revision, options.only), 1)


if __name__ == "__main__":
    sys.exit(main())
