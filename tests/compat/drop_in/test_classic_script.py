"""A script in the flow of the examples of transformers, on transformers and on paceline: the same files and results."""

import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import drop_in

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("transformers", minversion="5.23")

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, accelerate and what they import
JOB = Path(__file__).parent / "jobs" / "classic.py"
FLAGS = [
    *("--do_train", "--do_eval", "--do_predict", "--gradient_checkpointing", "--use_cpu", "--disable_tqdm", "true"),
    *("--max_train_samples", "32", "--per_device_train_batch_size", "4", "--logging_steps", "2", "--save_steps", "3"),
    *("--eval_strategy", "steps", "--eval_steps", "3", "--load_best_model_at_end", "--save_total_limit", "2"),
]


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    root, level = logging.getLogger(), logging.getLogger("paceline").level
    handlers = list(root.handlers)
    yield
    drop_in.uninstall()
    root.handlers[:] = handlers
    logging.getLogger("paceline").setLevel(level)
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("classic", JOB)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def results(folder: Path) -> dict[str, Any]:
    """Returns the results of a run: names of files, keys of results, checkpoints."""
    files = {path.name for path in folder.iterdir()}
    keys = {path.name: set(json.loads(path.read_text())) for path in folder.glob("*_results.json")}
    state = json.loads((folder / "trainer_state.json").read_text())
    rows = [sorted(row.keys() - {"total_flos"}) for row in state["log_history"]]
    best = Path(state["best_model_checkpoint"]).name
    lines = (folder / "predict_results.txt").read_text().count("\n")
    return {"files": files, "keys": keys, "rows": rows, "best": best, "lines": lines}


@pytest.mark.slow
def test_a_classic_script_leaves_what_it_leaves_with_transformers(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["classic.py"])
    found = []
    for name in ("theirs", "ours"):
        script, folder = load_script(), tmp_path / name
        if name == "ours":
            drop_in.install()
        first = script.run(["--output_dir", str(folder), "--max_steps", "6", *FLAGS])
        capsys.readouterr()
        caplog.clear()
        again = script.run(["--output_dir", str(folder), "--max_steps", "9", *FLAGS])
        printed = "".join(capsys.readouterr())
        for phrase in ("***** train metrics *****", "***** eval metrics *****", "  perplexity  ", "train_samples  "):
            assert phrase in printed, name
        steps = first["global_step"], again["global_step"], again["last_checkpoint"]
        found.append((steps, first["eval_accuracy"], results(folder)))
        if name == "ours":  # its own log and that of the Trainer, as transformers' verbosity asks
            assert "Checkpoint detected, resuming training at" in caplog.text
            assert "***** Running training *****" in caplog.text
            assert "Resuming training from checkpoint with epoch 0 and global step 6" in caplog.text
    (their_steps, _, theirs), (our_steps, _, ours) = found
    assert our_steps == their_steps == (6, 9, "checkpoint-6")
    more = ours["files"] - theirs["files"] - {"uncommitted.diff"}  # of the repository that the tests run in
    assert more == {"journal.bin", "packages.txt", "report.html", "run.json"}
    assert theirs["files"] <= ours["files"]
    for name, keys in theirs["keys"].items():
        assert ours["keys"][name] - keys <= {"total_flos"}
        assert keys <= ours["keys"][name]
    assert (ours["rows"], ours["best"], ours["lines"]) == (theirs["rows"], theirs["best"], theirs["lines"])


def test_a_classic_script_reads_its_arguments_from_a_file(tmp_path: Path) -> None:
    options = {"output_dir": str(tmp_path / "out"), "do_eval": True, "use_cpu": True, "disable_tqdm": True}
    (tmp_path / "arguments.json").write_text(json.dumps(options))
    drop_in.install()
    found = load_script().run([str(tmp_path / "arguments.json")])
    assert found["eval_loss"] == pytest.approx(4.159, abs=0.02)  # the logarithm of 64 classes
