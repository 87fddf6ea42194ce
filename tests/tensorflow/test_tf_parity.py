"""The same task in torch and TensorFlow from the same weights: the same log, events, state and losses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tf_models import Linear, make_trainer, values
from torch import nn
from torch.nn import functional

from paceline import Trainer, TrainerCallback, TrainingArguments
from paceline.core.events import EVENTS
from paceline.tensorflow.framework import tf

VOCABULARY, WIDTH, LENGTH = 32, 16, 8


class TorchTransformer(nn.Module):
    """One block: attention and two linear layers, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wide, self.narrow = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Any, labels: Any) -> Any:
        x = self.embedding(tokens)
        y = self.attention_norm(x)
        scores = self.query(y) @ self.key(y).transpose(1, 2) / WIDTH**0.5
        x = x + scores.softmax(-1) @ self.value(y)
        x = x + self.narrow(torch.relu(self.wide(self.norm(x))))
        logits = self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class TensorTransformer(tf.Module):  # type: ignore[misc]
    """The same in TensorFlow, from the weights of the other."""

    def __init__(self, weights: dict[str, Any]) -> None:
        super().__init__()
        self.all = {name: tf.Variable(value, name=name) for name, value in weights.items()}

    def linear(self, x: Any, name: str) -> Any:
        return tf.tensordot(x, tf.transpose(self.all[f"{name}.weight"]), 1) + self.all[f"{name}.bias"]

    def norm(self, x: Any, name: str) -> Any:
        centred = x - tf.reduce_mean(x, -1, keepdims=True)
        scaled = centred * tf.math.rsqrt(tf.reduce_mean(centred**2, -1, keepdims=True) + 1e-5)
        return scaled * self.all[f"{name}.weight"] + self.all[f"{name}.bias"]

    def __call__(self, tokens: Any) -> Any:
        x = tf.gather(self.all["embedding.weight"], tokens)
        y = self.norm(x, "attention_norm")
        scores = tf.matmul(self.linear(y, "query"), self.linear(y, "key"), transpose_b=True) / WIDTH**0.5
        x += tf.matmul(tf.nn.softmax(scores), self.linear(y, "value"))
        x += self.linear(tf.nn.relu(self.linear(self.norm(x, "norm"), "wide")), "narrow")
        return self.linear(x, "head")


class TorchLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Any, labels: Any) -> Any:
        logits = self.linear(x)
        return functional.cross_entropy(logits, labels), logits


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []


for name in EVENTS:
    setattr(Recorder, name, lambda self, args, state, control, name=name, **kwargs: self.events.append(name))


def make_task(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    """(torch model, TensorFlow model, columns); some labels of the transformer's are left out."""
    torch.manual_seed(0)
    choice = np.random.default_rng(0)
    if kind == "linear":
        x = choice.normal(size=(104, 8)).astype(np.float32)
        return TorchLinear(), Linear(), {"x": x, "labels": (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)}
    tokens = choice.integers(0, VOCABULARY, (104, LENGTH))
    labels = (tokens + 1) % VOCABULARY
    labels[::7, 3:] = -100
    model = TorchTransformer()
    copy = {name: value.detach().numpy() for name, value in model.named_parameters()}
    return model, TensorTransformer(copy), {"tokens": tokens, "labels": labels}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "transformer"])
def test_both_sides_agree(tmp_path: Path, kind: str) -> None:
    ours, theirs, columns = make_task(kind)
    options: dict[str, Any] = {
        "num_train_epochs": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3,
        "weight_decay": 0.01,
        "warmup_steps": 5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 20,
        "save_strategy": "steps",
        "save_steps": 20,
        "load_best_model_at_end": True,
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
    }
    recorders = [Recorder(), Recorder()]
    samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    first = Trainer(
        ours,
        TrainingArguments(str(tmp_path / "torch"), use_cpu=True, loss_weight="tokens", **options),
        train_dataset=samples,
        eval_dataset=samples[:12],
        callbacks=[recorders[0]],
    )
    evaluated = {name: column[:12] for name, column in columns.items()}
    second = make_trainer(tmp_path / "tf", theirs, columns, eval_dataset=evaluated, callbacks=[recorders[1]], **options)
    outputs = [first.train(), second.train()]
    assert outputs[0].global_step == outputs[1].global_step == 52
    assert recorders[0].events == recorders[1].events
    assert outputs[0].metrics.keys() == outputs[1].metrics.keys()
    rows = [values(trainer.state.log_history) for trainer in (first, second)]
    assert [list(row) for row in rows[0]] == [list(row) for row in rows[1]]
    for row, other in zip(rows[0][:-1], rows[1][:-1], strict=True):
        for name, value in row.items():
            assert other[name] == pytest.approx(value, rel=0, abs=1e-4), (name, row["step"])
    files = [tmp_path / side / "checkpoint-52" / "trainer_state.json" for side in ("torch", "tf")]
    states = [json.loads(path.read_text()) for path in files]
    assert states[0].keys() == states[1].keys()
    varying = {"log_history", "best_metric", "best_model_checkpoint", "total_flos"}
    assert {k: v for k, v in states[0].items() if k not in varying} == {
        k: v for k, v in states[1].items() if k not in varying
    }
