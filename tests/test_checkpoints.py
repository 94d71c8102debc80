"""Writing, verifying, purging, mirroring and timing of checkpoints, without a training around them."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from train_support import flags, result, rows, write_shards

import train_gpt2 as t

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def checkpoints(run_dir: Path, said: list[str], attempt: str = "attempt", **changes: Any) -> t.Checkpoints:
    cfg = t.parse_args(["sample", *(f"--{k.replace('_', '-')}={v}" for k, v in changes.items())])
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    return t.Checkpoints(cfg, run_dir, 0, 1, torch.device("cpu"), None, attempt, said.append)


def state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"model.w": torch.randn(40, 30, generator=generator), "optimizer.step.w": torch.tensor(float(step))}


def write(writer: t.Checkpoints, *steps: int) -> None:
    for step in steps:
        if not writer.buffers:
            writer.stage(state(step))
        writer.save(state(step), {"schema": 1, "step": step})
        writer.wait()


def names(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with step-000001 and step-000002."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    writer = checkpoints(run_dir, [])
    write(writer, 1, 2)
    writer.close()
    return run_dir


def test_what_is_saved_is_what_is_loaded(two: Path) -> None:
    import torch.distributed.checkpoint as dcp

    path = two / "checkpoints" / "step-000002"
    assert t.verify_checkpoint(path)["step"] == 2
    assert (two / "checkpoints" / "latest").read_text() == "step-000002\n"
    loaded = {k: torch.full_like(v, -1) for k, v in state(2).items()}
    dcp.load(loaded, storage_reader=t.checkpoint_reader(path), no_dist=True)
    for key, value in state(2).items():
        assert torch.equal(loaded[key], value)


def test_the_copy_is_of_the_moment_of_the_call(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    writer, live = checkpoints(tmp_path, []), state(3)
    writer.stage(live)
    go = threading.Event()
    writer.pool.submit(go.wait, 30)  # the thread gets to it late
    writer.save(live, {"schema": 1, "step": 3})
    for value in live.values():
        value.fill_(77)  # while training goes on
    go.set()
    writer.close()
    loaded = {k: torch.zeros_like(v) for k, v in live.items()}
    dcp.load(loaded, storage_reader=t.checkpoint_reader(tmp_path / "checkpoints" / "step-000003"), no_dist=True)
    assert torch.equal(loaded["model.w"], state(3)["model.w"])


# -- nothing is loaded unverified


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


FILES = [".metadata", "__0_0.distcp", "train_state.json", "manifest.json"]


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_empty, os.remove])
@pytest.mark.parametrize("name", FILES)
def test_every_damage_is_found_and_the_older_one_used(
    two: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(two, run_dir)
    newest = run_dir / "checkpoints" / "step-000002"
    assert sorted(p.name for p in newest.iterdir()) == sorted(FILES)
    damage(newest / name)
    with pytest.raises(t.UserError, match="step-000002"):
        t.verify_checkpoint(newest)
    said: list[str] = []
    cfg = t.parse_args(["sample", "--resume"])
    assert t.find_checkpoint(cfg, run_dir, said.append) == run_dir / "checkpoints" / "step-000001"
    assert len(said) == 1 and "REFUSED" in said[0] and name in said[0] and "step-000002" in said[0]
    with pytest.raises(t.UserError, match=name.replace(".", r"\.")):
        t.find_checkpoint(t.parse_args(["sample", "--resume", "2"]), run_dir, said.append)


def test_every_byte_of_the_manifest_counts(two: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-000002"
    shutil.copytree(two / "checkpoints" / "step-000002", path)
    manifest = (path / "manifest.json").read_bytes()
    for at in range(len(manifest)):
        (path / "manifest.json").write_bytes(manifest[:at] + bytes([manifest[at] ^ 1 << at % 8]) + manifest[at + 1 :])
        with pytest.raises(t.UserError):
            t.verify_checkpoint(path)


def test_what_was_put_there_by_others_is_refused(two: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-000002"
    shutil.copytree(two / "checkpoints" / "step-000002", path)
    (path / "__1_0.distcp").write_bytes(b"more")
    with pytest.raises(t.UserError, match=r"__1_0\.distcp is not in the manifest"):
        t.verify_checkpoint(path)
    (path / "__1_0.distcp").unlink()
    (path / "pinned").write_text("kept by hand\n")  # a note of ours, not part of the state
    t.verify_checkpoint(path)


def test_names_that_are_no_checkpoints(two: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(two, run_dir)
    for name in ("step-final", "step-", "abandoned-step-000009", ".tmp-000009-x"):
        (run_dir / "checkpoints" / name).mkdir()
    (run_dir / "checkpoints" / "step-000010").write_text("a file, not a folder")
    said: list[str] = []
    found = t.find_checkpoint(t.parse_args(["sample", "--resume"]), run_dir, said.append)
    assert found is not None and found.name == "step-000002" and "step-000010" in said[0]


def test_resume_auto_starts_afresh_only_where_there_is_none(two: Path, tmp_path: Path) -> None:
    auto, newest = t.parse_args(["sample", "--resume", "auto"]), t.parse_args(["sample", "--resume"])
    assert t.find_checkpoint(auto, tmp_path, print) is None
    with pytest.raises(t.UserError, match="there is no checkpoint"):
        t.find_checkpoint(newest, tmp_path, print)
    run_dir = tmp_path / "run"
    shutil.copytree(two, run_dir)
    for path in (run_dir / "checkpoints").glob("step-*"):
        damage_flip(path / "__0_0.distcp")
    for cfg in (auto, newest):
        with pytest.raises(t.UserError, match="no good checkpoint"):
            t.find_checkpoint(cfg, run_dir, lambda text: None)


# -- the index, which torch keeps as a pickle


def call(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls module.name(argument) by STACK_GLOBAL, whose names may have dots."""

    def text(s: str) -> bytes:
        return b"\x8c" + bytes([len(s)]) + s.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(argument) + b"\x85R."


