"""`paceline train --framework tf`: a person's own model and data, from the file to the results."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from train_jobs import check_finished, check_refused, losses, module_of, results, write_job

from paceline.cli.main import main

MODULE = """
import os
import signal

import keras
import numpy as np
import tensorflow as tf
from paceline import TFTrainer, Trainer, TrainerCallback


def net(width=4):
    layers = [keras.Input((8,)), keras.layers.Dense(width, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(3)]
    return keras.Sequential(layers)


def two():
    inputs = keras.Input((8,))
    return keras.Model(inputs, {"digit": keras.layers.Dense(3)(inputs), "other": keras.layers.Dense(2)(inputs)})


def reader():
    inputs = keras.Input((None,), dtype="int32")
    means = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 8)(inputs))
    return keras.Model(inputs, keras.layers.Dense(2)(means))


def masked():
    inputs = {name: keras.Input((None,), dtype="int32", name=name) for name in ("input_ids", "attention_mask")}
    weights = keras.ops.cast(inputs["attention_mask"], "float32")[..., None]
    means = keras.ops.sum(keras.layers.Embedding(20, 8)(inputs["input_ids"]) * weights, axis=1)
    return keras.Model(inputs, keras.layers.Dense(2)(means))


def spell(rows, tokenizer):
    return {"ids": tokenizer(rows["text"], padding="max_length", max_length=4, truncation=True)["input_ids"]}


def loss(outputs, labels):
    return keras.losses.sparse_categorical_crossentropy(labels, outputs["digit"], from_logits=True)


