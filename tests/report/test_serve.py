"""`paceline serve`: its pages, what it refuses, and runs that change or vanish while they are read."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import opened

from paceline.checkpoint.lock import acquire
from paceline.cli.main import main
from paceline.core.journal import FORMAT, JOURNAL_FILE
from paceline.report.serve import RunServer

SECRET = "a line of another file"


def write_run(folder: Path, losses: list[float], **record: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [(step, 0, step, 1, loss, 1.0, 0.1, 1) for step, loss in enumerate(losses, 1)]
    np.array(rows, dtype=FORMAT).tofile(folder / JOURNAL_FILE)
    (folder / "run.json").write_text(json.dumps({"format": 1, "plan": {"max_steps": 4}, **record}))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_run(folder / "a", [3.0, 2.0], arguments={"learning_rate": 0.5})
    write_run(folder / "group" / "b", [3.0, 2.5, 1.0, 0.5], arguments={"learning_rate": 0.25})
    (tmp_path / "secret.json").write_text(json.dumps({"format": 1, "arguments": {"run_name": SECRET}}))
    (tmp_path / "secret.txt").write_text(SECRET)
    return folder


@pytest.fixture
def server(runs: Path) -> Iterator[RunServer]:
    with RunServer(runs, 0) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(server: RunServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    client = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    client.putrequest(method, path, skip_host=True)
    for name, value in {"Host": f"127.0.0.1:{server.server_address[1]}", **headers}.items():
        client.putheader(name.replace("_", "-"), value)
    try:
        client.endheaders()
        answer = client.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        client.close()


def links(page: str) -> dict[str, str]:
    return {name: link for link, name in re.findall(r'<a href="(/run/\w+)">(.*?)</a>', page)}


def test_the_index_leads_to_a_page_of_each_run(server: RunServer) -> None:
    status, index, _ = ask(server, "/")
    assert status == 200
    assert list(links(index)) == ["a", "group/b"]
    assert "learning_rate=0.25" in index
    assert "2 of 4" in index
    for path in links(index).values():
        status, page, _ = ask(server, path)
        assert status == 200
        assert '<svg id="chart-0"' in page
    keys = [path.rpartition("/")[2] for path in links(index).values()]
    status, page, _ = ask(server, "/compare?" + "&".join(f"run={key}" for key in keys))
    assert status == 200
    assert "Options that differ" in page
    assert ask(server, "/compare")[0] == 404


def test_a_page_is_sent_again_when_its_run_has_gone_on(server: RunServer, runs: Path) -> None:
    path = links(ask(server, "/")[1])["a"]
    _, page, headers = ask(server, path)
    assert f'data-version="{headers["ETag"][1:-1]}"' in page
    assert ask(server, path, If_None_Match=headers["ETag"])[0] == 304
    write_run(runs / "a", [3.0, 2.0, 1.5], arguments={"learning_rate": 0.5})
    status, page, fresh = ask(server, path, If_None_Match=headers["ETag"])
    assert (status, fresh["ETag"] != headers["ETag"]) == (200, True)
    assert "3 of 4" in page
    lock = acquire(runs / "a")
    try:
        assert ask(server, path, If_None_Match=fresh["ETag"])[0] == 200
        assert "running" in ask(server, "/")[1]
    finally:
        lock.release()


def test_scripts_run_only_with_the_nonce_of_the_answer(server: RunServer) -> None:
    path = links(ask(server, "/")[1])["a"]
    nonces = set()
    for _ in range(2):
        _, page, headers = ask(server, path)
        policy = headers["Content-Security-Policy"]
        nonce = re.search(r"script-src 'nonce-([\w-]+)'", policy)
        assert nonce is not None
        nonces.add(nonce[1])
        scripts = [tag for tag in re.findall(r"<script[^>]*>", page) if "json" not in tag]
        assert set(scripts) == {f'<script nonce="{nonce[1]}">'}
        assert "unsafe" not in policy + page.split("<style")[0]
        assert "frame-ancestors 'none'" in policy
    assert len(nonces) == 2


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/run/../../secret.txt",
        "/run/..%2f..%2fsecret.txt",
        "/a/run.json",
        "/run/a",
        "//secret.txt",
        "/%2e%2e/secret.txt",
        "http://127.0.0.1/../secret.txt",
        "/compare?run=../../secret.txt",
        "/compare?run=" + "&run=".join(map(str, range(99))),
        "http://[::1/",
    ],
)
def test_no_address_leads_to_another_file(server: RunServer, path: str) -> None:
    status, page, _ = ask(server, path)
    assert status in (400, 404)
    assert SECRET not in page
    assert "Traceback" not in page


def test_links_out_of_the_folder_are_not_followed(server: RunServer, runs: Path, tmp_path: Path) -> None:
    os.symlink(tmp_path, runs / "outside")  # a folder
    write_run(tmp_path / "elsewhere", [1.0], arguments={"run_name": SECRET})
    os.symlink(tmp_path / "elsewhere", runs / "linked")
    path = links(ask(server, "/")[1])["a"]
    for name in ("run.json", "log.jsonl", "report.html", "checkpoint-1"):
        file = runs / "a" / name
        kept = file.read_bytes() if file.exists() else None
        file.unlink(missing_ok=True)
        file.symlink_to(tmp_path / "secret.json")
        status, page, _ = ask(server, path)
        index = ask(server, "/")[1]
        assert (status, SECRET in page + index) == (404, False)
        assert "leads out of the folder" in page
        assert "leads out of the folder" in index
        file.unlink()
        if kept is not None:
            file.write_bytes(kept)
    assert ask(server, path)[0] == 200
    assert set(links(ask(server, "/")[1])) == {"a", "group/b"}


@pytest.mark.skipif(sys.platform == "win32", reason="needs pipes")
def test_a_pipe_is_not_read(server: RunServer, runs: Path) -> None:
    path = links(ask(server, "/")[1])["a"]
    (runs / "a" / "run.json").unlink(missing_ok=True)
    os.mkfifo(runs / "a" / "run.json")
    status, page, _ = ask(server, path)
    assert status == 404
    assert "not a regular file" in page
    assert ask(server, "/")[0] == 200


@pytest.mark.slow
def test_an_open_page_follows_its_run_in_a_browser(
    server: RunServer, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page and the index, while the run goes on: no error, and no request to another host."""
    asked: list[tuple[str, str | None]] = []
    answer = server.RequestHandlerClass.do_GET  # type: ignore[attr-defined]

    def advance(handler: Any) -> None:
        asked.append((handler.path, handler.headers.get("Host")))
        if sum(path == handler.path for path, _ in asked) == 2:
            write_run(runs / "a", [3.0, 2.0, 1.5, 0.125], arguments={"learning_rate": 0.5})
        answer(handler)

    monkeypatch.setattr(server.RequestHandlerClass, "do_GET", advance)
    for number, path in enumerate(("/", links(ask(server, "/")[1])["a"])):
        write_run(runs / "a", [3.0, 2.0], arguments={"learning_rate": 0.5})
        log = tmp_path / f"requests_{number}.json"
        # timers run as fast as the answers come, for ten seconds of the page
        options = ("--virtual-time-budget=10000", f"--log-net-log={log}")
        done = opened(f"http://127.0.0.1:{server.server_address[1]}{path}", tmp_path / str(number), *options)
        assert "CONSOLE" not in done.stderr
        assert '<p id="live" class="bad" role="status"></p>' in done.stdout  # where a failure would be reported
        assert "0.125" in done.stdout or "4 of 4" in done.stdout
        own = f"http://127.0.0.1:{server.server_address[1]}"
        of_page = re.findall(r'"initiator":"(http[^"]*)".*?"url":"([^"]*)"', log.read_text("utf-8"))
        urls = {url for origin, url in of_page if origin == own}
        assert f"{own}{path}" in urls
        assert urls <= {f"{own}{path}", f"{own}/favicon.ico"}
        assert sum(each == path for each, _ in asked) > 2
    assert {host for _, host in asked} == {f"127.0.0.1:{server.server_address[1]}"}


