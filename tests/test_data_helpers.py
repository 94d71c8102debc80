"""What the tests of `data` share: a server that speaks the hub's protocol, and ways to run the command line.

The server answers the calls that huggingface_hub 2 and datasets 5 really make (repository, tree, paths-info,
resolve), so the clients under test are the real ones, pointed at it by HF_ENDPOINT.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMIT = "c0ffee" + "0" * 34
NEWER = "deadbeef" + "0" * 32


@dataclass
class Hub:
    """A data set on a local server. `faults[file]` is what happens to the next GETs of a file, one entry
    each.
    """

    files: dict[str, bytes]
    dataset: str = "someone/shards"
    commit: str = COMMIT
    commits: tuple[str, ...] = (COMMIT,)
    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    gets: list[tuple[str, str]] = field(default_factory=list)  # (file, Range header)
    lock: threading.Lock = field(default_factory=threading.Lock)
    throttle_s: float = 0.0

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            def handle_it(self) -> None:
                hub._answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        sha256 = hashlib.sha256(content).hexdigest()
        lfs = {"oid": sha256, "size": len(content), "pointerSize": 130}
        return {"type": "file", "path": name, "size": len(content), "oid": "0" * 40, "lfs": lfs}

    def _answer(self, request: _Handler) -> None:
        url = urlsplit(request.path)
        path = unquote(url.path)
        fault = self._next_fault("api") if path.startswith("/api/") and request.command == "GET" else ""
        if fault:
            return self._fail(request, fault, b"")
        if path.startswith("/cdn/"):
            return self._send_file(request, path.removeprefix("/cdn/"), "")
        match = re.fullmatch(
            rf"(?:/api)?/datasets/{self.dataset}(?:/(?P<call>revision|tree|paths-info|resolve)/(?P<rev>[^/]+)(?P<rest>/.*)?)?",
            path,
        )
        if match is None:
            return request.reply(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        revision = match["rev"] or self.commit
        commit = self.commit if revision == "main" else revision
        if commit not in self.commits:
            text = f"Invalid rev id: {revision}"
            return request.reply(404, {"error": text}, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": text})
        rest = (match["rest"] or "").lstrip("/")
        if match["call"] in (None, "revision"):
            siblings = [{"rfilename": name} for name in self.files]
            return request.reply(200, {"id": self.dataset, "sha": commit, "siblings": siblings, "private": False})
        if match["call"] == "tree":
            return request.reply(200, self._tree(rest, "recursive=True" in url.query or "recursive=true" in url.query))
        if match["call"] == "paths-info":
            body = request.body.decode()
            asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
            entries = [self.entry(name) for name in asked if name in self.files]
            folders = [n for n in asked if n not in self.files and any(f.startswith(n + "/") for f in self.files)]
            entries += [{"type": "directory", "path": name, "oid": "0" * 40} for name in folders]
            return request.reply(200, entries)
        if rest not in self.files:
            return request.reply(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        fault = self._next_fault(rest) if request.command == "GET" else ""
        self._send_file(request, rest, fault)

    def _tree(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        inside = [n for n in sorted(self.files) if not folder or n.startswith(folder + "/")]
        depth = folder.count("/") + 1 if folder else 0
        entries = [self.entry(n) for n in inside if recursive or n.count("/") == depth]
        folders = {"/".join(n.split("/")[:k]) for n in inside for k in range(depth + 1, n.count("/") + 1)}
        folders = {f for f in folders if recursive or f.count("/") == depth}
        return entries + [{"type": "directory", "path": f, "oid": "0" * 40} for f in sorted(folders)]

    def _next_fault(self, name: str) -> str:
        with self.lock:
            return self.faults[name].pop(0) if self.faults[name] else ""

    def _fail(self, request: _Handler, fault: str, content: bytes) -> None:
        if fault == "html":
            return request.send(200, b"<html>please log in</html>", {"Content-Type": "text/html"})
        if fault == "hang":
            time.sleep(3)
            return request.abort()
        return request.reply(int(fault), {"error": f"status {fault}"}, {})

    def _send_file(self, request: _Handler, name: str, fault: str) -> None:
        content = self.files[name]
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": self.commit,
            "Accept-Ranges": "bytes",
        }
        if request.command == "GET":
            with self.lock:
                self.gets.append((name, request.headers.get("Range", "")))
        if fault == "redirect":
            return request.send(302, b"", {**headers, "Location": f"{self.url}/cdn/{name}"})
        if fault == "flip":
            content = bytes([*content[:-1], content[-1] ^ 1])
        if fault.isdecimal() or fault in ("html", "hang"):
            return self._fail(request, fault, content)
        status = 200
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if span and fault != "no-range":
            status, start = 206, int(span[1])
            stop = min(int(span[2]), len(content) - 1) if span[2] else len(content) - 1
            headers["Content-Range"] = f"bytes {start}-{stop}/{len(content)}"
            content = content[start : stop + 1]
        if fault.startswith("cut:"):
            request.send(status, content, headers, send=int(fault[4:]))
            return request.abort()
        request.send(status, content, headers, pause_s=self.throttle_s)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    body = b""

    def handle_it(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            self.handle_it()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def abort(self) -> None:
        self.close_connection = True

    def reply(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        self.send(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def send(
        self,
        status: int,
        content: bytes,
        headers: dict[str, str],
        send: int | None = None,
        pause_s: float = 0.0,
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        body = content if send is None else content[:send]
        if not pause_s:
            self.wfile.write(body)
            return
        for i in range(0, len(body), 1 << 20):
            self.wfile.write(body[i : i + (1 << 20)])
            time.sleep(pause_s)


def environment(**extra: str) -> dict[str, str]:
    """The environment of a child process: only real variables, none that would send it elsewhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def run_data(*args: object, cwd: Path = ROOT, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m data ...` as a person runs it."""
    command = [sys.executable, "-m", "data", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment(**env), timeout=timeout)


def kill_after(seconds: float, *args: object, cwd: Path = ROOT, **env: str) -> bool:
    """Start `python -m data ...` and kill -9 it after some time; returns whether it still ran then."""
    command = [sys.executable, "-m", "data", *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=cwd, env=environment(**env))
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True


_SERVE = """
import contextlib, io, json, os, sys
import data.hub, huggingface_hub.constants
from data.__main__ import main

data.hub.FIRST_WAIT_S = 0.01  # shorter waits between tries, the same number of them
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 1000  # the client loses less than a chunk when cut
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(json.loads(line))
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


class Console:
    """Many `python -m data` command lines in one process, so that the libraries are imported once."""

    def __init__(self, cwd: Path, **env: str):
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=environment(**env),
        )

    def __call__(self, *args: object) -> tuple[int, str, str]:
        """(exit code, standard output, standard error) of one command line."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([*map(str, args)]) + "\n")
        self.process.stdin.flush()
        code, out, err = json.loads(self.process.stdout.readline())
        return code, out, err

    def close(self) -> None:
        self.process.communicate()


@contextmanager
def mounted(command: list[str], folder: Path) -> Iterator[None]:
    """Have a file system mounted on `folder`; skips the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this system does not let root mount a tmpfs: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
