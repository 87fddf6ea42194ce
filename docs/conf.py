"""Sphinx: `make site` builds build/site from the pages of this folder and the docstrings (tools/build_site.py)."""

from __future__ import annotations

import re
from typing import Any

import paceline
from paceline.args.option_docs import OPTIONS_HEADING

OUTSIDE = re.compile(r"\]\((\.\./[^)#]+\.md)\)")

project = "paceline"
author = "the paceline developers"
version = release = paceline.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns = ["plots/*.md"]
html_theme = "furo"
html_title = f"paceline {release}"
html_theme_options = {"navigation_with_keys": True}
if "tags" in globals() and globals()["tags"].has("versions"):  # of a site with several versions
    html_static_path = ["_static"]
    html_js_files, html_css_files = ["versions.js"], ["versions.css"]
copybutton_prompt_text = "$ "

myst_heading_anchors = 3
highlight_language = "none"

# docstrings are plain text with Markdown's single backticks
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_use_ivar = True
napoleon_custom_sections = [("Environment", "params_style"), ("Fields", "params_style")]


def setup(app: Any) -> None:
    """Registers the two changes of what Sphinx reads."""
    app.connect("source-read", keep_files_outside)
    app.connect("autodoc-process-docstring", cut_options)


def keep_files_outside(app: Any, page: str, source: list[str]) -> None:
    """Makes a link to a Markdown file of the repository one to a copy of it: it is no page of the site."""
    source[0] = OUTSIDE.sub(r"](path:\1)", source[0])


def cut_options(app: Any, what: str, name: str, item: object, options: object, lines: list[str]) -> None:
    """Replaces the list of options in the docstring of an arguments class by a reference to their page."""
    start = next((number for number, line in enumerate(lines) if line.strip() == OPTIONS_HEADING), None)
    if what == "class" and start is not None:
        lines[start:] = ["The options are listed on a page of their own: :doc:`/options`.", ""]
