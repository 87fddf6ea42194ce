"""Text of a run as HTML: escaped, and kept from changing how the text beside it is shown."""

from __future__ import annotations

import html
import re

DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")
LONG = 60  # characters of a cell from which on its column is wide


def escape(text: str) -> str:
    """Returns a text as HTML."""
    return html.escape(shown(text))


def shown(text: str) -> str:
    """Returns a text in which characters that reverse the text after them are replaced; right-to-left scripts stay."""
    return DIRECTIONS.sub("\ufffd", text)


def cell(kind: str, content: str, text: str, attributes: str = "") -> str:
    """Returns a cell of a table.

    Args:
        kind: "td" or "th".
        content: the cell as HTML.
        text: the cell as text, whose length decides whether the column is wide.
        attributes: further attributes.
    """
    name = ' class="long"' if len(text) > LONG else ""
    return f"<{kind}{attributes}{name}>{content}</{kind}>"