@pytest.mark.parametrize(
    ("module", "name", "argument"),
    [
        ("posix", "system", "touch mark"),
        ("builtins", "exec", "open('mark', 'w')"),
        ("torch.distributed.checkpoint.filesystem", "os.system", "touch mark"),
        ("torch.distributed.checkpoint.filesystem", "os.mkdir", "mark"),
        ("pathlib", "os.mkdir", "mark"),
        ("torch", "os.mkdir", "mark"),
        ("torch.serialization", "os.mkdir", "mark"),
    ],
)
def test_an_evil_index_runs_nothing(
    module: str, name: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = call(module, name, argument)
    with pytest.raises(t.UserError, match="it is not loaded"):
        t._MetadataUnpickler(io.BytesIO(data)).load()
    assert not (tmp_path / "mark").exists()
    pickle.loads(data)  # the same bytes do act where nothing guards them
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["FileSystem", "FileSystemReader", "_StoragePrefix", "SerializationFormat", "pickle.loads"])
def test_the_index_gets_no_class_that_it_does_not_need(name: str) -> None:
    with pytest.raises(t.UserError, match="it is not loaded"):
        t._MetadataUnpickler(io.BytesIO(call("torch.distributed.checkpoint.filesystem", name, "x"))).load()


def test_an_enum_is_read_as_every_python_pickles_it_and_getattr_reads_nothing_else() -> None:
    """Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) write a member as getattr(enum, name)."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    def getattr_of(module: str, kind: str, name: str) -> bytes:
        return f"cbuiltins\ngetattr\n(c{module}\n{kind}\nV{name}\ntR.".encode()

    metadata = "torch.distributed.checkpoint.metadata"
    data = getattr_of(metadata, "_MEM_FORMAT_ENCODING", "TORCH_CONTIGUOUS_FORMAT")
    assert pickle.loads(data) is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert t._MetadataUnpickler(io.BytesIO(data)).load() is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    for module, kind, name in (
        (metadata, "_MEM_FORMAT_ENCODING", "__class__"), (metadata, "_MEM_FORMAT_ENCODING", "mro"),
        (metadata, "Metadata", "__init__"), ("torch.serialization", "_get_layout", "__globals__"), ("os", "path", "join"),
    ):  # fmt: skip
        with pytest.raises(t.UserError, match="which no checkpoint needs"):
            t._MetadataUnpickler(io.BytesIO(getattr_of(module, kind, name))).load()


def test_the_index_of_every_dtype_is_read_as_pickle_reads_it(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float64]
    tensors = {f"x{i}": torch.zeros(3, 2).to(kind) for i, kind in enumerate(kinds)} | {"scalar": torch.zeros(())}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    assert t._MetadataUnpickler(io.BytesIO(data)).load() == pickle.loads(data)


# -- commit and purge


def test_at_least_two_verified_stay_and_pinned_ones_too(tmp_path: Path) -> None:
    writer = checkpoints(tmp_path, [])
    write(writer, 1, 2)
    writer.pin("before a spike")
    write(writer, 3, 4, 5)
    assert names(tmp_path) == ["latest", "step-000002", "step-000004", "step-000005"]
    assert (tmp_path / "checkpoints" / "step-000002" / "pinned").read_text() == "before a spike\n"
    writer.close()


def test_a_bad_one_does_not_count_as_kept(tmp_path: Path) -> None:
    writer = checkpoints(tmp_path, [])
    write(writer, 1, 2)
    damage_flip(tmp_path / "checkpoints" / "step-000002" / "__0_0.distcp")
    writer = checkpoints(tmp_path, [], attempt="another")  # which has verified nothing yet
    write(writer, 3)
    assert names(tmp_path) == ["latest", "step-000001", "step-000002", "step-000003"]
    writer.close()


def test_left_overs_of_a_killed_attempt_go_and_never_count(tmp_path: Path) -> None:
    write(checkpoints(tmp_path, []), 1)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-000001", folder / ".tmp-000002-killed")
    (folder / ".old-step-000000-1234").mkdir()
    found = t.find_checkpoint(t.parse_args(["sample", "--resume"]), tmp_path, print)
    assert found is not None and found.name == "step-000001"
    writer = checkpoints(tmp_path, [], attempt="next")
    assert names(tmp_path) == ["latest", "step-000001"]
    (folder / ".tmp-000002-killed").mkdir()  # the orphan of the killed attempt writes on
    (folder / ".tmp-000002-killed" / "__1_0.distcp").write_bytes(b"half")
    write(writer, 2)
    t.verify_checkpoint(folder / "step-000002")
    assert sorted(p.name for p in (folder / "step-000002").iterdir()) == sorted(FILES)
    writer.close()


def test_the_same_step_again_replaces_the_first(tmp_path: Path) -> None:
    write(checkpoints(tmp_path, []), 1, 2)
    damage_flip(tmp_path / "checkpoints" / "step-000002" / "__0_0.distcp")
    writer = checkpoints(tmp_path, [], attempt="next")
    write(writer, 2)
    t.verify_checkpoint(tmp_path / "checkpoints" / "step-000002")
    assert names(tmp_path) == ["latest", "step-000001", "step-000002"]
    writer.close()


# -- full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    mount = tmp_path / "disk"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_a_full_disk_leaves_the_earlier_ones(small_disk: Path, policy: str) -> None:
    said: list[str] = []
    writer = checkpoints(small_disk / "run", said, on_save_error=policy)
    write(writer, 1, 2)
    free = shutil.disk_usage(small_disk).free
    (small_disk / "filler").write_bytes(b"x" * (free - 4096))
    if policy == "stop":
        with pytest.raises(t.Halt, match="No space left") as stopped:
            write(writer, 3)
        assert stopped.value.code == t.Exit.DISK
    else:
        write(writer, 3)
    assert "No space left" in said[0] and "step 3" in said[0] and "\n" not in said[0]
    for step in (1, 2):
        t.verify_checkpoint(small_disk / "run" / "checkpoints" / f"step-{step:06d}")
    assert names(small_disk / "run") == ["latest", "step-000001", "step-000002"]
    if policy == "continue":
        (small_disk / "filler").unlink()
        write(writer, 4)
        assert names(small_disk / "run") == ["latest", "step-000002", "step-000004"]
        writer.close()


# -- mirror


def test_the_mirror_is_a_verified_copy_of_the_newest(tmp_path: Path) -> None:
    said: list[str] = []
    writer = checkpoints(tmp_path / "run", said, mirror=(tmp_path / "mirror").as_uri())
    write(writer, 1, 2, 3, 4)
    writer.close()
    copies = sorted((tmp_path / "mirror" / "run").iterdir())
    assert not said and copies[-1].name == "step-000004" and len(copies) <= 2
    for copy in copies:
        t.verify_checkpoint(copy)


def test_a_mirror_forgets_what_the_run_has_gone_back_behind(tmp_path: Path) -> None:
    """Else the newest there would be of the attempt that was given up, and would be restored."""
    mirror = tmp_path / "mirror"
    first = checkpoints(tmp_path / "run", [], mirror=mirror.as_uri(), keep=4)
    write(first, 4, 8)
    first.close()
    assert "step-000008" in {p.name for p in (mirror / "run").iterdir()}
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000008")
    again = checkpoints(tmp_path / "run", [], mirror=mirror.as_uri(), keep=4)
    write(again, 6)
    again.close()
    assert max(p.name for p in (mirror / "run").iterdir()) == "step-000006"


def test_a_mirror_that_cannot_be_written_is_said_and_stops_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").write_text("in the way")
    writer = checkpoints(tmp_path / "run", said, mirror=str(tmp_path / "file"))
    write(writer, 1, 2)
    writer.close()
    assert said and "mirror" in said[0] and "training goes on" in said[0]
    assert names(tmp_path / "run") == ["latest", "step-000001", "step-000002"]


def register(name: str, put_file: Callable[..., None]) -> None:
    """A file system for fsspec that is the local one but for its writes."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    def strip(cls: Any, path: str) -> str:
        return LocalFileSystem._strip_protocol(path.removeprefix(f"{name}://"))

    members = {"protocol": name, "put_file": put_file, "_strip_protocol": classmethod(strip)}
    fsspec.register_implementation(name, type("Broken", (LocalFileSystem,), members), clobber=True)


