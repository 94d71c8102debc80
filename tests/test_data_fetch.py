"""`python -m data fetch` against a local server that speaks the hub's protocol to the real client."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_data_helpers import COMMIT, NEWER, Console, Hub, kill_after, mounted, run_data

VAL, TRAIN = "fineweb_val_000000.bin", ["fineweb_train_000001.bin", "fineweb_train_000002.bin"]


def shard(tokens: int, seed: int) -> bytes:
    """A shard written without the code under test: header by struct, one document start in every 100
    tokens.
    """
    ids = np.random.default_rng(seed).integers(0, 50256, tokens)
    ids[::100] = 50256
    return struct.pack("<256i", 20240520, 1, tokens, *[0] * 253) + ids.astype("<u2").tobytes()


FILES = {VAL: shard(3_000, 0), TRAIN[0]: shard(50_000, 1), TRAIN[1]: shard(50_000, 2)}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub(dict(FILES)) as server:
        yield server


@pytest.fixture(scope="module")
def console(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    home = tmp_path_factory.mktemp("home")
    running = Console(home, HF_ENDPOINT=hub.url, HF_HOME=str(home), HF_HUB_DOWNLOAD_TIMEOUT="1", HF_HUB_ETAG_TIMEOUT="1")
    yield running
    running.close()


@pytest.fixture(autouse=True)
def healthy(hub: Hub) -> Iterator[None]:
    yield
    hub.files.clear()
    hub.files.update(FILES)
    hub.faults.clear()
    hub.gets.clear()
    hub.commit, hub.commits, hub.throttle_s = COMMIT, (COMMIT,), 0.0


def visible(folder: Path) -> dict[str, bytes]:
    """Everything in a folder under a name that a reader would look at."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix == ".bin"} if folder.is_dir() else {}


def one_error(err: str) -> str:
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]


def test_plain_fetch_is_verified_and_recorded(console: Console, tmp_path: Path) -> None:
    code, out, err = console("fetch", "someone/shards", "--out", tmp_path)
    assert (code, err) == (0, "")
    assert visible(tmp_path) == FILES
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["revision"] == COMMIT and manifest["dataset"] == "someone/shards"
    assert [s["file"] for s in manifest["shards"]] == [VAL, *TRAIN]
    for entry in manifest["shards"]:
        content = FILES[entry["file"]]
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
        assert entry["tokens"] == (len(content) - 1024) // 2 and entry["documents"] == entry["tokens"] // 100
    assert manifest["fingerprint"] in out
    assert console("verify", tmp_path, "--full")[0] == 0


def test_only_the_shards_that_the_tokens_need(console: Console, hub: Hub, tmp_path: Path) -> None:
    assert console("fetch", "someone/shards", "--out", tmp_path / "a", "--tokens", "50K")[0] == 0
    assert set(visible(tmp_path / "a")) == {VAL, TRAIN[0]}
    assert TRAIN[1] not in {name for name, _ in hub.gets}
    assert console("fetch", "someone/shards", "--out", tmp_path / "b", "--tokens", "50001")[0] == 0
    assert set(visible(tmp_path / "b")) == set(FILES)
    assert console("fetch", "someone/shards", "--out", tmp_path / "c", "--shards", "1")[0] == 0
    assert set(visible(tmp_path / "c")) == {VAL, TRAIN[0]}
    for size in (("--tokens", "1B"), ("--shards", "3")):
        code, _, err = console("fetch", "someone/shards", "--out", tmp_path / "d", *size)
        assert code == 2 and "ask for less" in one_error(err) and not (tmp_path / "d").exists()


def test_a_cut_in_the_middle_goes_on_where_it_was(console: Console, hub: Hub, tmp_path: Path) -> None:
    hub.faults[TRAIN[0]] = ["cut:30000", "cut:20000"]
    assert console("fetch", "someone/shards", "--out", tmp_path)[0] == 0
    assert visible(tmp_path) == FILES
    ranges = [span for name, span in hub.gets if name == TRAIN[0]]
    assert ranges == ["", "bytes=30000-", "bytes=50000-"]


def test_a_server_without_ranges_starts_the_file_over(console: Console, hub: Hub, tmp_path: Path) -> None:
    hub.faults[TRAIN[0]] = ["cut:30000", "no-range"]
    assert console("fetch", "someone/shards", "--out", tmp_path)[0] == 0
    assert visible(tmp_path) == FILES


@pytest.mark.parametrize(
    "faults",
    [["503", "500"], ["429"], ["flip"], ["html"], ["redirect"], ["hang"]],
    ids=lambda faults: "+".join(faults),
)
def test_what_passes_is_waited_out(console: Console, hub: Hub, tmp_path: Path, faults: list[str]) -> None:
    hub.faults[TRAIN[0]] = list(faults)
    code, _, err = console("fetch", "someone/shards", "--out", tmp_path)
    assert (code, err) == (0, "")
    assert visible(tmp_path) == FILES


def test_a_busy_api_is_waited_out(console: Console, hub: Hub, tmp_path: Path) -> None:
    hub.faults["api"] = ["503", "html", "503"]
    assert console("fetch", "someone/shards", "--out", tmp_path)[0] == 0
    assert visible(tmp_path) == FILES


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        (["503"] * 9, "503"),
        (["flip"] * 9, "do not have the hub's sha256"),
        (["html"] * 9, ""),
        (["404"], "404"),
        (["403"], "403"),
    ],
    ids=["503", "flip", "html", "404", "403"],
)
def test_what_stays_is_one_line(console: Console, hub: Hub, tmp_path: Path, faults: list[str], says: str) -> None:
    hub.faults[TRAIN[0]] = list(faults)
    code, _, err = console("fetch", "someone/shards", "--out", tmp_path, "--retries", "2")
    line = one_error(err)
    assert code == 2 and TRAIN[0] in line and says in line
    assert TRAIN[0] not in visible(tmp_path)
    assert all(content == FILES[name] for name, content in visible(tmp_path).items())
    # Once the server is well again, the same command ends with everything right.
    hub.faults.clear()
    assert console("fetch", "someone/shards", "--out", tmp_path)[0] == 0
    assert visible(tmp_path) == FILES


