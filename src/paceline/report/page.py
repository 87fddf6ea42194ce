"""Assembles the HTML page of a report. All text from a run is escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from paceline.args.secrets import mask_text, masked
from paceline.args.training import TrainingArguments
from paceline.checkpoint.lock import is_held
from paceline.core.byte_sizes import format_bytes
from paceline.core.record import jsonable
from paceline.core.resume_command import resume_command
from paceline.report import notices
from paceline.report.chart_forms import SVG, ChartForm
from paceline.report.curves import Chart, make_charts
from paceline.report.differences import find_differences
from paceline.report.divergence import compare_steps
from paceline.report.markup import LONG, cell, escape, shown
from paceline.report.media import read_media
from paceline.report.run_data import LOG_START, RunData, log_to_keep, names_of
from paceline.report.run_table import FAILED, FINISHED, INTERRUPTED, RUNNING
from paceline.report.svg import describe, number

_MOST_ROWS = 500  # maximum rows of a table
_MOST_VALUES = 40  # maximum rows of the table of a chart
_OF_EVALUATION = ("eval_", "test_")
_NEVER_SHOWN = {"output_dir"}  # differs between any two runs


@dataclass(frozen=True)
class Live:
    """The parts of a page that its own server keeps up to date.

    Attributes:
        nonce: a random value of this answer, which its scripts and styles carry.
        version: identifies the state of the files that the page was made of.
        navigation: HTML above the page, already escaped.
    """

    nonce: str
    version: str
    navigation: str = ""


def make_page(runs: Sequence[RunData], live: Live | None = None, form: ChartForm = SVG) -> str:
    """Returns the page of one run, or a comparison of several runs; charts have the given form."""
    charts = make_charts(runs)
    names = names_of(runs)
    title = " · ".join(names)
    log = _as_script(log_to_keep(runs[0])) if len(runs) == 1 else "null"
    body = [f"<h1>{escape(title)}</h1>"]
    body += [_summary(run) for run in runs] if len(runs) == 1 else [_comparison(runs, names)]
    body.append(_curves(charts, runs, form))
    for run, name in zip(runs, names, strict=True):
        body.append(_details(run, None if len(runs) == 1 else name))
    body.append(f'<script type="application/json" id="data">{_as_script(_points(charts))}</script>')
    kept = f"{LOG_START}{log}</script>" if live is None else ""  # for the next page, which replaces the file
    return frame(title, "\n".join(part for part in body if part), live, kept, form)


def frame(title: str, content: str, live: Live | None = None, after: str = "", form: ChartForm = SVG) -> str:
    """Returns an HTML document with the style and the scripts of the pages.

    Args:
        title: its title, not escaped.
        content: HTML of the part that is replaced when a live page changes.
        live: what a served page needs in addition; None for a file.
        after: HTML after the content.
        form: the form of its charts.
    """
    folder = resources.files(__package__)
    scripts, style = list(form.scripts()), folder.joinpath("page.css").read_text("utf-8")
    # the page loads nothing from outside, and unescaped text could not load anything either
    source, mark, top = "'unsafe-inline'", "", ""
    policy = "default-src 'none'; img-src data:"
    if live is not None:
        source, mark = f"'nonce-{live.nonce}'", f' nonce="{live.nonce}"'
        policy += "; connect-src 'self'; form-action 'self'; base-uri 'none'"
        scripts.append(folder.joinpath("live.js").read_text("utf-8"))
        top = f'<nav>{live.navigation}</nav><p id="live" class="bad" role="status"></p>\n'
    body = "<body>" if live is None else f'<body data-version="{escape(live.version)}">'
    elements = "\n".join(f"<script{mark}>{script}</script>" for script in scripts)
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}; style-src {source}; script-src {source}">'
        f"<title>{escape(title)}</title><style{mark}>{style}</style></head>\n{body}\n{top}"
        f'<main id="content">\n{content}\n</main>\n{after}\n{elements}\n</body></html>\n'
    )
    return page.encode("utf-8", errors="replace").decode("utf-8")  # a name may hold bytes that are no text


# ---- sections


def _summary(run: RunData) -> str:
    parts = [f'<p class="dim">{escape(_started(run))}</p>', _facts(_facts_of(run))]
    parts += [f'<p class="bad">{escape(problem)}</p>' for problem in run.problems]
    return "\n".join(parts)


def _comparison(runs: Sequence[RunData], run_names: Sequence[str]) -> str:
    """Returns a table of the facts of runs with these names, and a table of the options that differ."""
    facts = [dict(_facts_of(run)) for run in runs]
    names = list(dict.fromkeys(name for each in facts for name in each))
    rows = [[name, *[each.get(name, "") for each in facts]] for name in names]
    head = ["", *run_names]
    options = [_options_of(run) for run in runs]
    known = sorted({name for each in options for name in each} - _NEVER_SHOWN)
    differing = [
        [name, *[_exact(each.get(name)) for each in options]]
        for name in known
        if any(each.get(name) != options[0].get(name) for each in options)
    ]
    parts = [_table(head, rows), "<h2>Options that differ</h2>"]
    parts.append(_table(head, differing) if differing else '<p class="dim">None.</p>')
    for run, name in zip(runs[1:], run_names[1:], strict=True):
        parts.append(_other_differences((runs[0], run), (run_names[0], name)))
    for run, name in zip(runs, run_names, strict=True):
        parts += [f'<p class="bad">{escape(name)}: {escape(problem)}</p>' for problem in run.problems]
    return "\n".join(parts)


def _other_differences(pair: tuple[RunData, RunData], names: tuple[str, str]) -> str:
    """Returns what the records of two runs differ in beside options, and the first step that differs."""
    found = [item for item in find_differences(*pair) if item.section != "arguments"]
    rows = [
        [item.section, item.name, *["" if value is None else mask_text(_exact(value)) for value in item.values]]
        for item in found
    ]
    title = f"<h2>What else differs: {escape(names[0])} and {escape(names[1])}</h2>"
    table = _table(["", "", *names], rows) if rows else '<p class="dim">Nothing that is recorded.</p>'
    steps = compare_steps(*pair)
    if steps.divergence is not None:
        text = f"The steps differ from step {steps.divergence.step:,} on."
    else:
        text = f"All {steps.num_common:,} common steps are equal." if steps.num_common else "No steps in common."
    return f"{title}\n{table}\n<p>{text}</p>"


def _curves(charts: Sequence[Chart], runs: Sequence[RunData], form: ChartForm) -> str:
    if not charts:
        return '<h2>Curves</h2>\n<p class="dim">No optimizer step and no logged number was found.</p>'
    figures = "\n".join(_figure(chart, f"chart-{index}", form) for index, chart in enumerate(charts))
    num_steps = max((len(run.updates) for run in runs), default=0)
    about = f"Over optimizer steps. {form.hint}"
    if num_steps:
        about += f" Losses, learning rates and gradient norms are those of each of the {num_steps:,} steps;"
        about += " a long series shows the least and the greatest value of equal parts."
    return f'<h2>Curves</h2>\n<p class="dim">{about}</p>\n<div class="charts">{figures}</div>'


def _figure(chart: Chart, name: str, form: ChartForm) -> str:
    keys = [
        f'<li><svg viewBox="0 0 18 8" aria-hidden="true"><line class="{series.style}" x2="18" y1="4" y2="4"/></svg>'
        f"{escape(series.label)}</li>"
        for series in chart.series
    ]
    verb = "value is" if chart.num_left_out == 1 else "values are"
    left_out = f" {chart.num_left_out:,} {verb} not finite and not shown." if chart.num_left_out else ""
    caption = " · ".join(
        f"{series.label}: {number(series.heights[-1])} at step {series.steps[-1]:,.0f}"
        for series in chart.series
        if not series.is_faint
    )
    drawing = form.draw(chart, name) if chart.series else f'<svg id="{name}" hidden></svg>'
    return (
        f"<figure><header><h3>{escape(chart.title)}</h3>"
        f'<button class="all" type="button" hidden>show all</button></header>{drawing}'
        f'<ul class="legend">{"".join(keys)}</ul>{_values(chart)}'
        f'<figcaption aria-live="polite" title="{escape(describe(chart))}">{escape(caption)}</figcaption>'
        + (f'<p class="bad">{left_out}</p>' if left_out else "")
        + "</figure>"
    )


def _values(chart: Chart) -> str:
    """Returns the points of a chart as a table, for readers who cannot see it; a long series is cut to some of them."""
    steps = sorted({step for each in chart.series for step in each.steps.tolist()})
    if not steps:
        return ""
    places = np.linspace(0, len(steps) - 1, min(len(steps), _MOST_VALUES)).astype(int)
    shown = np.array([steps[at] for at in places.tolist()])
    columns = []
    for each in chart.series:
        last = np.searchsorted(each.steps, shown, side="right") - 1  # the newest value up to a step
        columns.append(["" if at < 0 else number(each.heights[at]) for at in last.tolist()])
    rows = [[f"{step:,.0f}", *cells] for step, *cells in zip(shown.tolist(), *columns, strict=True)]
    table = _table(["step", *[each.label for each in chart.series]], rows, is_numeric=True)
    return f"<details><summary>{escape(chart.title)} as a table</summary>{table}</details>"


def _details(run: RunData, name: str | None) -> str:
    """Returns the sections of one run, under its name unless that is None."""
    parts = [] if name is None else [f"<h2>{escape(name)}</h2>"]
    parts += [
        _evaluations(run),
        _media(run),
        _configuration(run),
        _data(run),
        _checkpoints(run),
        _events(run),
        _environment(run),
    ]
    return "\n".join(part for part in parts if part)


def _evaluations(run: RunData) -> str:
    known = {key for key in set().union(*run.rows) if key.startswith(_OF_EVALUATION)}
    rows = [row for row in run.rows if not known.isdisjoint(row)]
    if not rows:
        return ""
    keys = list(dict.fromkeys(key for row in rows for key in row if key.startswith(_OF_EVALUATION)))
    lines = [[f"{row['step']:,}", *[_as_text(row.get(key, "")) for key in keys]] for row in rows]
    return "<h2>Evaluations</h2>\n" + _table(["step", *keys], lines, is_numeric=True)


def _media(run: RunData) -> str:
    """Returns the newest of each figure and table that the run has recorded."""
    parts = []
    for each in read_media(run.folder):
        name = escape(mask_text(each.name))
        earlier = f"; {each.num_earlier:,} of earlier steps in the folder media" if each.num_earlier else ""
        parts.append(f'<h3>{name}</h3><p class="dim">step {each.step:,}{earlier}</p>')
        if each.problem:
            parts.append(f'<p class="bad">{escape(each.problem)}</p>')
        elif each.picture:
            parts.append(f'<img class="media" alt="{name}" src="{each.picture}">')
        else:
            parts.append(_table(each.columns, [[mask_text(cell) for cell in row] for row in each.rows]))
    return "\n".join(["<h2>Figures and tables</h2>", *parts]) if parts else ""


def _configuration(run: RunData) -> str:
    options = _options_of(run)
    if not options:
        return ""
    defaults: dict[str, Any] = jsonable(TrainingArguments("runs").to_dict())
    changed = {name: value for name, value in options.items() if name not in defaults or value != defaults[name]}
    for name in _NEVER_SHOWN:
        changed.pop(name, None)
    rows = [[name, _exact(value), _exact(defaults.get(name))] for name, value in sorted(changed.items())]
    everything = [[name, _exact(value)] for name, value in sorted(options.items())]
    return (
        "<h2>Configuration</h2>\n"
        + (_table(["option", "value", "default"], rows) if rows else '<p class="dim">All options have defaults.</p>')
        + f"<details><summary>All {len(everything)} options</summary>{_table(['option', 'value'], everything)}"
        + "</details><details><summary>The plan of the run</summary>"
        + _table(["quantity", "value"], _pairs(run.record.get("plan"), _exact))
        + "</details>"
    )


def _checkpoints(run: RunData) -> str:
    if not run.checkpoints:
        return ""
    rows = [
        [each.name, f"{each.step:,}", format_bytes(each.num_bytes), "best" if each.is_best else ""]
        for each in run.checkpoints
    ]
    last = run.checkpoints[-1].name
    command = resume_command([_as_text(word) for word in _list(run.record.get("command"))[1:]])
    if command is None:
        command = "trainer.train(resume_from_checkpoint=True)"
    command = f"{command}  # resumes from {last}, in {run.folder}"
    return (
        "<h2>Checkpoints</h2>\n"
        + _table(["name", "step", "size", ""], rows)
        + f"<p>Resume: </p><pre>{escape(command)}</pre>"
        + "<p>Load the weights of a transformers model: </p>"
        + f"<pre>{escape(f'AutoModel.from_pretrained({str(run.folder / last)!r})')}</pre>"
    )


def _events(run: RunData) -> str:
    """Returns tables of what happened during the run, and of its warnings."""
    parts = []
    for title, found in (("Events", notices.events_of(run)), ("Warnings", notices.warnings_of(run))):
        rows = [[mask_text(_as_text(cell)) for cell in row] for row in found]
        if rows and run.record:
            parts.append(f"<h2>{title}</h2>\n" + _table(["time", "step", title.lower().rstrip("s")], rows))
    return "\n".join(parts)


def _data(run: RunData) -> str:
    rows = [[_as_text(cell) for cell in row] for row in notices.data_of(run)]
    return "<h2>Data</h2>\n" + _table(["name", "kind", "samples"], rows) if rows else ""


def _environment(run: RunData) -> str:
    if not run.record:
        return ""
    git = run.record.get("git")
    rows = [["command", " ".join(map(_as_text, _list(run.record.get("command"))))]]
    rows += [[key, _as_text(run.record.get(key))] for key in ("working_directory", "python", "platform")]
    if isinstance(git, dict):
        state = " with uncommitted changes" if git.get("dirty") else ""
        rows.append(["commit", f"{_as_text(git.get('commit'))}{state}"])
    rows += _pairs(run.record.get("hardware"))
    rows += _pairs(run.record.get("versions"))
    return "<h2>Environment</h2>\n" + _table(["", ""], rows)


# ---- facts


def _started(run: RunData) -> str:
    started = run.record.get("started")
    versions = _mapping(run.record.get("versions"))
    framework = next((f"{name} {_as_text(versions[name])}" for name in ("torch", "tensorflow") if name in versions), "")
    words = [f"started {started}" if started else "", framework, str(run.folder)]
    return " · ".join(word for word in words if word)


def _facts_of(run: RunData) -> list[tuple[str, str]]:
    plan, extra = _mapping(run.record.get("plan")), _mapping(run.record.get("extra"))
    last = {key: value for row in run.rows for key, value in row.items()}
    of_steps = f" of {run.max_steps:,}" if run.max_steps else ""
    facts: list[tuple[str, Any]] = [
        ("state", _state(run)),
        ("optimizer steps", f"{run.last_step:,}{of_steps}"),
        ("epochs", run.last_epoch),
        ("training loss, mean", last.get("train_loss")),
        ("evaluation loss, last", last.get("eval_loss")),
        (f"best {run.state.get('metric_for_best_model') or 'metric'}", run.state.get("best_metric")),
        ("time", duration(last.get("train_runtime"))),
        ("samples a second", last.get("train_samples_per_second")),
        ("parameters", extra.get("num_parameters")),
        ("trainable", extra.get("num_trainable_parameters")),
        ("global batch size", plan.get("global_batch_size")),
        ("processes", plan.get("world_size")),
        ("precision", plan.get("precision")),
    ]
    return [(name, _as_text(value)) for name, value in facts if value is not None]


def _state(run: RunData) -> str:
    """Returns the state of a run. A run in progress writes its own page only when it is about to end."""
    end = _mapping(run.record.get("end")).get("state")
    if end in (FAILED, INTERRUPTED, FINISHED):
        return str(end)
    if run.is_finished:
        return FINISHED
    return RUNNING if is_held(run.folder) else INTERRUPTED


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    items = [f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts]
    return f'<dl class="facts">{"".join(items)}</dl>'


def _options_of(run: RunData) -> dict[str, Any]:
    return dict(masked(run.arguments))


# ---- HTML


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], is_numeric: bool = False) -> str:
    """Returns an HTML table; a long table is cut to its last rows."""
    lines = "".join("<tr>" + "".join(_cell(text, is_numeric) for text in row) + "</tr>" for row in rows[-_MOST_ROWS:])
    names = "".join(cell("th", escape(name), name, ' scope="col"') for name in head)
    cut = f'<p class="dim">The last {_MOST_ROWS:,} of {len(rows):,}.</p>' if len(rows) > _MOST_ROWS else ""
    table = f"<table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>"
    return f'{cut}<div class="scroll" tabindex="0">{table}</div>'


def _cell(text: str, is_numeric: bool) -> str:
    return (
        f'<td class="number">{escape(text)}</td>'
        if is_numeric and len(text) <= LONG
        else cell("td", escape(text), text)
    )


def _points(charts: Sequence[Chart]) -> list[list[dict[str, Any]]]:
    """Returns the points of the charts for the page's script."""
    return [
        [
            {
                "label": shown(series.label),
                "style": series.style,
                "x": [int(step) for step in series.steps.tolist()],
                "y": _rounded(series.values),
                **({} if series.bases is None else {"base": _rounded(series.bases)}),
            }
            for series in chart.series
        ]
        for chart in charts
    ]


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def _as_script(value: Any) -> str:
    """Returns a value as JSON that cannot end its script element."""
    text = json.dumps(value, separators=(",", ":"), default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _as_text(value: Any) -> str:
    """Formats a value for a table: numbers with four digits, mappings and lists as JSON."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int):
        return f"{value:,}" if value.bit_length() < 128 else "more than 10^38"
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _exact(value: Any) -> str:
    """Formats an option for a table: a float with all digits that it takes to tell it from others."""
    return repr(value) if isinstance(value, float) else _as_text(value)


def duration(seconds: Any) -> str | None:
    """Formats seconds for people; None for anything that is no number."""
    if not isinstance(seconds, int | float) or (isinstance(seconds, int) and abs(seconds) > 2**53):
        return None
    if not math.isfinite(seconds) or seconds < 59.95:  # from there on, three digits would be 60 s
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _pairs(value: Any, text_of: Callable[[Any], str] = _as_text) -> list[list[str]]:
    return [[str(name), text_of(each)] for name, each in _mapping(value).items()]