def test_a_mirror_that_fails_halfway_does_not_count(tmp_path: Path) -> None:
    from fsspec.implementations.local import LocalFileSystem

    def put_file(self: Any, source: str, target: str, **more: Any) -> None:
        LocalFileSystem.put_file(self, source, target, **more)
        if target.endswith("train_state.json"):
            raise OSError("the connection was reset")

    register("halfway", put_file)
    said: list[str] = []
    writer = checkpoints(tmp_path / "run", said, mirror=f"halfway://{tmp_path}/mirror")
    write(writer, 1)
    writer.close()
    assert "the connection was reset" in said[0]
    with pytest.raises(t.UserError):
        t.verify_checkpoint(tmp_path / "mirror" / "run" / "step-000001")
    t.verify_checkpoint(tmp_path / "run" / "checkpoints" / "step-000001")


def test_a_mirror_that_stores_other_bytes_is_found(tmp_path: Path) -> None:
    from fsspec.implementations.local import LocalFileSystem

    def put_file(self: Any, source: str, target: str, **more: Any) -> None:
        LocalFileSystem.put_file(self, source, target, **more)
        if target.endswith(".distcp"):
            damage_flip(Path(target))

    register("lying", put_file)
    said: list[str] = []
    writer = checkpoints(tmp_path / "run", said, mirror=f"lying://{tmp_path}/mirror")
    write(writer, 1)
    writer.close()
    assert "does not read back" in said[0] and not (tmp_path / "mirror" / "run" / "step-000001").exists()