class Plain(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(tf.zeros([8, 3]))

    def __call__(self, x):
        return tf.matmul(x, self.weight)


def rows(size, seed=0):
    x = np.random.default_rng(seed).normal(size=(size, 8)).astype("float32")
    return x, (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0)


def data(size=64):
    return {"train": rows(size), "validation": rows(16, 1), "test": rows(16, 2)}


def bare():
    return rows(8)


def named():
    x, labels = rows(8)
    return {"x": x}, labels


def metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def linear():
    import torch

    return torch.nn.Linear(8, 3)


def __getattr__(name):
    if name == "finished":
        return net()
    if name == "module":
        return linear()
    raise AttributeError(name)


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4 and not os.path.exists(os.path.join(args.output_dir, "checkpoint-4")):
            os.kill(os.getpid(), signal.SIGTERM)


class Mine(TFTrainer):
    def run_model(self, features, labels, training):
        loss, outputs = super().run_model(features, labels, training)
        return 2 * loss, outputs
"""

CONFIG = """
framework: tf
model: {{factory: "{module}:net", width: 4}}
data: {module}:data
compute_metrics: {module}:metrics
output_dir: {folder}/run
max_steps: 8
learning_rate: 3e-2
eval_strategy: steps
eval_steps: 4
save_steps: 4
logging_steps: 2
report_to: jsonl
disable_tqdm: true
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return write_job(tmp_path, MODULE, CONFIG)


@pytest.mark.slow
def test_a_run_is_stopped_goes_on_and_is_found_finished(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = config.parent / "run"
    config.write_text(f'{config.read_text(encoding="utf-8")}callbacks: ["{module_of(config)}:Stop"]\n', "utf-8")
    assert main(["train", str(config)]) == 143
    assert "Stopped at step 4 of 8:" in capsys.readouterr().out
    assert main(["train", str(config)]) == 0
    output = capsys.readouterr().out
    assert f"Resuming from {run / 'checkpoint-4'}" in output
    assert "train metrics" in output
    assert "eval metrics" in output
    assert [step for step, _ in losses(run)] == [2, 4, 6, 8]
    assert {"train_loss", "eval_loss", "eval_accuracy"} <= set(results(run))
    for name in ("model.keras", "run.json", "job.json", "trainer_state.json", "checkpoint-8"):
        assert (run / name).exists(), name
    assert main(["verify", str(run)]) == 0
    assert "2 checked, 0 damaged" in capsys.readouterr().out
    check_finished(config, 8, capsys)
    refused_with_torch(config, run, capsys)


def refused_with_torch(config: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that the commands for torch refuse a run of TensorFlow, and name the reason."""
    torch = ["train", str(config), "--framework", "torch", "--output_dir", str(config.parent / "other")]
    for words, message in (
        (
            ["export", str(run), str(config.parent / "out")],
            "checkpoint-8 is a TensorFlow checkpoint: export writes safetensors",
        ),
        (["replay", str(run), "--step", "3"], "holds a run of TensorFlow: replay supports runs of torch only"),
        (["train", str(config), "--framework", "torch"], "holds a job of `paceline train --framework tf`"),
        (
            [*torch, "--resume_from_checkpoint", str(run / "checkpoint-8")],
            "is a TensorFlow checkpoint: give --framework tf",
        ),
        (torch, "gave a Sequential; an nn.Module is needed; a model of TensorFlow: give --framework tf"),
        ([*torch, "--model", str(run / "model.keras")], "is a Keras model: give --framework tf"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_longer_run_gets_where_a_whole_one_does(config: Path) -> None:
    run, whole = config.parent / "run", config.parent / "whole"
    words = ["train", str(config), "--lr_scheduler_type", "constant"]
    assert main([*words, "--output_dir", str(whole)]) == 0
    assert main([*words, "--max_steps", "4"]) == 0
    assert main(words) == 0
    assert losses(run) == losses(whole)
    assert results(run)["eval_loss"] == results(whole)["eval_loss"]


@pytest.mark.slow
def test_a_saved_model_is_trained_on_with_an_own_trainer(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, module = config.parent, module_of(config)
    assert main(["train", str(config), "--max_steps", "4", "--do_train"]) == 0
    words = ["train", str(config), "--model", "run", "--output_dir", str(folder / "second"), "--max_steps", "1"]
    words += ["--logging_steps", "1"]
    assert main([*words, "--do_train", "--do_predict"]) == 0
    kept = np.load(folder / "second" / "predictions.npz")
    assert kept["predictions"].shape == (16, 3)
    assert kept["label_ids"].shape == (16,)
    words[5:6] = [str(folder / "third")]
    assert main([*words, "--trainer", f"{module}:Mine", "--do_train"]) == 0
    (_, first), (_, second) = losses(folder / "second")[0], losses(folder / "third")[0]
    assert second == pytest.approx(2 * first)


@pytest.mark.slow
def test_a_plain_module_is_evaluated_as_it_was_saved(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(config), "--model", f"{module_of(config)}:Plain"]
    assert main(words) == 0
    before = results(config.parent / "run")["eval_loss"]
    assert main([*words, "--do_eval"]) == 0
    assert f"Weights from {config.parent / 'run'}" in capsys.readouterr().out
    assert results(config.parent / "run")["eval_loss"] == pytest.approx(before)
    assert main(words) == 0
    assert "This run is finished" in capsys.readouterr().out


@pytest.mark.slow
def test_predictions_of_several_outputs_are_kept_by_their_names(config: Path) -> None:
    module = module_of(config)
    words = ["train", str(config), "--model", f"{module}:two", "--compute_loss_func", f"{module}:loss"]
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace(f"compute_metrics: {module}:metrics\n", ""), encoding="utf-8")
    assert main([*words, "--do_train", "--do_predict"]) == 0
    kept = np.load(config.parent / "run" / "predictions.npz")
    assert {name: kept[name].shape for name in kept} == {
        "predictions_digit": (16, 3),
        "predictions_other": (16, 2),
        "label_ids": (16,),
    }


@pytest.fixture
def texts(config: Path) -> Path:
    """A job over a file of texts of different lengths with labels, and a tokenizer of words beside it."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    words = ["<pad>", "<unknown>", "good", "bad", "very", "film"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unknown>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unknown>")
    tokenizer.save_pretrained(str(config.parent / "words"))
    rows = [{"text": "very " * (i % 3) + ("good film" if i % 2 else "bad"), "label": i % 2} for i in range(48)]
    (config.parent / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    text = config.read_text(encoding="utf-8").replace("max_steps: 8", "num_train_epochs: 12")
    text += "data: {train: rows.jsonl, eval_fraction: 0.25}\ntokenizer: words\n"
    dropped = ("data: train_", "model: {")
    config.write_text("\n".join(line for line in text.splitlines() if not line.startswith(dropped)), encoding="utf-8")
    return config


@pytest.mark.slow
@pytest.mark.parametrize("model", ["reader", "masked", "preprocessed"])
def test_text_becomes_what_the_model_takes(texts: Path, model: str) -> None:
    module = module_of(texts)
    words = ["--model", f"{module}:{'reader' if model == 'preprocessed' else model}"]
    if model == "preprocessed":
        words += ["--preprocess", f"{{factory: '{module}:spell', batched: true}}"]
    assert main(["train", str(texts), *words]) == 0
    assert results(texts.parent / "run")["eval_accuracy"] == 1
    assert (texts.parent / "run" / "tokenizer_config.json").is_file()


def test_text_without_labels_needs_a_language_model(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (texts.parent / "rows.jsonl").write_text('{"text": "good film"}\n' * 20, encoding="utf-8")
    assert main(["train", str(texts), "--model", f"{module_of(texts)}:reader"]) == 2
    assert "is text without a label, which is cut into blocks for language models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.widht", "3"], "model.widht: {module}:net takes no 'widht'; did you mean 'width'"),
        (["--model", "{module}:rows"], "missing a required argument: 'size'"),
        (["--model", "{module}:bare"], "gave a tuple; a Keras model or a callable tf.Module is needed"),
        (["--model", "{module}:linear"], "gave a Linear; a Keras model or a callable tf.Module is needed (for"),
        (["--model", "{module}:module"], "gave a Linear; a Keras model or a callable tf.Module is needed (for"),
        (["--framework", "torch", "--model", "{module}:finished"], "a Sequential; an nn.Module is needed; a model of"),
        (["--model", "nowhere.keras"], "model: nowhere.keras does not exist: with TensorFlow give a .keras file"),
        (["--model", "{module}.py"], "is not a Keras model: with TensorFlow give a .keras file"),
        (["--model", "{{model_type: gpt2}}"], "model: unknown key 'model_type'"),
        (["--data", "{module}:bare"], "features and labels were given, and a pair stands for (train, eval)"),
        (["--data", "{module}:named"], "features and labels were given, and a pair stands for (train, eval)"),
        (["--trainer", "{module}:Trainer"], "is no subclass of paceline.TFTrainer"),
        (["--fsdp", "full_shard"], "fsdp='full_shard' is not supported with TensorFlow"),
        (["--xla=perhaps"], "xla='perhaps'"),
        (["--tpu_name", "nowhere"], "tpu_name='nowhere': this TPU cannot be reached"),
        # before what the job names is imported
        (["--tpu_name", "nowhere", "--model", "nowhere:net"], "tpu_name='nowhere': this TPU cannot be reached"),
        (["--learning_rate", "fast"], "learning_rate='fast'"),
        (["--framework", "torch", "--xla"], "xla is an option of TensorFlow: give --framework tf too"),
        (["--resume_from_checkpoint", "nowhere"], "there is no folder nowhere"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(
    config: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(config, words, message, capsys)


def test_a_file_that_is_no_model_and_text_that_is_no_number(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("datasets")
    folder = config.parent
    (folder / "broken.keras").write_bytes(b"nothing")
    assert main(["train", str(config), "--model", "broken.keras"]) == 2
    assert "broken.keras cannot be loaded" in capsys.readouterr().err
    (folder / "rows.jsonl").write_text('{"text": "good", "label": 1}\n' * 20, encoding="utf-8")
    assert main(["train", str(config), "--data", "{train: rows.jsonl, eval_fraction: 0.2}"]) == 2
    assert "the train set holds only text: give 'tokenizer'" in capsys.readouterr().err
