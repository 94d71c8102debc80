"""`python -m data build --dataset` through the real `datasets`: a local folder laid out like FineWeb, and
the hub.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data_helpers import COMMIT, NEWER, Console, Hub, kill_after

import data.sources
from data.checks import documents
from data.format import list_shards
from data.sample import sample_documents
from data.sources import HubDataset
from data.tokenizer import gpt2_encoding

NAME = "HuggingFaceFW/fineweb-edu"
README = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""


def texts() -> list[str]:
    return [text[i : i + 4000] for _, text in sample_documents()[:60] for i in range(0, len(text), 4000)]


def table(part: list[str]) -> pa.Table:
    """FineWeb's columns (its dataset card), filled from a text."""
    count = len(part)
    return pa.table(
        {
            "text": part,
            "id": [f"<urn:uuid:{i}>" for i in range(count)],
            "dump": ["CC-MAIN-2013-20"] * count,
            "url": [f"http://example.org/{i}" for i in range(count)],
            "date": ["2013-05-18T05:48:54Z"] * count,
            "file_path": ["s3://commoncrawl/x.warc.gz"] * count,
            "language": ["en"] * count,
            "language_score": pa.array([0.9] * count, pa.float64()),
            "token_count": pa.array([len(text) // 4 for text in part], pa.int64()),
        }
    )


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return texts()


@pytest.fixture(scope="module")
def files(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The repository's files: three parquet files of several row groups, and another configuration."""
    scratch = tmp_path_factory.mktemp("parquet") / "x.parquet"
    made = {"README.md": README.encode()}
    third = len(corpus) // 3
    for i, part in enumerate((corpus[:third], corpus[third : third + 7], corpus[third + 7 :])):
        pq.write_table(table(part), scratch, row_group_size=50)
        made[f"sample/10BT/{i:03d}_00000.parquet"] = scratch.read_bytes()
    pq.write_table(table(["another configuration"]), scratch)
    made["data/CC-MAIN-2013-20/train-00000.parquet"] = scratch.read_bytes()
    return made


@pytest.fixture(scope="module")
def folder(files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which `load_dataset("HuggingFaceFW/fineweb-edu", ...)` finds a local folder."""
    home = tmp_path_factory.mktemp("cwd")
    for name, content in files.items():
        path = home / NAME / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return home


@pytest.fixture
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def texts_of(out: Path) -> list[str]:
    found = list(documents(list_shards(out)))
    return [gpt2_encoding().decode(tokens[1:].tolist()) for tokens in found]


def test_the_documented_call_runs_on_the_folder(there: Path, corpus: list[str]) -> None:
    import datasets

    opened = datasets.load_dataset(NAME, name="sample-10BT", split="train", streaming=True)
    assert [row["text"] for row in opened] == corpus


def test_positions_are_exact(there: Path, corpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every position leads back to its document; also one saved again before anything was read from it."""
    monkeypatch.setattr(data.sources, "BATCH_CHARACTERS", 100_000)  # about 25 documents, so inside row groups too
    source = HubDataset(NAME, "sample-10BT", "train", "")
    batches = list(source.batches(None))
    assert [text for batch in batches for text in batch.texts] == corpus
    assert len(batches) > 8
    starts = np.cumsum([0, *(len(batch.texts) for batch in batches)])
    for batch, start in zip(batches, starts):
        loaded = json.loads(json.dumps(batch.start))
        again = next(source.batches(loaded))
        # Save, load, save, load: the position of a batch that begins where reading resumed is the loaded one.
        assert again.start == loaded
        twice = next(source.batches(json.loads(json.dumps(again.start))))
        assert twice.texts == batch.texts == corpus[start : start + len(batch.texts)]
    third = source.batches(batches[2].start)
    next(third)
    fourth = next(third)  # a resume from a position that was itself reached after a resume
    assert fourth == batches[3]
    assert next(source.batches(fourth.start)).texts == batches[3].texts


def test_datasets_forgets_a_loaded_state(there: Path) -> None:
    """The behaviour that HubDataset guards against; if this fails, the guard can go."""
    import datasets

    def opened() -> datasets.IterableDataset:
        return datasets.load_dataset(NAME, name="sample-10BT", split="train", streaming=True)

    first = opened()
    rows = iter(first)
    for _ in range(30):
        next(rows)
    state = first.state_dict()
    second = opened()
    second.load_state_dict(state)
    third = opened()
    third.load_state_dict(second.state_dict())
    assert next(iter(third))["text"] == texts()[0]
    assert next(rows)["text"] == texts()[30]


@pytest.fixture(scope="module")
def built(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "out"
    running = Console(folder, HF_HUB_OFFLINE="1", HF_HOME=str(out.parent / "hf"))
    args = (
        "build",
        "--dataset",
        NAME,
        "--name",
        "sample-10BT",
        "--out",
        out,
        "--workers",
        2,
        "--shard-tokens",
        "100K",
    )
    code, _, err = running(*args)
    assert (code, err) == (0, "")
    # Nothing of the text is kept in a cache.
    assert sum(p.stat().st_size for p in (out.parent / "hf").rglob("*") if p.is_file()) < 100_000
    for change, says in (
        (("--name", "sample-11BT"), "sample-11BT"),
        (("--split", "validation"), "validation"),
        (("--text-column", "body"), "no column 'body', only text, id"),
        (("--revision", "main"), "has no revisions"),
        (("--dataset", "HuggingFaceFW"), ""),
    ):
        code, _, err = running(*args[:5], *("--out", out.parent / "no"), *change)
        assert code == 2 and says in err and err.startswith("error: ") and err.count("\n") == 1, err
    code, _, err = running("fetch", "fineweb10B", "--out", out.parent / "no")
    assert code == 2 and "HF_HUB_OFFLINE is set" in err and err.count("\n") == 1
    assert not (out.parent / "no").exists()
    running.close()
    return out


def test_the_whole_build(built: Path, corpus: list[str]) -> None:
    assert texts_of(built) == corpus
    manifest = json.loads((built / "manifest.json").read_text())
    assert (manifest["dataset"], manifest["config"]) == (NAME, "sample-10BT")
    assert manifest["revision"].startswith("files:")
    assert len(manifest["shards"]) > 3


@pytest.mark.full
@pytest.mark.timeout(900)
def test_twenty_kills_of_a_streamed_build(built: Path, folder: Path, tmp_path: Path) -> None:
    draw = random.Random(5)
    out = tmp_path / "out"
    args = ("build", "--dataset", NAME, "--name", "sample-10BT", "--out", out, "--workers", 1)
    args += ("--shard-tokens", "100K")
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    whole = {p.name: p.read_bytes() for p in built.iterdir()}
    killed = 0
    while killed < 20:
        if kill_after(draw.uniform(1.0, 3.0), *args, cwd=folder, **env):
            killed += 1
            assert all(path.read_bytes() == whole[path.name] for path in out.glob("*.bin"))
        else:
            assert {p.name: p.read_bytes() for p in out.iterdir()} == whole
            shutil.rmtree(out)
    assert not kill_after(100, *args, cwd=folder, **env)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == whole


@pytest.fixture(scope="module")
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    with Hub(dict(files), dataset="someone/text") as server:
        yield server


@pytest.fixture
def console(hub: Hub, tmp_path: Path) -> Iterator[Console]:
    running = Console(
        tmp_path,
        HF_ENDPOINT=hub.url,
        HF_HOME=str(tmp_path / "hf"),
        HF_HUB_DOWNLOAD_TIMEOUT="1",
        HF_HUB_ETAG_TIMEOUT="1",
    )
    yield running
    running.close()
    hub.faults.clear()
    hub.commit, hub.commits = COMMIT, (COMMIT,)


ARGS = (
    "build",
    "--dataset",
    "someone/text",
    "--name",
    "sample-10BT",
    "--workers",
    1,
    "--shard-tokens",
    "100K",
)
FILE = "sample/10BT/001_00000.parquet"


def test_streamed_from_the_hub(hub: Hub, console: Console, corpus: list[str], built: Path, tmp_path: Path) -> None:
    """The same documents over HTTP through every fault that passes; then the commit stays what it was."""
    first, last = FILE.replace("001_", "000_"), FILE.replace("001_", "002_")
    hub.faults.update({first: ["503", "redirect"], FILE: ["cut:1000"], last: ["hang"]})
    code, _, err = console(*ARGS, "--out", tmp_path / "a")
    assert code == 0, err
    assert not any(hub.faults.values())
    assert texts_of(tmp_path / "a") == corpus
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["revision"] == COMMIT
    for name in ("val_000000", "train_000001"):
        ours = (tmp_path / "a" / f"text_{name}.bin").read_bytes()
        assert ours == (built / f"fineweb-edu_{name}.bin").read_bytes()
    hub.commit, hub.commits = NEWER, (COMMIT, NEWER)
    assert console(*ARGS, "--out", tmp_path / "a")[1].startswith(f"{tmp_path / 'a'}: already built")
    code, _, err = console(*ARGS, "--out", tmp_path / "a", "--revision", NEWER)
    assert code == 2 and COMMIT in err and NEWER in err and err.count("\n") == 1
    for change, says in (
        (("--revision", "nothing"), "no such revision"),
        (("--dataset", "someone/else"), "no such data set"),
    ):
        code, _, err = console(*ARGS, "--out", tmp_path / "b", *change)
        assert code == 2 and says in err and err.count("\n") == 1, err
    assert not (tmp_path / "b").exists()


def test_sources_compared_with_the_hub_s_hash(hub: Hub, console: Console, corpus: list[str], tmp_path: Path) -> None:
    """--check-source: a wrong byte is fetched again, one that stays wrong is one line and no shard holds
    it.
    """
    checked = (*ARGS, "--check-source", "--out")
    hub.faults[FILE] = ["flip", "cut:3000", "503", "html", "redirect"]
    code, _, err = console(*checked, tmp_path / "a")
    assert (code, err) == (0, "")
    assert hub.faults[FILE] == []
    assert texts_of(tmp_path / "a") == corpus
    assert {p.suffix for p in (tmp_path / "a").iterdir()} == {".bin", ".json"}
    hub.faults[FILE] = ["flip"] * 20
    code, _, err = console(*checked, tmp_path / "b")
    assert code == 2 and FILE in err and "sha256" in err and err.count("\n") == 1
    left = [p for p in (tmp_path / "b").iterdir() if p.suffix == ".bin"]
    assert left and all(p.read_bytes() == (tmp_path / "a" / p.name).read_bytes() for p in left)
    hub.faults.clear()
    assert console(*checked, tmp_path / "b")[0] == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()
    }


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["404", "html"])
def test_a_source_that_stays_away_is_one_line(hub: Hub, console: Console, tmp_path: Path, fault: str) -> None:
    hub.faults[FILE] = [fault] * 1000
    code, _, err = console(*ARGS, "--out", tmp_path / "a")
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    assert not (tmp_path / "a" / "manifest.json").exists()
