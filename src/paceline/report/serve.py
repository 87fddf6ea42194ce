"""Serves the pages of the runs below a folder, on this machine only: an index, a page of each run, and comparisons.

A page is made from the run's files when it is requested, and again when they have changed. An address names a run by a
hash of its path, and is looked up among the runs that were found, so that no address leads to another file. Links that
lead out of the folder are not followed.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from paceline.core.lineage import PROGRESS_FILE
from paceline.report.index_page import make_index, make_note
from paceline.report.page import Live, make_page
from paceline.report.run_data import STATE_FILE, read_run
from paceline.report.run_table import RunTable, list_runs, run_folders
from paceline.report.versions import CHECKPOINTS, RUN_FILES, digest, version_of

ADDRESS = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "[::1]")  # names by which a browser on this machine asks; tunnels end here too
MOST_COMPARED = 12
_OF_CHECKPOINT = (STATE_FILE, PROGRESS_FILE)
_MOST_KEPT = 8  # pages
_UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class Gone(ValueError):
    """The run of an address cannot be shown; the message gives the reason."""


@dataclass(frozen=True)
class Answer:
    """An answer to a request.

    Attributes:
        status: the status code.
        version: identifies the state of the files.
        make: returns the page.
    """

    status: HTTPStatus
    version: str
    make: Callable[[Live], str]


class Pages:
    """Finds the runs below a folder and makes their pages.

    Args:
        folder: the folder.

    Raises:
        NotADirectoryError: it is not a folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder.")
        self.title = str(folder)
        self.folder = folder.resolve()
        self._table: tuple[str, RunTable] = ("", RunTable())
        self._kept: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._nonce = secrets.token_hex(16)  # placeholder of the nonce in a cached page
        self._lock = threading.Lock()  # one page at a time: making them in parallel would only be slower

    def find(self, path: str, query: str) -> Answer:
        """Returns the answer to the path and the query of an address."""
        parts = path.strip("/").split("/")
        try:
            if path == "/":
                return self._index()
            if parts[0] == "run" and len(parts) == 2:
                return self._runs([parts[1]])
            if path == "/compare":
                return self._runs(parse_qs(query, max_num_fields=100).get("run", []))
        except Gone as error:
            return self._note(HTTPStatus.NOT_FOUND, "No run to show", str(error))
        except _UNREADABLE as error:
            return self._note(HTTPStatus.NOT_FOUND, "This could not be read", _in_words(error))
        return self._note(HTTPStatus.NOT_FOUND, "Not found", "There is no page at this address.")

    def text(self, answer: Answer, address: str, nonce: str) -> tuple[HTTPStatus, str]:
        """Returns the status and the page of an answer; a page that cannot be made becomes a note."""
        navigation = '<a href="/">all runs</a>' if address != "/" else ""
        key = (address, answer.version)
        with self._lock:
            page = self._kept.get(key)
            if page is None:
                live = Live(self._nonce, answer.version, navigation)
                try:
                    page = answer.make(live)
                except _UNREADABLE as error:
                    reason = f"The run changed while it was read, or is damaged: {_in_words(error)}"
                    return HTTPStatus.NOT_FOUND, make_note(
                        "This could not be read", [reason], Live(nonce, "", navigation)
                    )
                self._kept[key] = page
                while len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
        return answer.status, page.replace(self._nonce, nonce)

    # ---- the pages

    def _index(self) -> Answer:
        places = dict(self._places())
        version = digest(*(f"{key} {version_of(place)}" for key, place in places.items()))

        def make(live: Live) -> str:
            if self._table[0] != version:
                self._table = (version, list_runs(self.folder, self._check_inside))
            table = self._table[1]
            keys = {place: key for key, place in places.items()}
            links = {row.name: keys[row.folder] for row in table.rows if row.folder in keys}
            return make_index(table, self.title, links, live)

        return Answer(HTTPStatus.OK, version, make)

    def _runs(self, keys: list[str]) -> Answer:
        keys = list(dict.fromkeys(keys))
        if not keys:
            raise Gone("No run is ticked: tick two or more in the table of all runs.")
        if len(keys) > MOST_COMPARED:
            raise Gone(f"{len(keys)} runs are ticked; a page compares at most {MOST_COMPARED}.")
        places = dict(self._places())
        missing = [key for key in keys if key not in places]
        if missing:
            raise Gone("This run is no longer there: its folder was removed or renamed.")
        chosen = [places[key] for key in keys]
        for place in chosen:
            self._check_inside(place)
        version = digest(*keys, *map(version_of, chosen))
        return Answer(HTTPStatus.OK, version, lambda live: make_page([read_run(place) for place in chosen], live))

    def _note(self, status: HTTPStatus, title: str, text: str) -> Answer:
        return Answer(status, digest(title, text), lambda live: make_note(title, [text], live))

    # ---- the folders

    def _places(self) -> Iterator[tuple[str, Path]]:
        """Yields (key, folder) of each run."""
        for place in run_folders(self.folder, []):
            name = place.relative_to(self.folder).as_posix()
            yield hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16], place

    def _check_inside(self, place: Path) -> None:
        """Checks that no file that is read for a run is a pipe, or a link that leads out of the served folder.

        Raises:
            Gone: one is.
        """
        files = [place, *(place / name for name in RUN_FILES)]
        for checkpoint in place.glob(CHECKPOINTS):
            files += [checkpoint, *(checkpoint / name for name in _OF_CHECKPOINT)]
        for file in files:
            if file.is_symlink() and not file.resolve().is_relative_to(self.folder):
                raise Gone(
                    f"{file.relative_to(self.folder)} is a link that leads out of the folder that is served, and is "
                    "not followed. `paceline report` makes the page of such a run."
                )
            if file.exists() and not (file.is_file() or file.is_dir()):  # reading a pipe may never end
                raise Gone(f"{file.relative_to(self.folder)} is not a regular file, and is not read.")


