"""What `fetch` and `build` share of the Hugging Face hub: revisions, file lists, and which errors pass with
time.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import httpx2  # what huggingface_hub 2 speaks HTTP with
from huggingface_hub import HfApi, errors, hf_hub_url, logging
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, disable_progress_bars

from data.errors import is_user_error, user_error

Result = TypeVar("Result")

RETRIES = 6
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0


class Damaged(Exception):
    """Bytes arrived that are not those the hub promised; asking again may help."""


class Stopped(Exception):
    """Another download failed for good, so this one ended early."""


def one_line(error: BaseException) -> str:
    """The first line of an error's text, or its name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def passes_with_time(error: BaseException) -> bool:
    """Whether the same request may succeed later: dead network, timeouts, 408, 429, 5xx, damaged content."""
    if isinstance(error, errors.OfflineModeIsEnabled):
        return False
    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    if isinstance(error, OSError):
        return error.errno is None  # the client's own "consistency check failed"; a real errno is this machine's
    # A ValueError is an answer that is not JSON: a login page, a proxy's apology.
    return isinstance(error, httpx2.TransportError | Damaged | ValueError) and not is_user_error(error)


def with_retries(
    what: str,
    request: Callable[[], Result],
    retries: int = RETRIES,
    stop: threading.Event | None = None,
) -> Result:
    """Call `request` until it succeeds, waiting 1, 2, 4, ... 30 s between. Raises UserError for what does
    not pass.
    """
    stop = stop or threading.Event()
    for attempt in range(retries + 1):
        try:
            return request()
        except (httpx2.HTTPError, OSError, Damaged, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # this machine's: a full disk, a folder that cannot be written
            if isinstance(error, errors.HFValidationError) or is_user_error(error):
                raise
            if not passes_with_time(error) or attempt == retries:
                again = f" (tried {attempt + 1} times)" if attempt else ""
                raise user_error(f"{what}: {_explain(error)}{again}") from error
        if stop.wait(min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S)):
            raise Stopped
    raise AssertionError("unreachable")


def _explain(error: Exception) -> str:
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub has no such revision; check --revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such data set, or it is private; check the name, or set HF_TOKEN"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it to download"
    if isinstance(error, errors.HfHubHTTPError):
        return one_line(error)
    if isinstance(error, ValueError):
        return "the answer is not the hub's (a login page or a proxy?); check the network and HF_ENDPOINT"
    if isinstance(error, httpx2.TransportError):
        return f"cannot reach the hub ({one_line(error)}); check the network and HF_ENDPOINT"
    return one_line(error)


def resolve_revision(dataset: str, revision: str = "", retries: int = RETRIES) -> str:
    """The commit that `revision` (a branch, tag or commit; empty: the newest) of a data set stands for."""
    logging.set_verbosity_error()  # its warnings tell of each retry; what remains in the end is one error
    disable_progress_bars()

    def request() -> str:
        sha = HfApi().repo_info(dataset, repo_type="dataset", revision=revision or None).sha
        if not sha:
            raise Damaged("the hub named no commit")
        return sha

    what = f"{dataset}@{revision}" if revision else dataset
    try:
        return with_retries(what, request, retries)
    except errors.HFValidationError as error:
        raise user_error(f"{dataset}: neither a folder here nor a name on the hub ({one_line(error)})") from None


@dataclass(frozen=True)
class RemoteFile:
    name: str
    bytes: int
    sha256: str


def _remote(entries: Iterable[Any]) -> list[RemoteFile]:
    """The files kept in LFS among a list of tree entries; small text files have no sha256 there."""
    files = [entry for entry in entries if isinstance(entry, RepoFile)]
    return [RemoteFile(f.path, f.size, f.lfs.sha256) for f in files if f.lfs is not None]


def list_files(dataset: str, commit: str, retries: int = RETRIES) -> list[RemoteFile]:
    """The large files in the top folder of a data set, with the sha256 of its LFS store."""

    def request() -> list[RemoteFile]:
        return _remote(HfApi().list_repo_tree(dataset, repo_type="dataset", revision=commit))

    return with_retries(f"{dataset}@{commit}", request, retries)


def describe_files(dataset: str, commit: str, names: list[str], retries: int = RETRIES) -> list[RemoteFile]:
    """The named files of a data set in the order given. Raises UserError for one without a sha256."""

    def request() -> list[RemoteFile]:
        return _remote(HfApi().get_paths_info(dataset, names, repo_type="dataset", revision=commit))

    found = {file.name: file for file in with_retries(f"{dataset}@{commit}", request, retries)}
    for name in names:
        if name not in found:
            raise user_error(f"{dataset}/{name}: the hub has no sha256 of this file to check it against")
    return [found[name] for name in names]


class _Sink:
    """The file that the hub's client writes to; refuses to go on once another download has failed."""

    def __init__(self, file: BinaryIO, stop: threading.Event):
        self._file, self._stop = file, stop

    def write(self, chunk: bytes) -> int:
        if self._stop.is_set():
            raise Stopped
        return self._file.write(chunk)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def download(dataset: str, commit: str, file: RemoteFile, partial: Path, stop: threading.Event) -> None:
    """Add to `partial` what it lacks of a hub file. Raises Damaged, having removed it, if its hash is wrong
    then.

    One try: the client itself goes on after a cut connection, everything else is for `with_retries`.
    """
    url = hf_hub_url(dataset, file.name, repo_type="dataset", revision=commit)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}  # ranges must count the file's own bytes
    with open(partial, "ab") as f:
        have = f.tell()
        if have > file.bytes:
            f.truncate(0)
            have = 0
        sink: Any = _Sink(f, stop)
        try:
            http_get(url, sink, resume_size=have, headers=headers, expected_size=file.bytes)
        finally:
            f.flush()
        os.fsync(f.fileno())
    if sha256_of(partial) != file.sha256:
        partial.unlink()
        raise Damaged("the bytes that arrive do not have the hub's sha256")


def sha256_of(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
