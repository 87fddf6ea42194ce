"""A hub on loopback: the endpoints that `huggingface_hub` calls to make a repository, push to it and download from it.

Repositories live in memory. Every answer can be made to fail or to wait, by the path of the request.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

USER = "somebody"
LARGE = (".safetensors", ".bin", ".pt", ".pth")  # stored as large files, as .gitattributes of a new repository says


@dataclass
class Commit:
    message: str
    files: dict[str, bytes]  # all that is there after it

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr((self.message, sorted(self.files.items()))).encode()).hexdigest()


@dataclass
class Repository:
    visibility: str | None = None
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": [Commit("initial commit", {})]})

    @property
    def files(self) -> dict[str, bytes]:
        return self.branches["main"][-1].files

    def messages(self, branch: str = "main") -> list[str]:
        return [commit.message for commit in self.branches[branch][1:]]

    def find(self, revision: str) -> Commit | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        return next((one for commits in self.branches.values() for one in commits if one.sha == revision), None)


@dataclass
class Hub:
    """The repositories of the server, and the requests that it has received."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, authorization
    answer: Callable[[str, str], int | None] = lambda method, path: None  # a status to fail with; it may also wait

    def __getitem__(self, repo_id: str) -> Repository:
        return self.repositories[repo_id]

    def calls(self, text: str) -> int:
        return sum(text in path for _, path, _ in self.requests)


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.handle_request()

    do_HEAD = do_POST = do_PUT = do_GET

    def handle_request(self) -> None:
        body = self.read_body()
        raw = urlsplit(self.path).path  # a slash inside of a name is quoted
        path = unquote(raw)
        self.hub.requests.append((self.command, path, self.headers.get("Authorization")))
        status = self.hub.answer(self.command, path)
        if status is not None:
            self.reply({"error": "made to fail"}, status)
            return
        for pattern, method in ROUTES:
            match = re.fullmatch(pattern, raw)
            if match is not None:
                method(self, body, *map(unquote, match.groups()))
                return
        self.reply({"error": f"no such endpoint: {self.command} {path}"}, 404)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def reply(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def commit_of(self, repo_id: str, revision: str) -> Commit | None:
        repository = self.hub.repositories.get(repo_id)
        found = repository.find(revision) if repository is not None else None
        if found is None:
            code = "RepoNotFound" if repository is None else "RevisionNotFound"
            self.reply({"error": code}, 404, X_Error_Code=code)
        return found

    # ---- the endpoints

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo_id = f"{asked['organization'] or USER}/{asked['name']}"
        status = 409 if repo_id in self.hub.repositories else 200
        visibility = asked.get("visibility") or ("private" if asked.get("private") else None)  # as of 2.0; before
        self.hub.repositories.setdefault(repo_id, Repository(visibility))
        self.reply({"url": f"{self.hub.url}/{repo_id}"}, status)

    def branch(self, body: bytes, repo_id: str, name: str) -> None:
        branches = self.hub[repo_id].branches
        status = 409 if name in branches else 201
        branches.setdefault(name, list(branches["main"]))
        self.reply({}, status)

    def validate(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        problems = []
        try:
            data = yaml.safe_load(content.split("---\n")[1])
            if data.get("base_model") is not None and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", data["base_model"]):
                problems = [{"message": "base_model is not a valid model id"}]
        except yaml.YAMLError as error:
            problems = [{"message": str(error)}]
        self.reply({"errors": problems, "warnings": []}, 400 if problems else 200)

    def preupload(self, body: bytes, repo_id: str, revision: str) -> None:
        commit = self.commit_of(repo_id, revision)
        if commit is None:
            return
        files = []
        for item in json.loads(body)["files"]:
            large = item["path"].endswith(LARGE)
            there = commit.files.get(item["path"])
            oid = None
            if there is not None:
                oid = hashlib.sha256(there).hexdigest() if large else blob_id(there)
            files.append(
                {"path": item["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}
            )
        self.reply({"files": files})

    def batch(self, body: bytes, repo_id: str) -> None:
        objects = []
        for item in json.loads(body)["objects"]:
            upload = {"href": f"{self.hub.url}/blobs/{item['oid']}"}
            actions = {} if item["oid"] in self.hub.blobs else {"actions": {"upload": upload}}
            objects.append({**item, **actions})
        self.reply({"transfer": "basic", "objects": objects})

    def blob(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:  # changed while it was sent
            self.reply({"error": "the content is not what was announced"}, 400)
            return
        self.hub.blobs[oid] = body
        self.reply({})

    def commit(self, body: bytes, repo_id: str, revision: str) -> None:
        parent = self.commit_of(repo_id, revision)
        if parent is None:
            return
        files, message = dict(parent.files), ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        made = Commit(message, files)
        self.hub[repo_id].branches[revision].append(made)
        self.reply({"commitUrl": f"{self.hub.url}/{repo_id}/commit/{made.sha}", "commitOid": made.sha})

    def tree(self, body: bytes, repo_id: str, revision: str) -> None:
        commit = self.commit_of(repo_id, revision)
        if commit is None:
            return
        entries = []
        for path, content in sorted(commit.files.items()):
            entry = {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
            if path.endswith(LARGE):
                sha = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 100}
            entries.append(entry)
        self.reply(entries)

    def info(self, body: bytes, repo_id: str, revision: str = "main") -> None:
        commit = self.commit_of(repo_id, revision)
        if commit is not None:
            siblings = [{"rfilename": path} for path in sorted(commit.files)]
            self.reply({"id": repo_id, "sha": commit.sha, "siblings": siblings})

    def resolve(self, body: bytes, repo_id: str, revision: str, path: str) -> None:
        commit = self.commit_of(repo_id, revision)
        if commit is None:
            return
        content = commit.files[path]
        tag = hashlib.sha256(content).hexdigest() if path.endswith(LARGE) else blob_id(content)
        self.reply(content, ETag=f'"{tag}"', X_Repo_Commit=commit.sha)


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, Callable[..., None]]] = [
    (r"/api/repos/create", Handler.create),
    (r"/api/validate-yaml", Handler.validate),
    (rf"/api/models/{NAME}/branch/(.+)", Handler.branch),
    (rf"/api/models/{NAME}/preupload/(.+)", Handler.preupload),
    (rf"/{NAME}\.git/info/lfs/objects/batch", Handler.batch),
    (r"/blobs/(\w+)", Handler.blob),
    (rf"/api/models/{NAME}/commit/(.+)", Handler.commit),
    (rf"/api/models/{NAME}/tree/([^/]+)/?", Handler.tree),
    (rf"/api/models/{NAME}", Handler.info),
    (rf"/api/models/{NAME}/revision/(.+)", Handler.info),
    (rf"/{NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
]


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that has gone is part of some tests
            super().handle_error(request, client_address)


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub, which reads the environment when it is imported, speak to another server."""
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    importlib.import_module("huggingface_hub").close_session()


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that is there until the block is left."""
    hub = Hub()
    server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
