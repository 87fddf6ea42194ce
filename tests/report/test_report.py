"""The report of a run: what it shows, what it leaves out, and what it does with damaged or hostile files."""

import html
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import opened
from hypothesis import given
from hypothesis import strategies as st
from small_models import Classifier, classification, make_trainer

from paceline import Trainer, TrainerCallback, TrainingArguments
from paceline.callbacks.report import MOST_MEASUREMENTS, Measurements, ReportCallback
from paceline.cli.main import main
from paceline.core.journal import FORMAT, JOURNAL_FILE
from paceline.core.lineage import REPORT_FILE
from paceline.report.curves import make_charts, smoothed, thin
from paceline.report.page import duration
from paceline.report.run_data import names_of, read_run
from paceline.report.svg import limits, number, ticks
from paceline.report.write import write_report


def run_in(folder: Path, callbacks: tuple = (), **options) -> Trainer:
    settings = {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 4, "logging_steps": 2, "save_steps": 4}
    args = TrainingArguments(
        str(folder), **{**settings, "report_to": "none", "disable_tqdm": True, "use_cpu": True, **options}
    )
    data = {"train_dataset": classification(40), "eval_dataset": classification(8)}
    trainer = Trainer(Classifier(), args, **data, callbacks=callbacks)
    trainer.train()
    return trainer


