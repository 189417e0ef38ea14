"""A model hub on this machine that speaks the parts of the protocol that downloads and small uploads need."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Hub:
    """repositories: id -> {revision: directory}; `main` is what is taken without one. tokens: id -> the token that may
    read it. Every path that was fetched is in `fetched`."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Path]] = {}
        self.tokens: dict[str, str] = {}
        self.gated: set[str] = set()
        self.fetched: list[str] = []
        self.created: dict[str, dict[str, bytes]] = {}  # id -> files that were uploaded
        self.url = ""

    def take(self, path: str, token: str, body: bytes) -> tuple[int, bytes]:
        """(status, body) for an upload: a repository that is created, a list of files, or a commit of them."""
        if not token:
            return 401, b"{}"
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            assert asked["visibility"] == "private" if "visibility" in asked else asked["private"]
            self.created.setdefault(name, {})
            return 200, json.dumps({"url": f"{self.url}/{name}"}).encode()
        if path == "/api/validate-yaml":  # of the card
            return 200, json.dumps({"errors": [], "warnings": []}).encode()
        name, _, action = path.removeprefix("/api/models/").rpartition("/main")[0].rpartition("/")
        if action == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return 200, json.dumps({"files": files}).encode()
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.created[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        found = {"commitOid": "0" * 40, "commitUrl": f"{self.url}/{name}/commit/{'0' * 40}", "pullRequestUrl": None}
        return 200, json.dumps(found).encode()

    def commit(self, name: str, revision: str) -> str:
        return hashlib.sha1(f"{name}@{self.repositories[name][revision]}".encode()).hexdigest()

    def answer(self, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of a request."""
        for name, revisions in self.repositories.items():
            about, files = f"/api/models/{name}/", f"/{name}/resolve/"
            if path.rstrip("/") != about.rstrip("/") and not path.startswith((about, files)):
                continue
            if name in self.gated:
                return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
            if self.tokens.get(name, token) != token:
                break  # a private repository is none to strangers
            rest = path.removeprefix(about if path.startswith(about) else files)
            wanted = rest.removeprefix("revision/").removeprefix("tree/").split("/")[0]
            commits = {self.commit(name, revision): revision for revision in revisions}
            revision = commits.get(wanted, wanted)
            if revision not in revisions:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            root = revisions[revision]
            sha = self.commit(name, revision)
            names = {str(file.relative_to(root)): file for file in sorted(root.rglob("*")) if file.is_file()}
            if rest.startswith("tree/"):
                listed = [
                    {"type": "file", "path": n, "size": f.stat().st_size, "oid": "0" * 40} for n, f in names.items()
                ]
                return 200, {}, json.dumps(listed).encode()
            if path.startswith(about):
                siblings = [{"rfilename": n} for n in names]
                return 200, {}, json.dumps({"id": name, "sha": sha, "siblings": siblings}).encode()
            file = root / rest.split("/", 1)[1]
            if not file.is_file():
                return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}, b""
            content = file.read_bytes()
            self.fetched.append(str(file.relative_to(root)))
            return 200, {"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}, content
        return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"


@contextmanager
def fake_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            status, headers, body = hub.answer(unquote(urlsplit(self.path).path), token)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers["Content-Length"]))
            status, answer = hub.take(urlsplit(self.path).path, token, body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
