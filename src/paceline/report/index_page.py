"""Assembles the HTML index of the runs below a folder. All text from a run is escaped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.args.secrets import mask_text, masked
from paceline.report.markup import cell, escape
from paceline.report.page import Live, duration, frame
from paceline.report.run_table import RUNNING, RunRow, RunTable, varying
from paceline.report.svg import number

_MOST_TEXT = 300  # characters of the changed arguments of a run


def make_index(table: RunTable, title: str, links: Mapping[str, str], live: Live) -> str:
    """Returns the page that lists runs, and compares those that a reader ticks.

    Args:
        table: the runs.
        title: the title of the page.
        links: the key in the addresses of a run, by its name; a run without one has no link.
        live: what a served page needs.
    """
    rows = "".join(
        _row(row, changed, links.get(row.name)) for row, changed in zip(table.rows, varying(table.rows), strict=True)
    )
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("", "run", "state", "step", "best", "time", "changed arguments")
    )
    if rows:
        body = (
            f'<form action="/compare" method="get"><div class="scroll tall" tabindex="0" role="region" '
            f'aria-label="runs"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
            '<p><button type="submit">compare the ticked runs</button></p></form>'
        )
    else:
        body = '<p class="dim">There are no runs here yet.</p>'
    problems = "".join(f'<p class="bad">warning: {escape(mask_text(problem))}</p>' for problem in table.problems)
    return frame(title, f"<h1>{escape(title)}</h1>\n{body}\n{problems}", live)


def make_note(title: str, texts: Sequence[str], live: Live) -> str:
    """Returns a page with the reason why there is nothing else to show."""
    body = "".join(f'<p class="bad">{escape(mask_text(text))}</p>' for text in texts)
    return frame(title, f"<h1>{escape(title)}</h1>\n{body}", live)


def _row(row: RunRow, changed: Mapping[str, Any], key: str | None) -> str:
    name = escape(row.name)
    tick = link = ""
    if key is not None:
        tick = f'<input type="checkbox" name="run" value="{escape(key)}" aria-label="compare {name}">'
        link = f'<a href="/run/{escape(key)}">{name}</a>'
    notes = [escape(mask_text(row.error))] if row.error else []
    notes += [f"resumed from {escape(row.parent)}"] if row.parent else []
    below = "".join(f'<br><span class="dim">{note}</span>' for note in notes)
    shown: dict[str, Any] = masked(dict(changed))
    text = " ".join(f"{name}={json.dumps(value, default=str)}" for name, value in sorted(shown.items()))
    text = text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"
    kind = "good" if row.state == RUNNING else ""
    kind = "bad" if row.error else kind
    cells = [
        (tick, ""),
        ((link or name) + below, max([row.name, *notes], key=len)),
        (f'<span class="{kind}">{escape(row.state)}</span>', row.state),
    ]
    values = (
        f"{row.step:,}" + (f" of {row.max_steps:,}" if row.max_steps else ""),
        "" if row.best is None else f"{row.metric or 'metric'} {number(row.best)}",
        duration(row.seconds) or "",
        text,
    )
    cells += [(escape(value), value) for value in values]
    return "<tr>" + "".join(cell("td", content, value) for content, value in cells) + "</tr>"
