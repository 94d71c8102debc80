"""`manifest.json`: what a folder of shards is, where it came from, and one fingerprint for the whole set.

Nothing in it depends on the time, the machine or the number of workers, so two builds of the same documents
give the same file, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data.errors import user_error
from data.format import Shard, write_bytes

SCHEMA = 1
MANIFEST_NAME = "manifest.json"
# Raised whenever the same documents would give other bytes (tokenization, document order, shard cutting).
CODE_VERSION = 1


def fingerprint(shards: Iterable[Shard]) -> str:
    """One sha256 for a set of shards: what `sha256sum *.bin | sha256sum` prints in the folder (C locale)."""
    lines = sorted((shard.file, shard.sha256) for shard in shards)
    return hashlib.sha256("".join(f"{sha256}  {file}\n" for file, sha256 in lines).encode()).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json. `revision` pins the source; `replaced` counts characters that became
    U+FFFD.
    """

    dataset: str
    config: str
    revision: str
    rank_sha256: str
    shards: list[Shard]
    code_version: int = CODE_VERSION
    replaced: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.shards)

    def to_json(self) -> str:
        """The file's text; the fingerprint is always computed, never carried along."""
        content = {
            "schema": SCHEMA,
            "dataset": self.dataset,
            "config": self.config,
            "revision": self.revision,
            "tokenizer": {"name": "gpt2", "rank_sha256": self.rank_sha256},
            "code_version": self.code_version,
            "replaced": self.replaced,
            "extra": self.extra,
            "shards": [asdict(shard) for shard in self.shards],
            "fingerprint": self.fingerprint,
        }
        return json.dumps(content, indent=1) + "\n"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `folder/manifest.json` atomically; always last, so that a manifest stands for whole shards."""
    write_bytes(folder / MANIFEST_NAME, manifest.to_json().encode())


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None where there is none.

    Raises UserError where it cannot be parsed, has an unknown schema, or its fingerprint does not fit its
    shards.
    """
    path = folder / MANIFEST_NAME
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise user_error(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise user_error(f"{path}: not valid JSON; remove it and verify, fetch or build again") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise user_error(f"{path}: schema {schema!r} is unknown here (this version reads {SCHEMA})")
    try:
        manifest = Manifest(
            dataset=content["dataset"],
            config=content["config"],
            revision=content["revision"],
            rank_sha256=content["tokenizer"]["rank_sha256"],
            shards=[Shard(**shard) for shard in content["shards"]],
            code_version=content["code_version"],
            replaced=content.get("replaced", 0),
            extra=content.get("extra", {}),
        )
        recorded = content["fingerprint"]
    except (KeyError, TypeError, AttributeError) as error:
        raise user_error(f"{path}: a field is missing or has the wrong form ({error})") from None
    if manifest.fingerprint != recorded:
        raise user_error(f"{path}: its fingerprint does not fit its shards; it was edited, fetch or build again")
    return manifest