def write_journal(folder: Path, losses: list[float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [(step, 0, step, 1, loss, 1.0, 0.1, 1) for step, loss in enumerate(losses, 1)]
    np.array(rows, dtype=FORMAT).tofile(folder / JOURNAL_FILE)


def data_of(page: str) -> list:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_a_run_ends_with_a_page_of_every_step(tmp_path):
    trainer = run_in(tmp_path, learning_rate=0.25)
    page = (tmp_path / REPORT_FILE).read_text("utf-8")
    loss, rate, norm, *_ = data_of(page)
    assert [series["label"] for series in loss] == ["training loss", "eval_loss"]
    assert loss[0]["x"] == list(range(1, 9))
    evaluated = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert loss[1]["y"] == pytest.approx(evaluated, rel=1e-5)
    assert rate[0]["y"][0] == pytest.approx(0.25)
    assert len(norm[0]["y"]) == 8
    text = re.sub(r"<[^>]*>", " ", page)
    assert re.search(r"learning_rate\s+0\.25\s+5e-05", text)  # beside its default
    for shown in ("finished", "8 of 8", "checkpoint-4", "checkpoint-8"):
        assert shown in text
    # what has its default stands only among all options
    assert "weight_decay" not in text.split("All ")[0]


def test_the_page_asks_for_nothing_outside_itself(tmp_path):
    run_in(tmp_path)
    page = (tmp_path / REPORT_FILE).read_text("utf-8")
    without_namespace = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|(?:src|href)=|url\((?!#)|@import", without_namespace)
    assert "default-src 'none'" in page


def test_the_time_of_activities_is_stacked(tmp_path):
    write_journal(tmp_path, [1.0] * 4)
    rows = [
        {"step": 2, "loss": 1.0, "time/forward": 3.0, "time/data": 1.0, "time/setup": 6.0},
        {"step": 4, "loss": 1.0, "time/forward": 1.0, "time/evaluate": 3.0, "time/save": float("nan"), "time/log": "?"},
    ]
    run = read_run(tmp_path, rows, {})
    charts = {chart.title: chart for chart in make_charts([run])}
    areas = {each.label: each.heights.tolist() for each in charts["Time by activity (%)"].series}
    assert areas == {
        "setup": [60, 0],
        "forward+backward": [30, 25],
        "evaluation": [0, 75],
        "waiting for data": [10, 0],
    }
    assert charts["Throughput"].series[0].values.tolist() == [2 / 4, 2 / 1]  # of training time
    assert not any(title.startswith("time/") for title in charts)


def test_many_rows_of_seconds_are_added_up(tmp_path):
    number = 1000
    write_journal(tmp_path, [1.0] * number)
    rows = [{"step": step, "loss": 1.0, "time/forward": 2.0, "time/data": 2.0} for step in range(1, number + 1)]
    charts = {chart.title: chart for chart in make_charts([read_run(tmp_path, rows, {})])}
    first, second = charts["Time by activity (%)"].series
    assert len(first.steps) == 200
    assert set(first.heights) == set(second.heights) == {50.0}
    assert charts["Throughput"].series[0].values == pytest.approx(np.full(200, 0.25))


def test_a_run_without_a_reporter_keeps_its_measurements_and_warnings(tmp_path):
    class Warns(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (3, 5):
                logging.getLogger("paceline.somewhere").warning("something odd, token=hf_%s", "a" * 34)

    trainer = run_in(tmp_path, callbacks=[Warns()])
    for _ in range(2):  # the page of the run, and a later one
        run = read_run(tmp_path)
        titles = {chart.title for chart in make_charts([run])}
        assert {"Throughput", "Memory (GB)", "Time by activity (%)"} <= titles
        text = re.sub(r"<[^>]*>", " ", (tmp_path / REPORT_FILE).read_text("utf-8"))
        assert re.search(r"3\s+something odd, token=\S+ \(2 times\)", text)
        assert "a" * 34 not in text
        assert re.search(r"train\s+builtins.list\s+40", text)
        assert re.search(r"8\s+finished", text)
        write_report([tmp_path])
    assert not logging.getLogger("paceline").handlers or "Messages" not in str(logging.getLogger("paceline").handlers)
    assert not any(key.startswith("time/") for row in trainer.state.log_history for key in row)


class Sick(Classifier):
    """Its loss of one batch is not finite, and a later batch does not fit into memory."""

    def __init__(self, nan_at: int = 0, full_at: int = 0) -> None:
        super().__init__()
        self.nan_at, self.full_at, self.calls = nan_at, full_at, 0

    def forward(self, x, labels=None):
        output = super().forward(x, labels)
        self.calls += self.training
        if self.training and self.calls == self.full_at:
            raise torch.OutOfMemoryError("out of memory")
        return (output[0] * float("nan"), *output[1:]) if self.training and self.calls == self.nan_at else output


@pytest.mark.slow
def test_rollbacks_signals_resumes_and_memory_errors_are_told(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                os.kill(os.getpid(), signal.SIGTERM)

    options = {"nonfinite_policy": "rollback", "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}

    def told():
        text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", (tmp_path / REPORT_FILE).read_text("utf-8")))
        return text.split(" Events ")[-1].split(" Environment ")[0].split(" Warnings ")

    make_trainer(tmp_path, Sick(nan_at=5), classification(40), callbacks=[Stop()], **options).train()
    events, warnings = told()
    assert "5 skipped after values that were not finite: epoch 0, first 16, num_samples 4" in events
    assert "6 interrupted" in events
    assert "Rewound to step 4; 4 samples are skipped." in warnings
    assert "SIGTERM: stopping at the next step boundary" in warnings
    trainer = make_trainer(tmp_path, Sick(full_at=3), classification(40), **options)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train(resume_from_checkpoint=True)
    events, warnings = told()
    assert "6 interrupted" in events
    assert "6 resumed" in events
    assert "8 failed" in events
    assert "out of memory" in warnings
    assert "Rewound to step 4" in warnings  # before it was resumed
    write_report([tmp_path])
    assert told() == [events, warnings]


WARNING_JOB = """
import sys
import logging
from small_models import Classifier, classification, make_trainer
from paceline import TrainerCallback

class Warns(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        logging.getLogger("paceline.somewhere").warning("something odd at %d", state.global_step)

logging.basicConfig(format="seen: %(message)s") if sys.argv[2:] else None
options = {"max_steps": 2, "save_strategy": "no", "callbacks": [Warns()]}
make_trainer(sys.argv[1], Classifier(), classification(16), **options).train()
"""


@pytest.mark.slow
@pytest.mark.parametrize("with_handler", [False, True])
def test_warnings_of_a_script_are_printed_once(tmp_path, with_handler):
    """As without the report: by logging's last resort, or by the script's handler."""
    command = [sys.executable, "-c", WARNING_JOB, str(tmp_path), *(["handler"] if with_handler else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    begin = "seen: " if with_handler else ""
    for step in (1, 2):
        assert done.stderr.count(f"something odd at {step}") == 1
        assert f"{begin}something odd at {step}\n" in done.stderr
    assert "something odd at 2" in (tmp_path / REPORT_FILE).read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train.py"], "trainer.train(resume_from_checkpoint=True)  # resumes from checkpoint-2, in "),
        (["paceline", "train", "job.yaml", "--fresh"], "paceline train job.yaml  # resumes from checkpoint-2, in "),
    ],
)
def test_a_page_names_what_resumes_the_run(tmp_path, monkeypatch, capsys, words, line):
    monkeypatch.setattr(sys, "argv", words)
    run_in(tmp_path, max_steps=2, save_strategy="steps", save_steps=2, disable_tqdm=False)
    assert f"<pre>{line}" in (tmp_path / "report.html").read_text()
    command, _, _ = line.removeprefix("trainer.").partition("  #")
    assert f"; to resume: {command}\n" in capsys.readouterr().out


def test_a_run_that_failed_has_a_page(tmp_path):
    class Broken(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise RuntimeError("broken <b>")

    with pytest.raises(RuntimeError, match="broken"):
        run_in(tmp_path, callbacks=[Broken()])
    page = (tmp_path / REPORT_FILE).read_text("utf-8")
    assert "RuntimeError: broken &lt;b&gt;" in page
    assert re.search(r"5\s+failed", re.sub(r"<[^>]*>", " ", page))
    assert "Messages" not in str(logging.getLogger("paceline").handlers)


def test_each_chart_has_a_table(tmp_path):
    write_journal(tmp_path, np.linspace(3, 1, 1000).tolist())
    page = write_report([tmp_path]).read_text("utf-8")
    tables = re.findall(r"<summary>(\S.*?) as a table</summary>(.*?)</details>", page, re.DOTALL)
    assert [title for title, _ in tables] == ["Loss", "Learning rate", "Gradient norm"]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", tables[0][1])
    assert (cells[:2], cells[-3:-1]) == (["1", "3"], ["1,000", "1"])
    assert tables[0][1].count("<tr>") <= 41


@pytest.mark.parametrize("number", [5, 256, 257, 700, 5000])
def test_measurements_are_bounded_and_add_up(number):
    kept = Measurements()
    for step in range(1, number + 1):
        late = {"resource/late": 1.0} if step > number - 2 else {}
        kept.add({"step": step, "time/data": 1.0, "resource/x": step, **late})
    rows = kept.rows()
    assert len(rows) <= MOST_MEASUREMENTS
    assert sum(row["time/data"] for row in rows) == number
    assert rows[-1]["step"] == rows[-1]["resource/x"] == number
    assert {row["time/data"] for row in rows[:-1]} <= {rows[0]["time/data"]}  # equally long
    assert ["resource/late" in row for row in (rows[0], rows[-1])] == [False, True]


def test_texts_of_a_run_cannot_become_markup(tmp_path):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'"
    (tmp_path / "run.json").write_text(
        json.dumps(
            {
                "arguments": {"run_name": hostile, hostile: hostile},
                "versions": {hostile: hostile},
                "command": [hostile],
                "plan": {"notes": [hostile], hostile: hostile},
                "history": [{"started": hostile}],
            }
        )
    )
    rows = [{"step": step, f"eval_{hostile}": 1.0 * step, "eval_text": hostile} for step in (1, 2)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_journal(tmp_path, [1.0, 2.0])
    page = write_report([tmp_path]).read_text("utf-8")
    assert page.count("<script") == page.count("</script") == 3  # the points, the rows and the page's own
    assert "<img" not in page
    assert html.escape(hostile) in page
    assert any(series["label"] == f"eval_{hostile}" for chart in data_of(page) for series in chart)


def test_a_text_cannot_reverse_the_text_after_it(tmp_path):
    """Names of other runs follow it in a title, and its value in a caption; right-to-left scripts stay as they are."""
    (tmp_path / "a").mkdir()
    name = "\u202e\u05e9\u2067 metric"
    write_journal(tmp_path / "a", [1.0, 2.0])
    (tmp_path / "a" / "run.json").write_text(json.dumps({"arguments": {"run_name": name}}))
    rows = [{"step": step, f"eval_{name}": float(step)} for step in (1, 2)]
    page = write_report([tmp_path / "a"], rows=rows, state={}).read_text("utf-8")
    labels = [series["label"] for chart in data_of(page) for series in chart]
    assert "eval_\ufffd\u05e9\ufffd metric" in labels
    assert not set("\u202e\u2067") & set(page)


def test_a_long_run_makes_a_small_page(tmp_path):
    values = np.random.default_rng(0).normal(size=100_000)
    values[54_321] = 99.0
    write_journal(tmp_path, values.tolist())
    path = write_report([tmp_path])
    assert path.stat().st_size < 1_000_000
    raw, mean = data_of(path.read_text("utf-8"))[0]
    assert 99.0 in raw["y"]  # no peak is lost
    assert len(mean["y"]) == 200


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(2, 50))
def test_thinning_keeps_the_extremes_and_the_order(values, most):
    steps, array = np.arange(len(values), dtype=float), np.array(values)
    thin_steps, thin_values = thin(steps, array, most)
    assert len(thin_steps) <= max(most, 2)
    assert (thin_values.min(), thin_values.max()) == (array.min(), array.max())
    assert (np.diff(thin_steps) > 0).all()
    assert (array[thin_steps.astype(int)] == thin_values).all()


def test_the_mean_is_that_of_equal_parts():
    steps, means = smoothed(np.arange(1.0, 7.0), np.array([1.0, 3.0, 5.0, 7.0, 9.0, 11.0]), 3)
    assert steps.tolist() == [2, 4, 6]
    assert means.tolist() == [2, 6, 10]


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_every_range_has_ticks_inside_it(first, second):
    low, high = limits([np.array([first]), np.array([second])])
    for value in ticks(low, high):
        assert np.isfinite(value)
        assert len(number(value)) < 20


def test_values_that_are_not_finite_are_counted(tmp_path):
    write_journal(tmp_path, [1.0, float("nan"), float("inf"), 2.0])
    loss = make_charts([read_run(tmp_path)])[0]
    assert loss.num_left_out == 2
    assert loss.series[0].steps.tolist() == [1, 4]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_run_without_a_finite_loss_has_a_page(tmp_path, value):
    write_journal(tmp_path, [value, value])
    page = write_report([tmp_path]).read_text("utf-8")
    assert "2 values are not finite" in page
    assert data_of(page)[0] == []


def test_the_smallest_numbers_are_drawn(tmp_path):
    write_journal(tmp_path, [0.0, 5e-324])
    assert write_report([tmp_path]).is_file()


def test_a_later_page_holds_what_an_earlier_one_did(tmp_path):
    run_in(tmp_path, save_strategy="no")
    first = (tmp_path / REPORT_FILE).read_text("utf-8")
    second = write_report([tmp_path]).read_text("utf-8")
    assert data_of(second) == data_of(first)
    assert (
        re.sub(r"<[^>]*>", " ", second).split("Environment")[0]
        == re.sub(r"<[^>]*>", " ", first).split("Environment")[0]
    )
    record = json.loads((tmp_path / "run.json").read_text())
    record["run"]["id"] = "another"
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert read_run(tmp_path).rows == []  # the page is of another run


def test_a_metric_of_training_has_a_curve(tmp_path):
    rows = [{"step": step, "train_accuracy": step / 4, "train_loss": 1.0} for step in (1, 2, 3)]
    write_journal(tmp_path, [1.0, 2.0, 3.0])
    titles = [chart.title for chart in make_charts([read_run(tmp_path, rows, {})])]
    assert "train_accuracy" in titles
    assert "train_loss" not in titles


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path):
    run_in(tmp_path)
    (tmp_path / "run.json").write_text("[" * 100_000)
    (tmp_path / "log.jsonl").write_bytes(b"\xff\xfe{}\n[1]\n\x00\n")
    with (tmp_path / JOURNAL_FILE).open("r+b") as file:
        file.write(b"\xff" * 8)
        file.seek(0, 2)
        file.write(b"cut")
    run = read_run(tmp_path)
    assert len(run.problems) == 3
    assert run.last_step == 8
    page = write_report([tmp_path]).read_text("utf-8")
    assert "run.json is damaged" in page
    assert len(data_of(page)[0][0]["x"]) == 7


def test_a_checkpoint_gives_the_rows_where_no_log_was_written(tmp_path):
    trainer = run_in(tmp_path)
    (tmp_path / REPORT_FILE).unlink()
    rows = read_run(tmp_path).rows
    assert rows == [row for row in trainer.state.log_history if "train_runtime" not in row]


def test_two_runs_are_compared(tmp_path):
    run_in(tmp_path / "a", learning_rate=0.25)
    run_in(tmp_path / "b", learning_rate=0.125, max_steps=6)
    path = write_report([tmp_path / "a", tmp_path / "b"])
    assert path == tmp_path / "a" / "comparison.html"
    page = path.read_text("utf-8")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))
    assert re.search(r"learning_rate 0\.25 0\.125", text)
    assert "max_steps 8 6" in text
    assert len(data_of(page)[0]) == 4  # training and evaluation of each


def test_options_are_compared_and_shown_with_all_their_digits(tmp_path):
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    for folder, rate in zip(folders, (1.2344e-4, 1.23441e-4), strict=True):
        write_journal(folder, [1.0, 2.0])
        record = {"arguments": {"learning_rate": rate, "adam_beta2": 0.99999}, "plan": {"rate": rate}}
        (folder / "run.json").write_text(json.dumps(record))
    page = write_report(folders, tmp_path / "both.html").read_text("utf-8")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))
    assert "Options that differ a/run b/run learning_rate 0.00012344 0.000123441 What else" in text
    assert "plan rate 0.00012344 0.000123441" in text
    assert text.count("adam_beta2 0.99999 0.999 learning_rate 0.00012344 5e-05") == 1
    assert [series["label"] for series in data_of(page)[0]] == ["training loss (a/run)", "training loss (b/run)"]


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    named = {"x/one/run": None, "y/one/run": None, "z/two": "base", "z/three": "base", "z/four": "other", "other": None}
    for place, name in named.items():
        write_journal(tmp_path / place, [1.0])
        (tmp_path / place / "run.json").write_text(json.dumps({"arguments": {"run_name": name}}))
    names = names_of([read_run(tmp_path / place) for place in named])
    assert names == ["x/one/run", "y/one/run", "base, two", "base, three", "other, four", "other"]
    assert names_of([read_run(tmp_path / "x/one/run")] * 2) == ["run", "run"]


def test_a_run_without_a_report(tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", disable_tqdm=True, save_strategy="no")
    trainer = Trainer(Classifier(), args, train_dataset=classification(8))
    trainer.remove_callback(ReportCallback)
    trainer.train()
    assert not (tmp_path / REPORT_FILE).exists()


def test_a_report_that_cannot_be_written_stops_no_run(tmp_path, caplog):
    (tmp_path / REPORT_FILE).mkdir(parents=True)
    assert run_in(tmp_path).state.global_step == 8
    assert "The report could not be written (" in caplog.text
    assert "Traceback" not in caplog.text


def test_the_command(tmp_path, capsys):
    run_in(tmp_path / "run")
    (tmp_path / "run" / REPORT_FILE).unlink()
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / REPORT_FILE)
    assert main(["report", str(tmp_path / "run"), f"--output={tmp_path / 'x' / 'page.html'}"]) == 0
    assert (tmp_path / "x" / "page.html").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "takes folders"),
        (["{here}/missing"], "is not a folder"),
        (["{here}"], "holds no run"),
        (["--outptu", "x"], "'--outptu'"),
        (["{here}", "--charts=pie"], "charts='pie' is invalid: expected one of 'svg', 'bokeh'"),
        (["{here}", "--charts", "pie"], "charts='pie' is invalid: expected one of 'svg', 'bokeh'"),
        (["{here}", "--output"], "takes the file"),
        (["{here}", "--output="], "takes the file"),
        (["{here}", "-o", "--charts=svg"], "-o takes the file to write, not the option --charts=svg"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(tmp_path, capsys, words, message):
    assert main(["report", *[word.format(here=tmp_path) for word in words]]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_library_of_charts_names_the_extra(tmp_path, monkeypatch, capsys):
    write_journal(tmp_path, [1.0])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["report", str(tmp_path), "--charts", "bokeh"]) == 2
    assert 'pip install "paceline[report]"' in capsys.readouterr().err
    with pytest.raises(ImportError, match="bokeh is required"):
        ReportCallback(charts="bokeh")


SCRIPT = """<script>
  const svg = document.getElementById("chart-0"), box = svg.getBoundingClientRect();
  const at = (kind, share) => svg.dispatchEvent(new PointerEvent(kind, {
    clientX: box.left + box.width * share, clientY: box.top + 20, bubbles: true }));
  const key = (name) => svg.dispatchEvent(new KeyboardEvent("keydown", { key: name, cancelable: true, bubbles: true }));
  const read = () => svg.closest("figure").querySelector("figcaption").textContent;
  const drawn = () => [...document.querySelectorAll("figure > svg")].map((each) => each.outerHTML).join("");
  const found = {}, before = drawn();
  at("pointerdown", 0.4); at("pointermove", 0.6); at("pointerup", 0.7);
  found.zooms = drawn() !== before;
  found.caption = read();
  document.querySelector("button.all").click();
  at("pointerleave", 0.5);
  found.isBack = drawn() === before;
  const step = () => read().match(/at step (\\d+)/)[1];
  found.reads = ["Home", "ArrowRight", "End", "ArrowLeft"].map((name) => (key(name), step()));
  key("+");
  found.keysZoom = drawn() !== before;
  key("Escape"); at("pointerleave", 0.5);
  found.keysBack = drawn() === before;
  found.areas = document.querySelectorAll("polygon").length > 0;
  found.tables = document.querySelectorAll("figure details table tbody tr").length > 0;
  found.names = [...document.querySelectorAll("figure > svg")].every((each) => each.getAttribute("aria-label"));
  found.fits = document.documentElement.scrollWidth <= innerWidth;
  found.dark = getComputedStyle(document.body).backgroundColor;
  found.requests = performance.getEntriesByType("resource").length;
  document.title = JSON.stringify(found);
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(tmp_path, width):
    """Opens without an error or a request, on a phone too; pointer and keys read and zoom its charts."""
    run_in(tmp_path)
    page = (tmp_path / REPORT_FILE).read_text("utf-8")
    path = tmp_path / "tested.html"
    path.write_text(page.replace("</body>", f"{SCRIPT}</body>"))
    done = opened(path.as_uri(), tmp_path, f"--window-size={width},900")
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    found = json.loads(html.unescape(title.group(1)))
    assert found.pop("caption").startswith("training loss: ")
    assert found.pop("reads") == ["1", "2", "8", "7"]
    assert found.pop("dark") == "rgb(255, 255, 255)"
    assert found.pop("requests") == 0
    assert set(found.values()) == {True}, found


@pytest.mark.slow
def test_hostile_texts_run_nothing_in_a_browser(tmp_path):
    hostile = "</script></title><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
    write_journal(tmp_path, [1.0, 2.0])
    record = {
        "arguments": {"run_name": hostile},
        "plan": {"notes": [hostile]},
        "end": {"state": hostile, "error": hostile},
    }
    record["data"] = {hostile: {"kind": hostile, "length": hostile}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    rows = [{"step": step, f"eval_{hostile}": float(step), "eval_text": hostile} for step in (1, 2)]
    message = {"text": hostile, "time": hostile, "step": hostile}
    page = write_report([tmp_path], rows=rows, state={"messages": [message]})
    done = opened(page.as_uri(), tmp_path)
    assert "<title>run</title>" not in done.stdout
    assert "<img" not in done.stdout
    assert "CONSOLE" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("width", [500, 1280])
def test_long_words_do_not_widen_a_page_in_a_browser(tmp_path, width):
    """Names of runs, metrics, options and errors, on the page of a run and on a comparison."""
    word = "averylongword" * 40
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        write_journal(folder, [1.0, 2.0])
        record = {
            "arguments": {"run_name": word + name, "seed": word + name},
            "end": {"state": "failed", "error": word},
        }
        (folder / "run.json").write_text(json.dumps(record))
        (folder / "log.jsonl").write_text(
            "".join(json.dumps({"step": n, f"eval_{word}": float(n), "eval_x": word}) + "\n" for n in (1, 2))
        )
    for folders in ([tmp_path / "a"], [tmp_path / "a", tmp_path / "b"]):
        path = write_report(folders)
        script = "<script>document.title = document.documentElement.scrollWidth <= innerWidth</script></body>"
        path.write_text(path.read_text("utf-8").replace("</body>", script))
        assert "<title>true</title>" in opened(path.as_uri(), tmp_path, f"--window-size={width},900").stdout


HOSTILE = "</script></title><img src=x onerror=\"document.title='run'\"> $$\\\\frac{1}{2}$$ @{y} $name"

BOKEH_SCRIPT = """<script>
  pacelineCharts.ready.then(async () => {
    const range = pacelineCharts.range, found = {}, place = document.getElementById("chart-0");
    const wait = (ms) => new Promise((done) => setTimeout(done, ms));
    const until = async (is) => {
      for (let tries = 0; tries < 100 && !is(); tries += 1) await wait(50);
      return is();
    };
    const key = (name) => place.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
    const all = (node) => [node, ...(node.shadowRoot ? all(node.shadowRoot) : []), ...[...node.children].flatMap(all)];
    const find = (name, within) => all(within).find((node) => node.classList?.contains(name));
    await until(() => find("bk-events", place)?.getBoundingClientRect().width > 100);
    const events = find("bk-events", place);
    const box = events.getBoundingClientRect();
    const at = (kind, share) => events.dispatchEvent(new PointerEvent(kind, { pointerId: 1, isPrimary: true, button: 0,
      buttons: kind === "pointerup" ? 0 : 1, clientX: box.left + box.width * share, clientY: box.top + 100,
      bubbles: true, composed: true }));
    const whole = [range.start, range.end];
    key("+");
    found.keysZoom = range.end - range.start < whole[1] - whole[0];
    const before = range.start;
    key("ArrowLeft");
    found.keysMove = range.start < before;
    found.hasButtons = [...document.querySelectorAll("button.all")].every((each) => !each.hidden);
    document.querySelector("button.all").click();
    found.isBack = range.start === whole[0] && range.end === whole[1];
    key("-"); key("ArrowRight");
    found.staysInside = range.start === whole[0] && range.end === whole[1];
    for (const kind of ["pointerdown", "pointermove", "pointermove", "pointerup"]) {
      at(kind, { pointerdown: 0.3, pointerup: 0.7 }[kind] ?? 0.6);
      await wait(50);
    }
    found.zooms = await until(() => range.start > whole[0] && range.end < whole[1]);
    key("Escape");
    const button = document.querySelector(".legend button");
    button.click();
    found.hides = button.getAttribute("aria-pressed") === "false";
    button.click();
    found.tells = await until(() => {
      const place = { clientX: box.left + box.width * (0.3 + Math.random() / 2), clientY: box.top + 100 };
      events.dispatchEvent(new PointerEvent("pointermove", { ...place, pointerId: 2, bubbles: true, composed: true }));
      return find("bk-Tooltip", document.body);
    }) !== undefined;
    const inner = all(document.body);
    const drawn = inner.filter((node) => node.tagName === "CANVAS");
    found.draws = drawn.length >= document.querySelectorAll(".bokeh").length;
    found.isText = !inner.some((node) => node.tagName === "IMG");
    found.tables = document.querySelectorAll("figure details table tbody tr").length > 0;
    found.names = [...document.querySelectorAll(".bokeh")].every((each) => each.getAttribute("aria-label"));
    found.fits = document.documentElement.scrollWidth <= innerWidth;
    found.requests = performance.getEntriesByType("resource").length === 0;
    if (document.title !== "run") document.title = JSON.stringify(found);
  });
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize(("width", "mode"), [(390, 0), (1280, 1)])
def test_charts_of_bokeh_in_a_browser(tmp_path, width, mode):
    """Zoom together by pointer and keys, load nothing, and show texts of a run as they are, in dark and light mode."""
    pytest.importorskip("bokeh")
    write_journal(tmp_path, np.linspace(2, 1, 40).tolist())
    rows = [{"step": step, f"eval_{HOSTILE}_loss": 1.0 * step, HOSTILE: 1.0, "time/data": 0.5} for step in (1, 20, 40)]
    (tmp_path / "run.json").write_text(json.dumps({"arguments": {"run_name": HOSTILE}}))
    rows.append({"step": 40, "eval_once_loss": 1e308})
    path = write_report([tmp_path], rows=rows, state={}, charts="bokeh")
    page = path.read_text("utf-8")
    assert path.stat().st_size < 2_000_000
    run = run_in(tmp_path / "run", callbacks=(ReportCallback(charts="bokeh"),), max_steps=1, save_strategy="no")
    assert "bokeh" in (tmp_path / "run" / REPORT_FILE).read_text("utf-8")
    assert sum(isinstance(each, ReportCallback) for each in run.callback_handler.callbacks) == 1
    path.write_text(page.replace("</body>", f"{BOKEH_SCRIPT}</body>"), "utf-8")
    options = (f"--window-size={width},900", f"--blink-settings=preferredColorScheme={mode}")
    done = opened(path.as_uri(), tmp_path, "--virtual-time-budget=20000", *options)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "document idle" not in line]
    assert not said
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    found = json.loads(html.unescape(title.group(1)))
    assert set(found.values()) == {True}, found


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.01234, "0.0123 s"), (59.94, "59.9 s"), (59.97, "1 min 0 s"), (119.7, "2 min 0 s"), (3599.6, "1 h 0 min"),
        (7199, "1 h 59 min"), (90, "1 min 30 s"), (float("nan"), "nan s"), (float("inf"), "inf s"), ("soon", None),
    ],
)  # fmt: skip
def test_no_minute_has_sixty_seconds(seconds, text):
    assert duration(seconds) == text