def test_other_hosts_methods_and_addresses_are_refused(server: RunServer, runs: Path) -> None:
    port = server.server_address[1]
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "",
        "localhost:1@evil",
        "127.0.0.1:",
    ):
        assert ask(server, "/", Host=host)[0] == 403, host
    for host in ("localhost", f"localhost:{port}", "[::1]:9", "[::1]", "LOCALHOST:1"):
        assert ask(server, "/", Host=host)[0] == 200, host
    before = sorted(runs.rglob("*"))
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        status, _, headers = ask(server, "/", method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert ask(server, "/", "HEAD")[1] == ""
    assert sorted(runs.rglob("*")) == before
    assert server.server_address[0] == "127.0.0.1"


def test_hostile_names_stay_text(server: RunServer, runs: Path) -> None:
    hostile = '"><script>alert(1)<' + "\x1b[2J\n'&"
    write_run(runs / hostile, [1.0], arguments={"run_name": hostile, hostile: hostile})
    write_run(runs / os.fsdecode(b"\xff\xfe"), [1.0])
    index = ask(server, "/")[1]
    assert "<script>alert" not in index
    assert len(re.findall(r'href="/run/', index)) == 4
    for path in re.findall(r'href="(/run/\w+)"', index):
        status, page, _ = ask(server, path)
        assert status == 200
        assert "<script>alert" not in page


def test_a_run_that_is_removed_or_damaged_leaves_a_note(server: RunServer, runs: Path) -> None:
    found = links(ask(server, "/")[1])
    (runs / "a" / "run.json").write_text('{"format": 1, "argu')
    status, page, _ = ask(server, found["a"])
    assert status == 200
    assert "run.json is damaged" in page
    assert "warning: " in ask(server, "/")[1]
    (runs / "a" / "run.json").write_text(json.dumps({"format": 1, "arguments": [], "plan": 3, "history": {}}))
    assert ask(server, found["a"])[0] == 200
    shutil.rmtree(runs / "a")
    status, page, headers = ask(server, found["a"])
    assert (status, "no longer there" in page, "Traceback" in page) == (404, True, False)
    assert headers["ETag"]
    shutil.rmtree(runs)
    status, page, _ = ask(server, "/")
    assert "Traceback" not in page


def test_the_command_ends_in_one_line(runs: Path) -> None:
    command = [sys.executable, "-m", "paceline", "serve", str(runs), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert re.search(r"at http://127\.0\.0\.1:\d+/ ", line)
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert (out.strip(), err, process.returncode) == ("The server has ended.", "", 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a folder"),
        (["{here}/none"], "is not a folder"),
        (["{here}", "--port", "x"], "--port x"),
        (["{here}", "--port", "70000"], "0 to 65535"),
        (["{here}", "--prot", "1"], "--prot"),
        (["{here}", "--charts", "bokeh"], "paceline report RUN --charts bokeh"),
        (["{here}", "--port", "{taken}"], "used by another program"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(
    server: RunServer, runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    taken = server.server_address[1]
    assert main(["serve", *[word.format(here=runs, taken=taken) for word in words]]) == 2
    assert message in capsys.readouterr().err


def test_a_comparison_is_written_as_a_page(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "both.html"
    assert main(["compare", str(runs / "a"), str(runs / "group" / "b"), "--page", str(page)]) == 1
    text = page.read_text("utf-8")
    assert "The steps differ from step 2 on." in text
    assert "learning_rate" in text
    assert text.count("training loss (a)") > 1
    assert main(["compare", str(runs / "a"), str(runs / "group" / "b"), "--page"]) == 2
    assert "--page takes the file" in capsys.readouterr().err
    assert main(["compare", str(runs / "a"), str(runs / "group" / "b"), f"--page={page}", "--charts", "pie"]) == 2
    assert "charts='pie' is invalid" in capsys.readouterr().err
    assert main(["compare", str(runs / "a"), str(runs / "group" / "b"), "--charts", "bokeh"]) == 2
    assert "with --page FILE" in capsys.readouterr().err
