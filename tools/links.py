"""Lists the links of the documentation to other sites; `--check` asks each site whether its page is there.

python tools/links.py [--check]           the check needs a network, and ends with 1 if a page is missing
"""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1`*$", re.DOTALL | re.MULTILINE)
SECONDS = 20.0


@dataclass(frozen=True)
class Link:
    """A link of a page.

    Attributes:
        page: the Markdown file.
        target: what is linked to, as it is written.
    """

    page: Path
    target: str

    @property
    def is_external(self) -> bool:
        return self.target.startswith(("http:", "https:", "mailto:"))

    def is_found(self) -> bool:
        """True if the file of a link within the repository exists, and has its heading."""
        path, _, anchor = self.target.partition("#")
        place = self.page.parent / path if path else self.page
        if not place.exists():
            return False
        return not anchor or (place.suffix == ".md" and anchor in anchors_of(place))


def links_of(page: Path) -> list[Link]:
    """Returns the links of a Markdown page, outside of code blocks."""
    text = FENCE.sub("", page.read_text("utf-8"))
    return [Link(page, target) for target in LINK.findall(text)]


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors of the headings of a page, as GitHub and MyST make them."""
    found: dict[str, int] = defaultdict(int)
    anchors = set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text("utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        anchors.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return anchors


def pages() -> Iterator[Path]:
    """Yields the Markdown pages of the repository that people read."""
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md"):
        yield from sorted(ROOT.glob(pattern))


def problem_of(url: str) -> str:
    """Returns why a page cannot be read; empty if it can."""
    request = urllib.request.Request(url, headers={"User-Agent": "Mozilla/5.0 (link check)"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        # a site that refuses programs is there
        return "" if error.code in (403, 405, 429) else f"{error.code} {error.reason}"
    except (OSError, ValueError) as error:
        return str(error)


def main() -> int:
    """Prints each address with the pages that link to it. Returns the exit status."""
    is_checked, missing = "--check" in sys.argv[1:], 0
    places: dict[str, set[str]] = defaultdict(set)
    for link in (link for page in pages() for link in links_of(page) if link.is_external):
        places[link.target].add(link.page.relative_to(ROOT).as_posix())
    for url, names in sorted(places.items()):
        problem = problem_of(url) if is_checked and url.startswith("http") else ""
        missing += bool(problem)
        print(f"{url}  ({', '.join(sorted(names))}){f': {problem}' if problem else ''}", flush=True)
    print(f"{len(places)} links{f', {missing} missing' if is_checked else ''}")
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
