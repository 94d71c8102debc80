"""The benchmark of several devices: its arithmetic by hand, its verdicts on played runs, and once whole on two gloo ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness_support import write_run
from train_support import TINY, write_shards

from harness import bench_multi, promote
from harness.__main__ import main
from harness.bench_multi import Multi, compare, efficiency
from harness.common import UserError

SMALL = TINY | {"epochs": 9999, "value-embeds": 1, "head-precision": "same", "micro-batch": 8, "comm-timeout": 20}
FLAGS = [f"--{k}={v}" for k, v in SMALL.items() if k not in ("device", "checkpoint-every", "val-every")]


def multi(folder: Path, data: Path | str = "nowhere", gpus: tuple[int, ...] = (1, 2), flags: list[str] | None = None) -> Multi:
    folder.mkdir(exist_ok=True)
    lab = promote.Lab(folder, say=lambda text: None)
    given = FLAGS if flags is None else flags
    return Multi(lab, str(data), "cpu", list(gpus), 3.65, given, folder / "ledger.jsonl", 0.01)


# --- arithmetic ----------------------------------------------------------------------------------------------


def test_efficiency_by_hand():
    # 100 tokens/s on one; 190 on two: 1.9 times, 95% of twice; 360 on four: 3.6 times, 90% of four times.
    found = efficiency([(1, 100.0), (2, 190.0), (4, 360.0)])
    assert [x for pair in found for x in pair] == pytest.approx([1, 1, 1.9, 0.95, 3.6, 0.9])
    # From two devices on: 600 on eight are three times 200 on two, where four times were due.
    assert [x for pair in efficiency([(2, 200.0), (8, 600.0)]) for x in pair] == pytest.approx([1, 1, 3, 0.75])


def test_points_of_the_real_recipes_by_hand(tmp_path: Path):
    """gpt2: 524,288 tokens are 64 rows of 1,024 on each of 8 devices; speedrun: 262,144 are 32 rows."""
    points = multi(tmp_path, gpus=(1, 2, 4, 8), flags=[]).points()
    batches = {name: int(argv[argv.index("--batch-tokens") + 1]) for name, (argv, _) in points.items()}
    assert batches == {
        **{f"gpt2-strong-{n}": 524_288 for n in (1, 2, 4, 8)},
        **{f"speedrun-strong-{n}": 262_144 for n in (1, 2, 4, 8)},
        "gpt2-weak-1": 65_536, "gpt2-weak-2": 131_072, "gpt2-weak-4": 262_144,
        "speedrun-weak-1": 32_768, "speedrun-weak-2": 65_536, "speedrun-weak-4": 131_072,
    }  # fmt: skip
    assert all(ranks == int(name.rsplit("-", 1)[1]) for name, (_, ranks) in points.items())
    micro = {name.split("-")[0]: argv[argv.index("--micro-batch") + 1] for name, (argv, _) in points.items()}
    assert micro == {"gpt2": "64", "speedrun": "32"}


def test_one_micro_batch_for_all_counts():
    """The short speedrun's 65,536 tokens are 64 rows: on 8 devices 8 each, and so on one device, 8 times in turn."""
    argv = ["speedrun", *bench_multi.CURVE.split()]
    assert bench_multi.same_micro_batch(argv, [1, 2, 4, 8])[-2:] == ["--micro-batch", "8"]
    assert bench_multi.same_micro_batch(argv, [1])[-2:] == ["--micro-batch", "64"]


def test_the_largest_difference_of_two_runs():
    a, b = ([{"step": s, "loss": v} for s, v in enumerate(values)] for values in ((5.0, 4.0, 3.5), (5.25, 4.0, 3.0)))
    assert compare(a, b, "loss") == 0.5
    for other in (b[:2], []):
        with pytest.raises(RuntimeError, match="other steps"):
            compare(a, other, "loss")
    with pytest.raises(RuntimeError, match="other steps"):
        compare([], [], "loss")


# --- items on played runs ------------------------------------------------------------------------------------