@pytest.mark.parametrize(
    ("arguments", "faults", "says"),
    [
        (("someone/shards", "--revision", NEWER), [], "no such revision"),
        (("someone/nothing",), [], "no such data set"),
        (("nothing",), [], "unknown data set"),
        (("a/b/c",), [], "a/b/c"),
        (("someone/shards",), ["html"] * 9, "not the hub's"),
        (("someone/shards",), ["503"] * 99, "503"),
    ],
)
def test_wrong_names_and_sick_servers(
    console: Console, hub: Hub, tmp_path: Path, arguments: tuple[str, ...], faults: list[str], says: str
) -> None:
    hub.faults["api"] = list(faults)
    code, _, err = console("fetch", *arguments, "--out", tmp_path / "x", "--retries", "1")
    assert code == 2 and says in one_error(err)
    assert not (tmp_path / "x").exists()


def test_nobody_there(tmp_path: Path) -> None:
    done = run_data("fetch", "fineweb10B", "--out", tmp_path / "x", "--retries", "0", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 2 and "cannot reach the hub" in one_error(done.stderr)
    assert not (tmp_path / "x").exists()


def test_the_first_revision_stays(console: Console, hub: Hub, tmp_path: Path) -> None:
    assert console("fetch", "someone/shards", "--out", tmp_path, "--shards", "1")[0] == 0
    hub.commit, hub.commits = NEWER, (COMMIT, NEWER)
    code, out, _ = console("fetch", "someone/shards", "--out", tmp_path)
    assert code == 0 and COMMIT in out and NEWER not in out
    code, _, err = console("fetch", "someone/shards", "--out", tmp_path, "--revision", "main")
    assert code == 2 and NEWER in one_error(err) and COMMIT in err
    assert console("fetch", "someone/shards", "--out", tmp_path / "new")[1].count(NEWER) == 1


def test_damage_on_disk_is_found_and_mended(console: Console, hub: Hub, tmp_path: Path) -> None:
    assert console("fetch", "someone/shards", "--out", tmp_path)[0] == 0
    path = tmp_path / TRAIN[1]
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    hub.gets.clear()
    assert console("fetch", "someone/shards", "--out", tmp_path)[0] == 0
    assert visible(tmp_path) == FILES
    assert {name for name, _ in hub.gets} == {TRAIN[1]}


def test_files_of_others_are_left_alone(console: Console, tmp_path: Path) -> None:
    own = shard(500, 9)
    (tmp_path / TRAIN[0]).write_bytes(own)
    code, _, err = console("fetch", "someone/shards", "--out", tmp_path)
    assert code == 2 and TRAIN[0] in one_error(err)
    assert (tmp_path / TRAIN[0]).read_bytes() == own


def test_no_space_is_said_before_the_first_byte(console: Console, hub: Hub, tmp_path: Path) -> None:
    """The file list says 100 TB, more than any disk that runs these tests has."""
    real = hub.entry
    hub.entry = lambda name: {**(e := real(name)), "size": 10**14, "lfs": {**e["lfs"], "size": 10**14}}  # type: ignore[method-assign]
    try:
        code, _, err = console("fetch", "someone/shards", "--out", tmp_path)
    finally:
        del hub.entry
    assert code == 2 and "are free" in one_error(err)
    assert visible(tmp_path) == {} and [n for n, _ in hub.gets] == []


@pytest.mark.parametrize(("options", "says"), [("ro", "Read-only"), ("size=1m", "are free")])
def test_folders_that_cannot_take_it(console: Console, hub: Hub, tmp_path: Path, options: str, says: str) -> None:
    with mounted(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)], tmp_path):
        code, _, err = console("fetch", "someone/shards", "--out", tmp_path)
        line = one_error(err)
        assert code == 2 and line.startswith(f"error: {tmp_path}: ") and says in line
        assert list(tmp_path.iterdir()) == [] and hub.gets == []


def _kill_loop(hub: Hub, folder: Path, kills: int, seed: int) -> None:
    """Kill a fetch at random moments, then let it finish."""
    hub.throttle_s = 0.04  # 1 MiB every 40 ms: a shard takes a while, so kills fall into it
    draw = random.Random(seed)
    args = ("fetch", "someone/shards", "--out", folder)
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder.parent / "home")}
    killed = 0
    while killed < kills:
        if kill_after(draw.uniform(1.0, 3.0), *args, **env):
            killed += 1
        else:
            assert visible(folder) == hub.files
            shutil.rmtree(folder)
        for name, content in visible(folder).items():
            assert content == hub.files[name]
    hub.throttle_s = 0.0
    done = run_data(*args, **env)
    assert done.returncode == 0, done.stderr
    assert visible(folder) == hub.files
    resumed = [span for _, span in hub.gets if span]
    assert resumed, "no download went on behind a killed one"


def test_killed_fetch_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.files.update({name: shard(20_000_000, 7) for name in TRAIN})
    _kill_loop(hub, tmp_path / "out", kills=2, seed=1)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_twenty_kills_of_a_fetch(hub: Hub, tmp_path: Path) -> None:
    hub.files.update({name: shard(60_000_000, 7) for name in TRAIN})
    _kill_loop(hub, tmp_path / "out", kills=20, seed=2)
