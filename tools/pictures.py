"""Makes the pictures of a run for README and docs: its terminal at 80 and at 200 columns, and its report.

python tools/pictures.py           needs pyte; the report needs Chromium on the PATH, or its program in CHROMIUM
"""

from __future__ import annotations

import fcntl
import html
import importlib
import os
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
COMMAND = [sys.executable, "-m", "paceline", "demo", "digits"]
ROWS = 60
TAKEN_AT = "step    387"  # the row of an evaluation, in the middle of the run
NO_BREAK = "\u00a0"  # SVG makes one of several spaces
CELL, LINE, MARGIN = 8.4, 19, 14  # of the SVG, in pixels


def main() -> int:
    """Runs the demonstration once per width and writes the pictures. Returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        for columns in (80, 200):
            lines = screen_of_run(columns, Path(folder) / str(columns))
            path = DOCS / f"run_{columns}.svg"
            path.write_text(svg(lines, columns), encoding="utf-8")
            print(path)
        browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
        if browser is None:
            print("The report needs Chromium: docs/report.png is left as it is.")
            return 0
        take_report(browser, next(Path(folder).glob("80/**/report.html")), DOCS / "report.png")
    return 0


def screen_of_run(columns: int, folder: Path) -> list[str]:
    """Runs the demonstration to its end in a pseudo-terminal. Returns the screen in the middle of the training.

    Args:
        columns: width of the terminal.
        folder: the folder that it runs in.
    """
    folder.mkdir()
    emulator: Any = importlib.import_module("pyte")
    screen = emulator.Screen(columns, ROWS)
    stream = emulator.ByteStream(screen)
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    process = subprocess.Popen(COMMAND, cwd=folder, stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
    os.close(inner)
    taken: list[str] = []
    while data := read(outer):
        stream.feed(data)
        lines = [line.rstrip() for line in screen.display]
        if not taken and is_moment(lines):
            taken = lines
    os.close(outer)
    if process.wait() or not taken:
        raise RuntimeError(f"{' '.join(COMMAND)} has failed, or shown no row {TAKEN_AT!r}: " + "\n".join(lines))
    return [line for line in taken if line]


def read(terminal: int) -> bytes:
    """Returns what was written to a terminal; nothing at its end."""
    try:
        return os.read(terminal, 65536)
    except OSError:  # all processes have closed it
        return b""


def is_moment(lines: list[str]) -> bool:
    """True for a whole frame after the chosen row, with both lines of the training."""
    shown = [line for line in lines if line]
    has_row = any(line.startswith(TAKEN_AT) for line in shown)
    return has_row and len(shown) > 2 and shown[-2].startswith("train: ") and shown[-1].startswith("  loss ")


def svg(lines: list[str], columns: int) -> str:
    """Returns the screen of a terminal as an SVG image; the text of each line is stretched to its columns."""
    width, height = columns * CELL + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    texts = []
    for index, line in enumerate(lines):
        color = "#7ee787" if line.startswith(("train:", "  loss ")) else "#e6edf3"
        place = f'x="{MARGIN}" y="{MARGIN + (index + 0.75) * LINE:.1f}" textLength="{len(line) * CELL:.1f}"'
        text = html.escape(line).replace(" ", NO_BREAK)
        texts.append(f'<text {place} lengthAdjust="spacingAndGlyphs" fill="{color}">{text}</text>')
    label = html.escape("\n".join(lines), quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" font-size="14" '
        "font-family=\"ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace\">\n"
        f"<title>{label}</title>\n"
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#0d1117"/>\n' + "\n".join(texts) + "\n</svg>\n"
    )


def take_report(browser: str, page: Path, picture: Path) -> None:
    """Writes a picture of a page by headless Chromium."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        size = ["--window-size=1100,1500", "--hide-scrollbars", f"--screenshot={picture}", page.as_uri()]
        subprocess.run([*command, *size], check=True, capture_output=True, timeout=120)
    print(picture)


if __name__ == "__main__":
    sys.exit(main())