class RunServer(ThreadingHTTPServer):
    """A server on the loopback address of this machine.

    Args:
        folder: the folder of the runs.
        port: the port; 0 takes a free one.

    Raises:
        NotADirectoryError: it is not a folder.
        OSError: the port cannot be used.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folder: Path, port: int) -> None:
        self.pages = Pages(folder)
        super().__init__((ADDRESS, port), _Handler)

    @property
    def address(self) -> str:
        """The address of the index."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a connection that its browser has closed."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    server: RunServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "paceline", ""
    timeout = 30  # seconds for which a silent connection keeps its thread

    def do_GET(self) -> None:
        if not _is_local(self.headers.get_all("Host") or []):
            self._send(HTTPStatus.FORBIDDEN, "This server answers only to its own address on this machine.\n")
            return
        try:
            parts = urlsplit(self.path)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, "The address is malformed.\n")
            return
        pages, nonce = self.server.pages, secrets.token_urlsafe(16)
        answer = pages.find(parts.path, parts.query)
        if self.headers.get("If-None-Match") == f'"{answer.version}"' and answer.status == HTTPStatus.OK:
            self._send(HTTPStatus.NOT_MODIFIED, "", version=answer.version)
            return
        address = f"{parts.path}?{parts.query}" if parts.query else parts.path
        status, text = pages.text(answer, address, nonce)
        self._send(status, text, nonce, answer.version if status == HTTPStatus.OK else digest(text.replace(nonce, "")))

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self.close_connection = True  # a body that was not read would be taken for the next request
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, "Pages are read only.\n")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_CONNECT = do_TRACE = _refuse

    def _send(self, status: HTTPStatus, text: str, nonce: str | None = None, version: str = "") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"text/{'html' if nonce else 'plain'}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        source = f"'nonce-{nonce}'" if nonce else "'none'"
        self.send_header(
            "Content-Security-Policy",
            f"default-src 'none'; style-src {source}; script-src {source}; connect-src 'self'; img-src data:; "
            "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
        )
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if version:
            self.send_header("ETag", f'"{version}"')
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Writes nothing: a page that sends a request every two seconds would fill the terminal."""


_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def _is_local(hosts: list[str]) -> bool:
    """True if a request names this machine: a page of another site that points its name here does not."""
    if len(hosts) != 1:
        return False
    host, colon, port = hosts[0].strip().lower().rpartition(":")
    if not colon or port.endswith("]"):
        host, port = hosts[0].strip().lower(), "80"
    return host in HOSTS and port.isdecimal() and port.isascii()


def _in_words(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