def test_a_mirror_that_hangs_holds_up_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.local import LocalFileSystem

    go = threading.Event()

    def put_file(self: Any, source: str, target: str, **more: Any) -> None:
        go.wait(30)
        LocalFileSystem.put_file(self, source, target, **more)

    register("hanging", put_file)
    said: list[str] = []
    writer = checkpoints(tmp_path / "run", said, mirror=f"hanging://{tmp_path}/mirror")
    write(writer, 1, 2, 3, 4)
    # The one that is being copied is not purged under the copy's hands.
    assert names(tmp_path / "run") == ["latest", "step-000001", "step-000003", "step-000004"]
    monkeypatch.setattr(t, "MIRROR_PATIENCE", 0.1)
    writer.close()
    assert "did not finish" in said[0]
    go.set()
    writer.mirror.join(10)
    assert not writer.mirror.is_alive()


# -- cadence


def simulate(interval: float, stall: float, mtbf: float, restart: float, work: float, runs: int, seed: int) -> float:
    """Mean hours of `runs` runs that need `work` hours, saving after every `interval` hours at a cost of `stall`, and
    losing, at failures `mtbf` hours apart on average, what was done since the last save plus `restart`."""
    rng = np.random.default_rng(seed)
    segments = np.full(runs, math.ceil(work / interval))
    total = np.zeros(runs)
    while (going := segments > 0).any():
        failure = rng.exponential(mtbf, runs)
        done = np.minimum((failure / (interval + stall)).astype(int), segments)
        finished = done == segments
        total += np.where(going, np.where(finished, done * (interval + stall), failure + restart), 0)
        segments = np.where(going, segments - done, 0)
    return float(total.mean())


