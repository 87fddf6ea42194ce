"""The report of a run: what it shows, what it leaves out, and what it does with damaged or hostile files."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import Classifier, classification

from paceline import Trainer, TrainingArguments
from paceline.callbacks.report import ReportCallback
from paceline.cli.main import main
from paceline.core.journal import FORMAT, JOURNAL_FILE
from paceline.core.lineage import REPORT_FILE
from paceline.report.curves import make_charts, smoothed, thin
from paceline.report.run_data import read_run
from paceline.report.svg import limits, number, ticks
from paceline.report.write import write_report


def run_in(folder: Path, **options) -> Trainer:
    settings = {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 4, "logging_steps": 2, "save_steps": 4}
    args = TrainingArguments(
        str(folder), **{**settings, "report_to": "none", "disable_tqdm": True, "use_cpu": True, **options}
    )
    trainer = Trainer(Classifier(), args, train_dataset=classification(40), eval_dataset=classification(8))
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
        assert number(value)


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


def test_a_run_without_a_report(tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", disable_tqdm=True, save_strategy="no")
    trainer = Trainer(Classifier(), args, train_dataset=classification(8))
    trainer.remove_callback(ReportCallback)
    trainer.train()
    assert not (tmp_path / REPORT_FILE).exists()


def test_a_report_that_cannot_be_written_stops_no_run(tmp_path, caplog):
    (tmp_path / REPORT_FILE).mkdir(parents=True)
    assert run_in(tmp_path).state.global_step == 8
    assert "ReportCallback" in caplog.text


def test_the_command(tmp_path, capsys):
    run_in(tmp_path / "run")
    (tmp_path / "run" / REPORT_FILE).unlink()
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / REPORT_FILE)
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "x" / "page.html")]) == 0
    assert (tmp_path / "x" / "page.html").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "takes folders"),
        (["{here}/missing"], "is not a folder"),
        (["{here}"], "holds no run"),
        (["--outptu", "x"], "'--outptu'"),
        (["{here}", "--output"], "takes the file"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(tmp_path, capsys, words, message):
    assert main(["report", *[word.format(here=tmp_path) for word in words]]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path):
    """Opens without an error, and a drag over one chart zooms all of them."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    run_in(tmp_path)
    page = (tmp_path / REPORT_FILE).read_text("utf-8")
    script = """<script>
      const svg = document.getElementById("chart-0"), box = svg.getBoundingClientRect();
      const at = (kind, share) => svg.dispatchEvent(new PointerEvent(kind, {
        clientX: box.left + box.width * share, clientY: box.top + 20, bubbles: true }));
      const before = document.getElementById("chart-1").innerHTML;
      at("pointerdown", 0.4); at("pointermove", 0.6); at("pointerup", 0.7);
      const zoomed = document.getElementById("chart-1").innerHTML !== before;
      const caption = svg.closest("figure").querySelector("figcaption").textContent;
      document.querySelector("button.all").click();
      const isBack = document.getElementById("chart-1").innerHTML === before;
      document.title = `zoomed ${zoomed} back ${isBack} caption ${caption}`;
    </script>"""
    path = tmp_path / "tested.html"
    path.write_text(page.replace("</body>", f"{script}</body>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    assert title.group(1).startswith("zoomed true back true caption training loss: ")
