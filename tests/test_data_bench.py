"""The benchmark command: both sides write the same tokens, memory stays flat, no number is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_data_helpers import run_data


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_benchmark(tmp_path: Path) -> None:
    done = run_data("bench", "--tokens", "20M", "--json", tmp_path / "bench.json", timeout=800)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "bench.json").read_text())
    runs = result["runs"]
    assert set(runs) == {
        "plain",
        "plain, all cores",
        "build",
        "build, quarter",
        "datasets",
        "datasets, quarter",
    }
    assert runs["plain"]["tokens"] == runs["build"]["tokens"] == runs["datasets"]["tokens"] >= 19_000_000
    # Less work per token shows on a busy machine too; the ratio of wall times needs a quiet one.
    assert runs["build"]["cpu_seconds"] < 0.8 * runs["plain"]["cpu_seconds"]
    assert all(runs[name]["peak_bytes"] < 1.5e9 for name in runs if not name.startswith("plain"))
    assert result["memory_growth"]["build"] < 1.25