@pytest.mark.parametrize(
    ("stall_s", "cfg", "devices"),
    [
        (0.5, t.Config(mtbf_hours=24.0), 8),
        (20.0, t.Config(mtbf_hours=100.0), 64),
        (5.0, t.Config(mtbf_hours=1e9, spot_mtbf_hours=1.0), 8),
    ],
)
def test_auto_interval_is_near_the_best_of_ten_thousand_simulated_runs(stall_s: float, cfg: t.Config, devices: int) -> None:
    mtbf = t.mean_time_between_failures(cfg, devices) / 3600
    chosen = t.checkpoint_interval(stall_s, mtbf * 3600, upload_s=0.0) / 3600
    work = 200 * chosen  # whole numbers of intervals are nearly fair to all candidates

    def cost(interval: float) -> float:
        return simulate(interval, stall_s / 3600, mtbf, 0.05, work, 10_000, seed=3) / work

    candidates = chosen * 2.0 ** np.arange(-3, 3.01, 0.5)
    costs = [cost(c) for c in candidates]
    assert cost(chosen) <= 1.05 * min(costs)
    # The search sees the price of a bad choice, above the cost of work itself.
    assert costs[0] - 1 > 1.5 * (cost(chosen) - 1) and costs[-1] - 1 > 1.5 * (cost(chosen) - 1)


def test_mean_time_between_failures_divides_devices_but_not_preemptions() -> None:
    assert t.mean_time_between_failures(t.Config(mtbf_hours=24), 1) == pytest.approx(24 * 3600)
    assert t.mean_time_between_failures(t.Config(mtbf_hours=24), 8) == pytest.approx(3 * 3600)
    spot = t.Config(mtbf_hours=1e12, spot_mtbf_hours=2)
    assert t.mean_time_between_failures(spot, 8) == pytest.approx(2 * 3600)


def test_auto_interval_is_never_below_an_upload() -> None:
    assert t.checkpoint_interval(0.001, 3600, upload_s=90) == 90
    assert t.checkpoint_interval(2.0, 3600, upload_s=90) == pytest.approx(math.sqrt(2 * 2 * 3600))


# -- python -m harness checkpoints


def command(*args: str) -> int:
    from harness.__main__ import main

    return main(["checkpoints", *args])


def a_run(two: Path, folder: Path) -> Path:
    run_dir = folder / "run"
    shutil.copytree(two, run_dir)
    t.write_json(run_dir / "config.json", {})
    return run_dir


def test_listing_shows_steps_sizes_and_what_is_bad(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = a_run(two, tmp_path)
    assert command(str(run_dir), "--verify") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["step-000001", "1"], ["step-000002", "2"]]
    size = sum(p.stat().st_size for p in (run_dir / "checkpoints" / "step-000002").iterdir() if p.name != "manifest.json")
    assert lines[2].split()[2] == f"{size / 1e6:.1f}" and lines[2].endswith("verified")
    damage_flip(run_dir / "checkpoints" / "step-000001" / "__0_0.distcp")
    assert command(str(run_dir)) == 0 and "not verified" in capsys.readouterr().out
    assert command(str(run_dir), "--verify") == 1
    out = capsys.readouterr().out
    assert "BAD" in out and "__0_0.distcp does not match its sha256" in out