def played_profile(speeds: dict[str, float]) -> Any:
    """harness.profile in no time: step_ms of 2, and in the steady window what `speeds` says by folder."""

    def profile(recipe: str, flags: list[str], out: Path, gpus: int, steps: int, process: Any) -> dict[str, Any]:
        from train_gpt2 import parse_args

        name = out.name.removeprefix("scaling-")
        if name not in speeds:
            raise UserError("the profiled training ended with exit code 4")
        run = write_run(out / "run", steps=20)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            if row["kind"] == "train":  # steps 6 to 15 are timed without the profiler; one of them is an outlier
                row["step_ms"] = speeds[name] if 6 <= row["step"] <= 15 and row["step"] != 9 else 2000.0
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        cfg = parse_args([recipe, *flags])
        content = {
            "schema": 1, "config": {"batch_tokens": cfg.batch_tokens, "micro_batch": cfg.micro_batch}, "mfu": None,
            "exposed_communication_ms": {"min": 1.0, "max": 4.0}, "profiled_step_ms": 80.0, "peak_bytes": 2e9,
            "world_size": gpus,
        }  # fmt: skip
        (out / "profile.json").write_text(json.dumps(content))
        return content

    return profile


def test_scaling_from_profiles_by_hand(tmp_path: Path):
    """128 tokens: 100 ms on one are 1,280/s, 50 ms on two 2,560/s, 40 ms on four 3,200/s. Weak: 32 in 40 ms, 64 in 40 ms."""
    m = multi(tmp_path, gpus=(1, 2, 4))
    speeds = {f"speedrun-strong-{n}": ms for n, ms in ((1, 100.0), (2, 50.0), (4, 40.0))}
    speeds |= {"speedrun-weak-1": 40.0, "speedrun-weak-2": 40.0, "gpt2-strong-2": 10.0}
    m.lab.profile = played_profile(speeds)
    found = m.scaling()
    rows = {(r["recipe"], r["scaling"], r["devices"]): r for r in found["runs"]}
    assert len(rows) == len(found["runs"]) == 12, "the point on all devices counts for both"
    strong, weak = ([rows["speedrun", kind, n] for n in (1, 2, 4)] for kind in ("strong", "weak"))
    assert [r["tokens_per_s"] for r in strong] == pytest.approx([1280, 2560, 3200])
    assert [r["speed_up"] for r in strong] == pytest.approx([1, 2, 2.5])
    assert [r["efficiency"] for r in strong] == pytest.approx([1, 1, 0.625])
    assert [r["tokens_per_s"] for r in weak] == pytest.approx([800, 1600, 3200])
    assert [r["efficiency"] for r in weak] == pytest.approx([1, 1, 1])
    assert [r["batch_tokens"] for r in weak] == [32, 64, 128] and {r["micro_batch"] for r in rows.values() if "mfu" in r} == {2}
    assert strong[0]["exposed_ms"] == [1.0, 4.0] and strong[0]["exposed_share"] == pytest.approx(0.05)
    assert strong[0]["steps"] == 10
    # Four of gpt2's five points could not be measured: said, and the others stand.
    assert found["holds"] is False and found["shown"].startswith("6 of 10 points")
    assert [("error" in rows["gpt2", "strong", n]) for n in (1, 2, 4)] == [True, False, True]
    assert rows["gpt2", "strong", 2]["efficiency"] == 1, "against the first count that was measured"
    text = bench_multi.table({"scaling": found, "curve": {"error": "a|b"}}, {"gpus": ["X1"], "torch": "9", "nccl": None})
    assert "| speedrun | strong | 4 | 128 | 3,200 | 2.50 | 62.5% | 4.0 ms (5.0%) |" in text and "X1" in text
    assert "| curve | NO | FAILED: a/b |" in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("| gpt2")} == {9}
    # The same call again measures only what failed.
    m.lab.profile = played_profile({k: 1.0 for k in m.points()})
    again = {(r["recipe"], r["scaling"], r["devices"]): r for r in m.scaling()["runs"]}
    assert again["speedrun", "strong", 1] == strong[0] and again["gpt2", "strong", 1]["tokens_per_s"] == pytest.approx(128_000)


