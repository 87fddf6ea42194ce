"""Pushes from `paceline train`, and from a script written for transformers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hub_server import USER, Hub, serving

import paceline
from paceline.cli.main import main

pytest.importorskip("huggingface_hub")
TOKEN = "hf_" + "s3cret" * 5

MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, x, y=None):
        return {"loss": nn.functional.mse_loss(self.line(x), y)}


def data():
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return {"train": [{"x": value, "y": value.sum()[None]} for value in x]}
"""
CONFIG = """
model: job_of_the_hub:Net
data: job_of_the_hub:data
arguments: {{output_dir: {folder}/run, max_steps: 4, save_steps: 2, label_names: [y], report_to: none, use_cpu: true,
            push_to_hub: true, hub_model_id: team/net, hub_strategy: checkpoint, disable_tqdm: true}}
"""


@pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")
def test_paceline_train_pushes(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job_of_the_hub.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "job.yaml").write_text(CONFIG.format(folder=tmp_path), encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    hub.answer = lambda method, path: 401
    assert main(["train", str(tmp_path / "job.yaml"), "--hub_token", TOKEN]) == 1
    assert "paceline: The hub repository 'team/net' could not be created or reached" in capsys.readouterr().err
    hub.answer = lambda method, path: None
    assert main(["train", str(tmp_path / "job.yaml"), "--hub_token", TOKEN]) == 0
    repository = hub["team/net"]
    assert repository.messages()[-1] == "End of training"
    files = {"model.safetensors", "README.md", "train_results.json", "last-checkpoint/trainer_state.json"}
    assert files <= repository.files.keys()
    assert not any(TOKEN.encode() in content for content in repository.files.values())
    assert not any(TOKEN in path.read_text("utf-8", "replace") for path in tmp_path.rglob("*") if path.is_file())


SCRIPT = """
import sys, torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
torch.set_num_threads(1)
config = BertConfig(
    vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
data = [{"input_ids": torch.arange(6) + i, "labels": torch.tensor(i % 2)} for i in range(12)]
args = TrainingArguments(
    sys.argv[1], max_steps=4, save_steps=4, per_device_train_batch_size=4, report_to="none", use_cpu=True,
    push_to_hub=True, hub_strategy="checkpoint", hub_always_push=True, hub_private_repo=True, eval_strategy="steps",
    eval_steps=2, logging_steps=1, disable_tqdm=True,
)
trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data)
trainer.train()
trainer.push_to_hub(commit_message="All of it", language="en", tags=["small"])
"""


PLAIN = """
import sys, torch
from pathlib import Path
from job_of_the_hub import Net, data
from paceline import Trainer, TrainerCallback, TrainingArguments

class Touch(TrainerCallback):
    def on_train_end(self, *args, **kwargs):
        Path("ended").touch()

args = TrainingArguments("out", max_steps=2, save_steps=2, push_to_hub=True, hub_model_id="team/net", report_to="none",
                         disable_tqdm=True, use_cpu=True, label_names=["y"], hub_strategy=sys.argv[1])
trainer = Trainer(Net(), args, train_dataset=data()["train"], callbacks=[Touch()])
trainer.train()
if sys.argv[1] == "end":
    trainer.push_to_hub(blocking=False)
"""


def start(folder: Path, hub: Hub, *arguments: str) -> subprocess.Popen[str]:
    (folder / "job_of_the_hub.py").write_text(MODULE, encoding="utf-8")
    (folder / "plain.py").write_text(PLAIN, encoding="utf-8")
    environment = {
        **os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1]), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    command = [sys.executable, "plain.py", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_an_interpreter_that_ends_waits_for_a_push(tmp_path: Path) -> None:
    with serving() as hub:
        hub.answer = lambda method, path: time.sleep(0.1)
        process = start(tmp_path, hub, "end")
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert hub["team/net"].messages() == ["End of training"]
        assert "model.safetensors" in hub["team/net"].files


@pytest.mark.slow
def test_ctrl_c_leaves_a_push_behind(tmp_path: Path) -> None:
    gate = threading.Event()
    with serving() as hub:
        hub.answer = lambda method, path: gate.wait(60) and None if "/preupload/" in path else None
        process = start(tmp_path, hub, "checkpoint")
        while process.poll() is None and not ((tmp_path / "ended").exists() and hub.calls("/preupload/")):
            time.sleep(0.02)
        time.sleep(0.3)  # on_train_end has been told; what follows is waiting
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        gate.set()
        assert process.returncode != 0
        assert "Stopped at step 2" in errors
        assert hub["team/net"].messages() == []
    assert (tmp_path / "out" / "checkpoint-2" / "manifest.json").exists()


@pytest.mark.slow
def test_a_script_for_transformers_pushes_the_same_files(tmp_path: Path) -> None:
    """With and without `paceline.drop_in`. One push in training: two can tear each other's files in transformers."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("transformers", minversion="5.23")
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    source = str(Path(paceline.__file__).parents[1])
    names, cards, messages = {}, {}, {}
    for kind, first in (("theirs", []), ("ours", ["-m", "paceline.drop_in"])):
        with serving() as hub:
            environment = {
                **os.environ, "PYTHONPATH": source, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN,
                "HF_HUB_DISABLE_XET": "1",
            }  # fmt: skip
            command = [sys.executable, *first, "script.py", kind]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            repository = hub[f"{USER}/{kind}"]
            assert repository.visibility == "private"
            names[kind], messages[kind] = set(repository.files), repository.messages()
            cards[kind] = huggingface_hub.ModelCard(repository.files["README.md"].decode()).data
            state = json.loads(repository.files["last-checkpoint/trainer_state.json"])
            assert state["global_step"] == 4
    assert names["theirs"] - names["ours"] == set()
    assert names["ours"] - names["theirs"] == {
        "journal.bin", "run.json", "last-checkpoint/manifest.json", "last-checkpoint/progress.json",
    }  # fmt: skip
    assert [text for text in messages["theirs"] if not text.endswith(", checkpoint")] == messages["ours"]
    assert cards["ours"].library_name == cards["theirs"].library_name == "transformers"
    assert [cards["ours"].language] == cards["theirs"].language == ["en"]
    assert set(cards["theirs"].tags) - set(cards["ours"].tags) == set()
