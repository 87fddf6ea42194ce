"""The forms that the charts of a report can have: SVG with a script of the page's own, or charts of BokehJS."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from paceline.report import svg
from paceline.report.curves import Chart
from paceline.report.markup import escape

_BOKEH_FILES = ("bokeh.min.js", "bokeh-api.min.js")


@dataclass(frozen=True)
class ChartForm:
    """A form of charts.

    Attributes:
        hint: how a reader uses the charts.
        draw: `(chart, id)`: returns the HTML element of a chart.
        scripts: returns the scripts of a page, in their order.
    """

    hint: str
    draw: Callable[[Chart, str], str]
    scripts: Callable[[], Sequence[str]]


def find_form(name: str) -> ChartForm:
    """Returns the form of charts with a name.

    Raises:
        ValueError: there is no such form.
        ImportError: its library is missing; the message names the extra that installs it.
    """
    if name not in FORMS:
        raise ValueError(f"charts={name!r} is invalid: expected one of {', '.join(map(repr, FORMS))}.")
    if name == "bokeh":
        _bokeh_folder()
    return FORMS[name]


def _own_script(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _bokeh_place(chart: Chart, name: str) -> str:
    """Returns the element that the page's script draws a chart into."""
    label = escape(svg.describe(chart))
    return f'<div id="{escape(name)}" class="bokeh" role="group" tabindex="0" aria-label="{label}"></div>'


def _bokeh_scripts() -> list[str]:
    folder = _bokeh_folder()
    library = [(folder / name).read_text("utf-8") for name in _BOKEH_FILES]
    # neither ends the element that the script stands in; in strings and patterns the backslash changes nothing
    library = [text.replace("</script", "<\\/script").replace("<!--", "<\\!--") for text in library]
    return [*library, _own_script("bokeh_charts.js")]


def _bokeh_folder() -> Path:
    """Returns the folder of BokehJS in the installed package, which is not imported. Raises: ImportError."""
    found = importlib.util.find_spec("bokeh")
    places = [] if found is None else list(found.submodule_search_locations or ())
    for place in places:
        folder = Path(place) / "server" / "static" / "js"
        if all((folder / name).is_file() for name in _BOKEH_FILES):
            return folder
    raise ImportError("bokeh is required for charts='bokeh': pip install \"paceline[report]\"")


SVG = ChartForm(
    hint="Drag to zoom, double-click to show all; arrow keys read a focused chart.",
    draw=svg.draw,
    scripts=lambda: [_own_script("page.js")],
)
BOKEH = ChartForm(
    hint="Drag to zoom all charts; the legend hides lines. A focused chart is zoomed with + and - and moved with the "
    "arrow keys; Escape shows all.",
    draw=_bokeh_place,
    scripts=_bokeh_scripts,
)
FORMS = {"svg": SVG, "bokeh": BOKEH}