def test_prune_leaves_verified_and_pinned_ones(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = a_run(two, tmp_path)
    folder = run_dir / "checkpoints"
    for step in (3, 4, 5):
        shutil.copytree(folder / "step-000002", folder / f"step-{step:06d}")
    (folder / "abandoned-step-000007-12ab").mkdir()
    (folder / "step-000001" / "pinned").write_text("before the spike\n")
    damage_flip(folder / "step-000005" / "train_state.json")
    assert command(str(run_dir), "--prune", "--keep", "2") == 0
    assert names(run_dir) == ["latest", "step-000001", "step-000003", "step-000004"]
    damage_flip(folder / "step-000001" / "train_state.json")
    damage_flip(folder / "step-000003" / "train_state.json")
    assert command(str(run_dir), "--prune") == 2  # one good one is left: nothing may go
    assert names(run_dir) == ["latest", "step-000001", "step-000003", "step-000004"]
    assert command(str(run_dir), "--prune", "--keep", "1") == 2
    assert "error: --keep 1" in capsys.readouterr().err


def test_a_run_comes_back_from_its_mirror(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mirror = (tmp_path / "mirror").as_uri()
    writer = checkpoints(tmp_path / "run", [], mirror=mirror, keep=3)
    for step in (1, 2, 3):
        write(writer, step)
        while not (tmp_path / "mirror" / "run" / f"step-{step:06d}" / "manifest.json").exists():
            threading.Event().wait(0.01)
    writer.close()
    original = {p.name: p.read_bytes() for p in (tmp_path / "run" / "checkpoints" / "step-000002").iterdir()}
    shutil.rmtree(tmp_path / "run")
    damage_flip(tmp_path / "mirror" / "run" / "step-000003" / "__0_0.distcp")
    assert command(str(tmp_path / "run"), "--from", mirror) == 0
    out = capsys.readouterr().out
    assert "CHECKPOINT REFUSED" in out and "step-000003" in out and "step-000002 is restored and verified" in out
    assert names(tmp_path / "run") == ["step-000002"]
    t.verify_checkpoint(tmp_path / "run" / "checkpoints" / "step-000002")
    assert {p.name: p.read_bytes() for p in (tmp_path / "run" / "checkpoints" / "step-000002").iterdir()} == original
    assert command(str(tmp_path / "run"), "--from", mirror, "--step", "1") == 0
    assert names(tmp_path / "run") == ["step-000001", "step-000002"]
    assert command(str(tmp_path / "run"), "--from", mirror, "--step", "9") == 2
    assert command(str(tmp_path / "other"), "--from", str(tmp_path / "nowhere")) == 2 and not (tmp_path / "other").exists()


def test_stalls_are_counted_against_the_usual_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harness.checkpoints import stalls

    for name, usual in (("a", 100.0), ("b", 50.0)):
        rows = [{"kind": "train", "step": i, "step_ms": usual} for i in range(1, 101)]
        for step, blocked, longer in ((30, 5.0, 40.0), (60, 7.0, 20.0), (90, 6.0, 60.0)):
            rows[step] |= {"save_ms": blocked, "save_wait_ms": 3.0}
            rows[step]["step_ms"] += 10
            rows[step + 1]["step_ms"] += longer
            rows[step + 3]["step_ms"] += 500
        rows[5]["save_ms"] = rows[96]["save_ms"] = 1000.0  # in the first tenth; too near the end
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = stalls([tmp_path / "a"])
    assert report["stalls"] == 3 and report["median_step_ms"] == 100
    assert report["median_blocked_ms"] == 6 and report["median_wait_ms"] == 3
    assert report["median_stall_ms"] == 45 and report["max_stall_ms"] == 66
    assert report["median_stall_5_steps_ms"] == 555
    both = stalls([tmp_path / "a", tmp_path / "b"])
    assert both["stalls"] == 6 and both["median_stall_in_steps"] == pytest.approx((0.66 + 0.54) / 2)
    (tmp_path / "a" / "config.json").write_text("{}")
    assert command(str(tmp_path / "a"), "--cost") == 0 and "median_stall_ms          45" in capsys.readouterr().out
    often = [{"kind": "train", "step": i, "step_ms": 1.0, "save_ms": 1.0} for i in range(1, 101, 3)]
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in often))
    assert command(str(tmp_path / "a"), "--cost") == 2 and "fewer than six steps apart" in capsys.readouterr().err
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    assert command(str(tmp_path / "a"), "--cost") == 2 and "no save with five steps after it" in capsys.readouterr().err


def test_waiting_for_the_save_before_is_told_apart_from_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = t.Checkpoints._write

    def slowly(self: t.Checkpoints, meta: dict[str, Any]) -> None:
        time.sleep(0.5)
        write(self, meta)

    monkeypatch.setattr(t.Checkpoints, "_write", slowly)
    data = write_shards(tmp_path / "data")
    assert t.main(flags("sample", data, tmp_path / "run", checkpoint_every=2, val_every=0)) == t.Exit.OK
    first, second = (row for row in rows(tmp_path / "run", "train") if "save_ms" in row)
    assert (first["step"], second["step"]) == (3, 5)
    assert first["save_wait_ms"] < 100 and 200 < second["save_wait_ms"] < 5000
    assert second["save_ms"] < 200 < 500 < result(tmp_path / "run")["checkpoint_stall_seconds"] * 1000


def test_a_full_disk_is_called_so_whatever_torch_says_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of torch's writers meets it first decides what it says: the system's words, or a position that does not fit."""
    place: Any = SimpleNamespace(dir=tmp_path)
    error = RuntimeError("[enforce fail at inline_container.cc]\nunexpected pos 64 vs 0")
    assert t.Checkpoints._why(place, error) == "unexpected pos 64 vs 0"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    assert t.Checkpoints._why(place, error) == "No space left on device (unexpected pos 64 vs 0)"
    assert t.Checkpoints._why(place, OSError(28, "No space left on device")) == "[Errno 28] No space left on device"
