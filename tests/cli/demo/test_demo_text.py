"""The main demonstration, small: it trains, stops, goes on, ends, and shows its results again."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import demo_runs
import pytest
import torch
from demo_runs import options

from paceline.cli.demo import text
from paceline.cli.demo.corpus import Corpus
from paceline.cli.demo.language_model import LanguageModel, Shape
from paceline.cli.demo.options import DemoOptions, make_arguments, read_demo_options
from paceline.cli.errors import UsageError
from paceline.pytorch.trainer import Trainer

WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "sat", "on", "the", "log"]
CORPUS = Corpus("a rhyme", tuple(" ".join(WORDS[i % 7 :]) * 6 for i in range(8)), (" ".join(WORDS) * 9,))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(text, "load_corpus", lambda: CORPUS)
    monkeypatch.setattr(text, "VOCABULARY", 270)
    monkeypatch.setattr(text, "CONTEXT", 16)
    monkeypatch.setattr(text, "SAMPLE_TOKENS", 8)
    monkeypatch.setattr(text, "MEASURE_SECONDS", 0.0)
    monkeypatch.setattr(text, "choose_shape", small_shape)
    return tmp_path / "run"


def small_shape(vocabulary: int) -> Shape:
    return Shape(vocabulary, context=16, width=16, layers=1, heads=2)


def run(folder: Path, *words: str) -> str:
    return demo_runs.run(text, options(folder, *words))


def test_it_trains_shows_results_and_shows_them_again(small: Path):
    first = run(small, "--max_steps", "16", "--prompt", "the cat")
    for expected in ("a rhyme", "perplexity", "bits per byte", "continues 'the cat'", "model.safetensors", "held out"):
        assert expected in first
    for name in ("model.safetensors", "tokenizer.json", "log.jsonl", "run.json", "eval_results.json", "checkpoint-16"):
        assert (small / name).exists(), name
    again = run(small, "--max_steps", "16", "--prompt", "the cat")
    assert "This run is finished: 16 steps" in again
    assert again.split("Loss in nats")[1] == first.split("Loss in nats")[1]
    rows = [json.loads(line) for line in (small / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert max(row["step"] for row in rows) == 16


def test_the_metrics_belong_together(small: Path):
    run(small, "--max_steps", "4")
    results = json.loads((small / "eval_results.json").read_text(encoding="utf-8"))
    task = text.prepare_task(CORPUS, 270, 16)
    assert results["eval_perplexity"] == pytest.approx(math.exp(results["eval_loss"]), rel=1e-4)
    expected = results["eval_loss"] / math.log(2) / task.bytes_per_token
    assert results["eval_bits_per_byte"] == pytest.approx(expected, rel=1e-4)


def test_a_longer_run_goes_on_where_the_shorter_one_ended(small: Path):
    run(small, "--max_steps", "8")
    assert "Resuming from" in run(small, "--max_steps", "12")
    assert json.loads((small / "job.json").read_text(encoding="utf-8"))["finished"]["global_step"] == 12


def test_ctrl_c_and_the_same_command_again(small: Path, monkeypatch: pytest.MonkeyPatch):
    step = Trainer.training_step

    def interrupted(self: Trainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == 5:
            signal.raise_signal(signal.SIGINT)
        return step(self, *args, **kwargs)

    said: list[str] = []
    monkeypatch.setattr(Trainer, "training_step", interrupted)
    assert text.run(options(small, "--max_steps", "12"), said.append) == 130
    assert "Stopped at step 6 of 12" in "\n".join(said)
    monkeypatch.setattr(Trainer, "training_step", step)
    assert f"Resuming from {small / 'checkpoint-6'}" in run(small, "--max_steps", "12")


def test_the_number_of_steps_is_measured_once(small: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text, "choose_steps", lambda *args: 8)
    assert "8 steps" in run(small)
    monkeypatch.setattr(text, "choose_steps", lambda *args: 99)
    assert "This run is finished: 8 steps" in run(small)
    assert "run-earlier-1" in run(small, "--fresh", "--max_steps", "2")


def test_another_text_in_the_same_folder_is_an_error(small: Path, monkeypatch: pytest.MonkeyPatch):
    run(small, "--max_steps", "2")
    monkeypatch.setattr(text, "load_corpus", lambda: Corpus("x", CORPUS.train[1:], CORPUS.held_out))
    with pytest.raises(UsageError, match="holds another job"):
        text.run(options(small, "--max_steps", "2"), print)


def test_wrong_values_are_said():
    with pytest.raises(UsageError, match="learning_rate"):
        make_arguments(text.DEFAULTS, read_demo_options(["--learning_rate", "fast"]))


def test_measuring_leaves_the_model_as_it_was(small: Path):
    task = text.prepare_task(CORPUS, 270, 16)
    model = LanguageModel(small_shape(task.tokenizer.vocabulary_size))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seconds, threads = text.measure_threads(model, task.train, make_arguments({"use_cpu": True}, DemoOptions()))
    assert seconds > 0
    assert threads == torch.get_num_threads() == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("one", "two", "expected"), [(1.0, 0.6, 2), (1.0, 1.05, 2), (0.2, 3.0, 1)])
def test_the_fastest_number_of_threads_is_taken(monkeypatch: pytest.MonkeyPatch, one: float, two: float, expected: int):
    monkeypatch.setattr(text, "measure_step", lambda *args: {1: one, 2: two}[torch.get_num_threads()])
    torch.set_num_threads(2)
    args = make_arguments({"use_cpu": True}, DemoOptions())
    assert text.measure_threads(None, None, args) == ({1: one, 2: two}[expected], expected)  # type: ignore[arg-type]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("step_seconds", "expected"),
    [(10.0, text.MIN_STEPS), (0.1, 880), (0.0001, text.MAX_EPOCHS * 150)],
)
def test_the_number_of_steps_fits_the_time_within_bounds(step_seconds: float, expected: int):
    assert text.choose_steps(step_seconds, 90.0, 150) == expected // 40 * 40


def test_blocks_overlap_by_the_target_only():
    blocks = text.Blocks(torch.arange(22), 5)
    assert len(blocks) == 4
    assert blocks[3]["input_ids"].tolist() == [15, 16, 17, 18, 19]
    assert blocks[3]["labels"].tolist() == [16, 17, 18, 19, 20]
    with pytest.raises(ValueError, match="more than 5"):
        text.Blocks(torch.arange(5), 5)