@pytest.mark.parametrize(("shift", "holds"), [(0.0, True), (0.0009, True), (0.0011, False)])
def test_curves_further_apart_than_the_tolerance_do_not_hold(tmp_path: Path, shift: float, holds: bool):
    m = multi(tmp_path)
    for name, ranks, moved in (("curve-1", 1, 0.0), ("curve-2", 2, shift), ("target-2", 2, 0.0)):
        write_run(tmp_path / name, shift=moved, world_size=ranks)
    m.target = 4.0
    found = m.curve()
    assert found["holds"] is holds
    assert found["train_difference"] == pytest.approx(shift, abs=1e-9) == found["val_difference"]
    # 3.3 + 7.5 exp(-s/40) is 4.3150 at step 80 (20 s) and 3.9156 at step 100 (25 s); the line between meets 4 at 23.944 s.
    assert found["seconds_to_target"] == pytest.approx(23.944, abs=1e-3)
    m.target = 1.0
    assert m.curve()["seconds_to_target"] is None and "not reached" in m.curve()["shown"]


def test_a_run_on_other_ranks_or_without_an_end_is_no_evidence(tmp_path: Path):
    m = multi(tmp_path)
    write_run(tmp_path / "one", world_size=1)
    with pytest.raises(RuntimeError, match="ran on 1 ranks instead of 2"):
        m.train("one", [], 2)
    write_run(tmp_path / "two", world_size=2, exit_reason="out_of_memory")
    with pytest.raises(RuntimeError, match="two ended with out_of_memory"):
        m.train("two", [], 2)
    assert not (tmp_path / "two").exists() and list(tmp_path.glob("two.out_of_memory-*")), "the next call trains it again"


def test_evaluations_are_compared_example_by_example(tmp_path: Path):
    paths = tmp_path / "one", tmp_path / "all"
    row = {"index": 0, "label": 1, "nll": [2.0, 1.0], "choice_acc": 1, "choice_acc_norm": 1}
    other = {**row, "index": 1}
    for second, holds, differ in ((other, True, 0), ({**other, "choice_acc_norm": 0}, False, 1), (None, False, 0)):
        for path, lines in zip(paths, ([row, other], [row, second] if second else [row])):
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = bench_multi.compare_hellaswag(*paths)
        assert (found["holds"], found["differ"], found["largest"]) == (holds, differ, 0)
    for value, holds in ((3.5, True), (3.5 + 1e-12, True), (3.5 + 1e-6, False)):
        for path, loss in zip(paths, (3.5, value)):
            path.write_text(json.dumps({"schema": 1, "nats_per_token": loss}))
        assert bench_multi.compare_val(*paths)["holds"] is holds


def test_items_are_independent_and_only_what_failed_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    data, folder, out = write_shards(tmp_path / "data"), tmp_path / "runs", tmp_path / "out.json"
    made: list[str] = []
    broken = {"scaling": RuntimeError("no route"), "fault": KeyError("a bug"), "evaluation": promote.OutOfTime("time is up")}

    def played(item: str) -> Any:
        def measure(self: Multi) -> dict[str, Any]:
            made.append(item)
            if made.count(item) == 1:
                written = json.loads(out.read_text()) if out.exists() else {}
                assert set(written) & set(bench_multi.ITEMS) == set(made) - {item}, "written after every item"
                if item in broken:
                    raise broken[item]
            return {"holds": item != "curve", "shown": f"{item} done"}

        return measure

    for item in bench_multi.ITEMS:
        monkeypatch.setattr(Multi, item, played(item))
    argv = ["bench-multi", "--data", str(data), "--device", "cpu", "--gpus", "1,2", "--folder", str(folder), "--out", str(out)]
    argv += ["--flags", " ".join(FLAGS)]
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(argv) == 3, "time was up"
        first = json.loads(out.read_text())
        assert first["scaling"] == {"error": "no route"} and first["evaluation"] == {"error": "not yet: time is up"}
        assert first["fault"]["error"] and first["settings"]["gpus"] == [1, 2]
        assert "| promotions | yes | promotions done |" in capsys.readouterr().out
        made += ["--"]
        assert main([*argv, "--only", "scaling,promotions,curve"]) == 1, "a curve that does not hold is no success"
        assert made[made.index("--") + 1 :] == ["scaling", "curve"], "what held is not measured again"
        assert main([*argv, "--only", "scaling,promotions,fault,evaluation"]) == 0
        done = json.loads(out.read_text())
        assert all(done[item]["holds"] for item in bench_multi.ITEMS if item != "curve")
        capsys.readouterr()
        assert main([*argv, "--gpus", "2"]) == 2
        assert "holds results of --gpus [1, 2]" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGTERM, before)


# --- what it starts ------------------------------------------------------------------------------------------


def test_the_environment_is_passed_on_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    show = [sys.executable, "-c", "import os; print({k: v for k, v in os.environ.items() if k.startswith('NCCL_')})"]
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert promote.quiet(tmp_path / "plain.log")(show) == 0
    assert (tmp_path / "plain.log").read_text() == "{'NCCL_DEBUG': 'WARN'}\n", "nothing is switched on"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert promote.quiet(tmp_path / "off.log")(show) == 0
    assert "'NCCL_NVLS_ENABLE': '0'" in (tmp_path / "off.log").read_text()


def test_what_is_interrupted_leaves_nothing_running(tmp_path: Path):
    def ring(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            promote.quiet(tmp_path / "log")(["bash", "-c", "sleep 60 & echo $!; wait"])
    finally:
        signal.signal(signal.SIGALRM, before)
    pid = int((tmp_path / "log").read_text())
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or ") Z " in state.read_text():
            return
        time.sleep(0.05)
    pytest.fail("the command's own child outlived it")


# Two ranks without torch: rank 0 makes a step each 20 ms and a checkpoint at step 5, rank 1 is there until it is killed.
RANK = """
import os, pathlib, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
rank, again = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
run.mkdir(exist_ok=True)
(run / f"pid-{rank}").write_text(str(os.getpid()))
if again and rank == 0:
    print(f"resumed from {run}/checkpoints/step-000005 at step 5", file=sys.stderr, flush=True)
for step in range(6 if again else 1, 81):
    time.sleep(0.02)
    if rank == 0:
        with open(run / "metrics.jsonl", "a") as f:
            print('{"kind": "train", "step": %d}' % step, file=f)
        if step == 5:
            (run / "checkpoints" / "step-000005").mkdir(parents=True)
    elif not again:
        time.sleep(20)
"""


def test_one_rank_is_killed_and_what_follows_is_timed(tmp_path: Path):
    """torchrun itself, with ranks that are a few lines of Python."""
    (tmp_path / "rank.py").write_text(RANK)
    run, log = tmp_path / "run", tmp_path / "log"
    job = promote.Process(["--run-dir", str(run)], 2, log, trainer=tmp_path / "rank.py", restarts=1)
    try:
        seen = bench_multi.kill_one(job, run, log, rank=1, patience=20)
    finally:
        job.kill()
    assert seen["newest_checkpoint"] == seen["resumed_at"] == 5 and 7 <= seen["killed_after_step"] < 80
    assert 0 < seen["detected_s"] == seen["torchrun_s"] < seen["resumed_s"] < seen["trained_s"] < 60
    assert "ranks_s" not in seen, "no rank said anything"
    ended = promote.Process(["--run-dir", str(run)], 1, log, trainer=Path(os.devnull))
    ended.wait()
    (run / "metrics.jsonl").unlink()
    with pytest.raises(RuntimeError, match="over before a rank could be killed"):
        bench_multi.kill_one(ended, run, log, rank=1, patience=20)


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--only", "curve,speed"], "--only speed: choose from scaling, curve"),
        (["--gpus", "1,x"], "--gpus 1,x: give counts such as 1,2,4,8"),
        (["--gpus", "1"], "one device shows nothing here"),
        (["--gpus", "0,2"], "counts of at least 1"),
        (["--gpus", "1,3"], "is not a multiple of 48"),  # micro-batch 1 x 16 tokens x 3 ranks
        (["--device", "cuda", "--gpus", "1,2"], "GPU"),
        (["--data", "/no/such/place"], "/no/such/place"),
        (["--flags", "--no-such-flag 1"], "--no-such-flag"),
        (["--flags", " ".join([*FLAGS, "--epochs=1"]), "--only", "curve"], "need 768 train tokens"),  # 6 x 128; there are 400
        (["--stop-after", "0"], "--stop-after must be above 0"),
        (["--minutes-each", "-1"], "--minutes-each must be above 0"),
        (["--gpus"], "expected one argument"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path, argv: list[str], said: str, capsys: Any, monkeypatch: Any):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    data, folder, out = write_shards(tmp_path / "data", (300, 100)), tmp_path / "runs", tmp_path / "out.json"
    given = ["--data", str(data), "--device", "cpu", "--gpus", "1,2", "--folder", str(folder), "--out", str(out)]
    assert main(["bench-multi", *given, "--flags", " ".join(FLAGS), *argv]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and said in message
    assert not folder.exists() and not out.exists()


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert bench_multi.choose_counts(None, "cuda") == [1, 2, 4]
    assert bench_multi.choose_counts("4,1", "cuda") == [1, 4]
    with pytest.raises(UserError, match="there are 4 GPUs here: ask for at most 4"):
        bench_multi.choose_counts("1,8", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="--device cpu rehearses"):
        bench_multi.choose_counts("1,2", "cuda")


# --- the whole of it -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_the_whole_command_on_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data, folder, out = write_shards(tmp_path / "data", (20_000, 3_000), (13_000,)), tmp_path / "runs", tmp_path / "out.json"
    # All of GPT-2's token ids, for HellaSwag.
    sizes = SMALL | {"vocab-size": 50257, "padded-vocab": 50304, "seq-len": 64, "batch-tokens": 512, "max-steps": 48}
    sizes |= {"val-tokens": 12_288, "val-batch": 64}  # three batches of an evaluation, which ranks share
    flags = " ".join(f"--{k}={v}" for k, v in sizes.items() if k not in ("device", "checkpoint-every", "val-every"))
    argv = ["bench-multi", "--data", str(data), "--device", "cpu", "--gpus", "1,2", "--folder", str(folder), "--out", str(out)]
    argv += ["--minutes-each", "0.05", "--hellaswag", "--limit 40", "--flags", flags, "--target", "6"]
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(argv) == 0, capsys.readouterr().out
    finally:
        signal.signal(signal.SIGTERM, before)
    text, found = capsys.readouterr().out, json.loads(out.read_text())
    assert all(found[item]["holds"] for item in bench_multi.ITEMS), text
    assert len(found["scaling"]["runs"]) == 8
    for r in found["scaling"]["runs"]:
        assert r["efficiency"] == 1 if r["devices"] == 1 else 0.05 < r["efficiency"] < 2, r
        assert (r["exposed_ms"][1] > 0) == (r["devices"] == 2), "one device has no one to wait for"
    assert found["curve"]["train_difference"] < 1e-4 and found["curve"]["seconds_to_target"] > 0
    assert len(found["curve"]["val_losses"]) >= 2
    assert [r["candidate"] for r in found["promotions"]["runs"]] == ["owner-over-ddp-2", "zero1-2", "fsdp2-2"]
    assert len((folder / "ledger.jsonl").read_text().splitlines()) == 3
    fault = found["fault"]
    assert fault["newest_checkpoint"] == 12 <= fault["resumed_at"] and fault["detected_s"] < 20
    assert fault["train_difference"] == fault["val_difference"] == 0
    assert found["evaluation"]["val"]["one"] == pytest.approx(found["evaluation"]["val"]["all"], rel=1e-12)
    assert found["evaluation"]["hellaswag"]["examples"] == 40 and found["evaluation"]["hellaswag"]["largest"] < 1e-9
    assert "| fault | yes | rank 1 of 2 killed" in text
