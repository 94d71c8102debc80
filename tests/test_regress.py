"""The regression check: verdicts, refusals, sequential looks, watch, warnings, throughput, real runs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import regress_faults
from regress_support import (
    BATCH,
    DEVIATION,
    EVERY,
    STEPS,
    harness,
    put,
    record,
    val_curve,
    write_run,
)
from scipy import stats as sp
from train_support import TINY, write_shards

from harness.baseline import load
from harness.regress import SAMPLE_FLAGS
from harness.stats import Verdict
from harness.suspect import pieces_of, shared
from harness.watch import Watcher, follow

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A baseline of ten seeds with a margin of 0.02, ten deviations."""
    return record(tmp_path_factory.mktemp("base"))


def runs_of(root: Path, seeds, **change) -> list[Path]:
    return [write_run(root / f"run-{seed}", seed, **change) for seed in seeds]


def ending(root: Path, folder: Path, offsets) -> list[Path]:
    """Runs whose final losses lie this far from the baseline's mean."""
    mean = load("base", folder)["mean"]
    return [write_run(root / str(i), 60 + i, val=[10.8, mean + d]) for i, d in enumerate(offsets)]


def check(folder: Path, runs, *options, name="base") -> int:
    return harness("regress", *runs, "--baseline", name, "--folder", folder, *options)


def verdict_of(run: Path, question="worse", name="base") -> dict:
    return json.loads((run / f"regress-{name}-{question}.json").read_text())


# --- verdicts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "question, shift, expected",
    [
        ("worse", 0.0, Verdict.PASS),
        ("worse", 0.1, Verdict.FAIL),
        ("worse", 0.02, Verdict.FAIL),  # on the margin: surely worse
        ("worse", 0.005, Verdict.PASS),  # worse, but by less than the margin
        ("same", 0.0, Verdict.PASS),
        ("same", 0.1, Verdict.FAIL),
        ("same", -0.03, Verdict.FAIL),
    ],
)
def test_verdict_and_exit_code(tmp_path, base, capsys, question, shift, expected):
    runs = runs_of(tmp_path, (50, 51, 52), shift=shift)
    assert check(base, runs, "--question", question) == expected
    found = verdict_of(runs[0], question)
    assert found["verdict"] == expected.name and found["exit_code"] == expected
    new, old = [val_curve(s, shift)[-1] for s in (50, 51, 52)], [val_curve(s)[-1] for s in range(10)]
    assert found["method"] == "pooled t" and found["df"] == 11
    assert found["estimate"] == pytest.approx(np.mean(new) - np.mean(old), abs=1e-12)
    assert found["p_fail"] == pytest.approx(
        sp.ttest_ind(new, old, alternative="greater").pvalue if question == "worse" else sp.ttest_ind(new, old).pvalue,
        rel=1e-9,
    )
    page = (runs[0] / f"regress-base-{question}.md").read_text()
    assert f"**{expected.name}**" in page and page in capsys.readouterr().out
    assert "data.fingerprint cccccccccccc…" in page


def test_too_little_evidence_is_inconclusive_and_says_how_many_seeds_would_do(tmp_path, base):
    runs = ending(tmp_path, base, (DEVIATION, -DEVIATION))  # on the baseline's mean
    assert check(base, runs, "--margin", "0.0025") == Verdict.INCONCLUSIVE
    found = verdict_of(runs[0])
    assert 5 < found["seeds_needed"] < 50
    assert f"about {found['seeds_needed'] - 2} more seeds" in found["reason"]
    assert check(base, runs, "--margin", "0.0005", "--out", tmp_path / "tight") == Verdict.INCONCLUSIVE
    tight = json.loads((tmp_path / "tight.json").read_text())
    assert tight["seeds_needed"] is None and "the baseline would need more" in tight["reason"]


def test_one_run_is_judged_by_the_baselines_deviation(tmp_path, base):
    (run,) = runs_of(tmp_path, (70,), shift=0.1)
    assert check(base, [run]) == Verdict.FAIL
    assert verdict_of(run)["df"] == 9


def test_shared_seeds_are_paired(tmp_path, base):
    """A shift too small for the unpaired test stands out when every seed is compared with itself."""
    runs = [write_run(tmp_path / str(s), s, val=[v + 0.001 + 1e-5 * s for v in val_curve(s)]) for s in range(3)]
    assert check(base, runs) == Verdict.PASS
    found = verdict_of(runs[0])
    assert found["method"] == "paired t" and found["df"] == 2
    assert found["estimate"] == pytest.approx(0.00101) and found["p_fail"] < 1e-4
    assert "though it is worse" in found["reason"]


def test_target_on_the_published_numbers(tmp_path):
    """Ten losses of 3.2787 +- 0.0013 reach 3.28 at p < 0.01; three of 3.2795 do not, but more would."""
    fineweb = {"data": {"dataset": "kjj0/fineweb10B-gpt2"}, "protocol": {"tokens": 10_485_760}}
    rng = np.random.default_rng(0)

    def losses(mean, n):
        x = rng.standard_normal(n)
        return mean + 0.0013 * (x - x.mean()) / x.std(ddof=1)

    for n, mean, expected in ((10, 3.2787, Verdict.PASS), (3, 3.2795, Verdict.INCONCLUSIVE)):
        values = losses(mean, n)
        runs = [write_run(tmp_path / f"{n}-{i}", i, val=[10.8, float(v)], **fineweb) for i, v in enumerate(values)]
        code = harness("regress", *runs, "--baseline", "speedrun-target-fineweb", "--question", "target")
        found = verdict_of(runs[0], "target", "speedrun-target-fineweb")
        assert code == expected
        assert found["p_pass"] == pytest.approx(sp.ttest_1samp(values, 3.28, alternative="less").pvalue, rel=1e-6)
        if n == 3:
            assert 60 <= found["seeds_needed"] <= 80 and "more seeds" in found["reason"]


def test_target_against_own_baseline_needs_the_number(tmp_path, base, capsys):
    runs = runs_of(tmp_path, (80, 81, 82))
    assert check(base, runs, "--question", "target") == 2
    assert "--target" in capsys.readouterr().err
    assert check(base, runs, "--question", "target", "--target", "5.5") == Verdict.PASS
    assert check(base, runs, "--question", "target", "--target", "4.5") == Verdict.FAIL
    assert check(base, runs[:1], "--question", "target", "--target", "5.5") == Verdict.INCONCLUSIVE


def test_a_diverged_run_fails_without_a_test(tmp_path, base):
    runs = runs_of(tmp_path, (90, 91))
    runs.append(write_run(tmp_path / "bad", 92, reason="non_finite"))
    assert check(base, runs) == Verdict.FAIL
    assert "bad (non_finite at step 60)" in verdict_of(runs[0])["reason"]


def test_exact_is_equality_to_the_last_bit_of_train_and_val(tmp_path, base, capsys):
    equal = runs_of(tmp_path, (0, 1))
    assert check(base, equal, "--question", "exact") == Verdict.PASS
    moved = val_curve(2)
    moved[3] = np.nextafter(moved[3], 9)
    (run,) = runs_of(tmp_path, (2,), val=moved)
    assert check(base, [run], "--question", "exact") == Verdict.FAIL
    assert "step 30" in verdict_of(run, "exact")["reason"]
    train = [row["loss"] for row in map(json.loads, (equal[0] / "metrics.jsonl").open()) if row["kind"] == "train"]
    train[34] = float(np.nextafter(train[34], 9))
    run = write_run(tmp_path / "other", 0, train=train)
    assert check(base, [run], "--question", "exact") == Verdict.FAIL
    reason = verdict_of(run, "exact")["reason"]
    assert "step 40" in reason and "a train loss up to there differs" in reason
    run = write_run(tmp_path / "stack", 0, env={"torch": "2.14"})
    capsys.readouterr()
    assert check(base, [run], "--question", "exact") == 2
    assert "torch: baseline '2.13.0+cpu', stack '2.14'" in capsys.readouterr().err
    assert check(base, runs_of(tmp_path, (40,)), "--question", "exact") == 2  # no such seed


# --- like with like ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, line",
    [
        ({"data": {"fingerprint": "e" * 64}}, "data.fingerprint: baseline 'ccc"),
        ({"protocol": {"data": "e" * 64}}, "val_protocol.data: baseline 'bbb"),
        ({"protocol": {"tokens": 4096}}, "val_protocol.tokens: baseline 2048, run-1 4096"),
        ({"protocol": {"seq_len": 256}}, "val_protocol.seq_len: baseline 128, run-1 256"),
        ({"protocol": {"document_mask": True}}, "val_protocol.document_mask: baseline False, run-1 True"),
        ({"protocol": {"dtype": "bf16"}}, "val_protocol.dtype: baseline 'fp32', run-1 'bf16'"),
        ({"recipe": "speedrun"}, "recipe: baseline 'sample', run-1 'speedrun'"),
        ({"config": {"batch_tokens": 2000}}, "train_tokens: baseline 60000, run-1 120000"),
    ],
)
def test_unlike_runs_are_refused_with_the_line_that_differs(tmp_path, base, capsys, change, line):
    run = write_run(tmp_path / "run-1", 1, **change)
    before = sorted(tmp_path.rglob("*"))
    for question in ("worse", "same", "exact"):
        assert check(base, [run], "--question", question) == 2
        err = capsys.readouterr().err
        assert line in err and err.startswith("error: ") and err.count("\n") == 1
    assert harness("regress", "--watch", run, "--baseline", "base", "--folder", base) == 2
    assert line in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_every_differing_line_is_named(tmp_path, base, capsys):
    run = write_run(tmp_path / "run-1", 1, recipe="gpt2", protocol={"dtype": "bf16", "tokens": 1})
    assert check(base, [run]) == 2
    err = capsys.readouterr().err
    assert all(key in err for key in ("recipe", "val_protocol.dtype", "val_protocol.tokens"))


def test_published_numbers_are_keyed_by_data_set_scoring_and_val_tokens(tmp_path, capsys):
    def ask(run, name, question="target"):
        code = harness("regress", run, "--baseline", name, "--question", question)
        return code, capsys.readouterr().err

    edu = write_run(tmp_path / "edu", 1, data={"dataset": "kjj0/finewebedu10B-gpt2"})
    code, err = ask(edu, "openai-gpt2-124m-fineweb")
    assert code == 2 and "baseline 'kjj0/fineweb10B-gpt2', edu 'kjj0/finewebedu10B-gpt2'" in err
    code, err = ask(edu, "openai-gpt2-124m-fineweb-edu")
    assert code == Verdict.INCONCLUSIVE
    unknown = write_run(tmp_path / "unknown", 1, data={"dataset": None})
    code, err = ask(unknown, "speedrun-target-fineweb")
    assert code == 2 and "unknown (no manifest" in err
    few = write_run(tmp_path / "few", 1, data={"dataset": "kjj0/fineweb10B-gpt2"})
    code, err = ask(few, "speedrun-target-fineweb")
    assert code == 2 and "val_protocol.tokens: baseline 10485760, few 2048" in err
    code, err = ask(few, "speedrun-target-fineweb", "worse")
    assert code == 2

    put(few / "hellaswag-llmc.json", {"acc_norm": 0.31, "subset": False, "examples": 10042})
    code, err = ask(few, "openai-gpt2-124m-hellaswag-lm-eval")
    assert code == 2 and "no HellaSwag under lm-eval scoring (it has: llmc)" in err
    code, err = ask(few, "openai-gpt2-124m-hellaswag-llmc")
    assert code == Verdict.INCONCLUSIVE  # one run
    put(few / "hellaswag-llmc.json", {"acc_norm": 0.31, "subset": True, "examples": 100})
    code, err = ask(few, "openai-gpt2-124m-hellaswag-llmc")
    assert code == 2 and "a subset" in err


def test_accuracy_is_better_when_higher(tmp_path):
    runs = []
    for i, value in enumerate((0.300, 0.302, 0.301)):
        runs.append(write_run(tmp_path / str(i), i))
        put(runs[-1] / "hellaswag-llmc.json", {"acc_norm": value, "subset": False, "examples": 10042})
    name = "openai-gpt2-124m-hellaswag-llmc"
    assert harness("regress", *runs, "--baseline", name, "--question", "target") == Verdict.PASS
    found = verdict_of(runs[0], "target", name)
    assert found["estimate"] == pytest.approx(0.301 - 0.2955) and "at least" in found["reason"]
    assert found["interval"][0] < found["estimate"] < found["interval"][1]


# --- looking early -----------------------------------------------------------------------------------------


def test_looks_are_declared_and_kept(tmp_path, base, capsys):
    runs = runs_of(tmp_path, range(50, 56), shift=0.004)
    options = ("--margin", "0.006", "--looks", "2,4,6")
    assert check(base, runs[:1], *options) == Verdict.INCONCLUSIVE
    assert "first look is at 2 seeds" in verdict_of(runs[0])["reason"]
    check(base, runs[:3], *options)
    found = verdict_of(runs[0])
    assert found["seeds_used"] == 2 and found["alpha_spent"] == pytest.approx(0.05 / 3)
    capsys.readouterr()
    assert check(base, runs[:3], "--margin", "0.006", "--looks", "3,4,6") == 2
    assert "declared with --looks 2,4,6" in capsys.readouterr().err
    assert check(base, runs[:3], "--margin", "0.006") == 2  # nor without a plan


def test_an_unplanned_second_look_is_said(tmp_path, base, capsys):
    runs = ending(tmp_path, base, (DEVIATION, -DEVIATION, 0.0))
    assert check(base, runs[:2], "--margin", "0.001") == Verdict.INCONCLUSIVE
    check(base, runs, "--margin", "0.001")
    assert "more than alpha" in verdict_of(runs[0])["notes"][0]
    assert "> Note:" in capsys.readouterr().out


# --- watching ----------------------------------------------------------------------------------------------


def append_val(run: Path, index: int, loss: float) -> None:
    step = index * EVERY
    row = {"kind": "val", "step": step, "tokens": step * BATCH, "val_loss": loss}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_watch_follows_a_growing_run_and_stops_it_early(tmp_path, base):
    good = [float(loss) for loss in np.mean([val_curve(seed) for seed in range(10)], axis=0)]
    run = write_run(tmp_path / "live", 77, val=good[:2], train=[5.0] * 10, finished=False)
    # A run that still goes has no result: what it will say is worked out from its config and data.
    said: list[str] = []
    points = iter([(2, good[2]), (3, good[3] + 1), (4, good[4] + 1), (5, good[5] + 1)])
    watcher = Watcher(run, load("base", base))
    verdict = follow(watcher, said.append, sleep=lambda _: append_val(run, *next(points)))
    assert verdict == Verdict.FAIL
    assert "step 40" in said[-1] and "worse than" in said[-1]  # the second validation outside, not the first
    assert "9.1%" in said[0] and "1/(n+1)" in said[0]


def test_watch_ends_with_the_run(tmp_path, base, capsys):
    good = write_run(tmp_path / "good", 78)
    assert harness("regress", "--watch", good, "--baseline", "base", "--folder", base) == Verdict.PASS
    assert "inside the band" in capsys.readouterr().out
    fine = [*val_curve(79)[:3], val_curve(79)[3] - 1, val_curve(79)[4] - 1]
    leak = write_run(tmp_path / "leak", 79, val=fine, finished=False)
    assert harness("regress", "--watch", leak, "--baseline", "base", "--folder", base) == Verdict.FAIL
    assert "better than can be expected" in capsys.readouterr().out
    stopped = write_run(tmp_path / "stopped", 80, val=val_curve(80)[:4], reason="stopped")
    put(stopped / "result.json", json.loads((stopped / "result.json").read_text()) | {"val_loss": 5.0})
    assert harness("regress", "--watch", stopped, "--baseline", "base", "--folder", base) == Verdict.INCONCLUSIVE
    bad = write_run(tmp_path / "bad", 81, val=val_curve(81)[:3], reason="non_finite")
    assert harness("regress", "--watch", bad, "--baseline", "base", "--folder", base) == Verdict.FAIL


def test_watch_gives_up_on_a_silent_run(tmp_path, base):
    run = write_run(tmp_path / "silent", 82, val=val_curve(82)[:2], finished=False)
    now = iter(range(0, 10_000, 100))
    said: list[str] = []
    verdict = follow(Watcher(run, load("base", base)), said.append, clock=lambda: float(next(now)), sleep=lambda _: None)
    assert verdict == Verdict.INCONCLUSIVE and "1800 s" in said[-1]


def test_watch_refuses_another_validation_grid(tmp_path, base, capsys):
    run = write_run(tmp_path / "grid", 83, finished=False)
    rows = [row for row in map(json.loads, (run / "metrics.jsonl").open()) if row["step"] != 20]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert harness("regress", "--watch", run, "--baseline", "base", "--folder", base) == 2
    assert "--val-every" in capsys.readouterr().err


# --- too good to be true -----------------------------------------------------------------------------------


def test_a_loss_far_below_is_suspected_and_still_judged(tmp_path, base, capsys):
    runs = runs_of(tmp_path, (50, 51, 52), shift=-1.0)
    assert check(base, runs) == Verdict.PASS
    found = verdict_of(runs[0])["suspicions"]
    assert len(found) == 3 and "sees ahead" in found[0]
    assert "> **Too good to be true?**" in capsys.readouterr().out
    honest = runs_of(tmp_path / "honest", (53, 54), shift=-3 * DEVIATION)
    check(base, honest)
    assert verdict_of(honest[0])["suspicions"] == []


def test_a_drop_at_an_epoch_boundary_is_suspected(tmp_path, base):
    rng = np.random.default_rng(5)
    train = 5.3 - 0.002 * np.arange(STEPS) + rng.normal(0, 0.02, STEPS)
    dropped = train - 0.3 * (np.arange(1, STEPS + 1) >= 40)
    for name, losses, epoch, expected in (
        ("drop", dropped, 40, 1),
        ("elsewhere", dropped, 25, 0),
        ("steady", train, 40, 0),
    ):
        run = write_run(tmp_path / name, 50, train=list(losses), epoch_at=epoch)
        check(base, [run])
        found = verdict_of(run)["suspicions"]
        assert len(found) == expected, name
        assert not expected or "step 40, where epoch 1 begins" in found[0]


def test_a_drop_at_a_shard_boundary_is_suspected(tmp_path, base):
    """The second shard begins within step 31: step 32 is the first that is wholly of it."""
    shards = [{"file": "x_val_000000.bin", "tokens": 5}]
    shards += [{"file": f"x_train_{i:06d}.bin", "tokens": 30_500} for i in range(2)]
    (tmp_path / "data").mkdir()
    put(tmp_path / "data" / "manifest.json", {"dataset": "a-text", "fingerprint": "c" * 64, "shards": shards})
    rng = np.random.default_rng(6)
    train = 5.3 + rng.normal(0, 0.02, STEPS) - 0.3 * (np.arange(1, STEPS + 1) >= 32)
    run = write_run(tmp_path / "run", 50, train=list(train), data={"dir": str(tmp_path / "data")})
    check(base, [run])
    (found,) = verdict_of(run)["suspicions"]
    assert "step 32, where a shard begins" in found


def test_validation_tokens_in_train_are_found(tmp_path, base):
    rng = np.random.default_rng(7)
    for name, copied in (("leak", True), ("clean", False)):
        folder = tmp_path / name
        write_shards(folder, train=(40_000,), val=(5000,))
        train = rng.integers(0, 50_000, 40_000).astype("<u2")
        val = train[3001:8001] if copied else rng.integers(0, 50_000, 5000).astype("<u2")
        for path, tokens in (("tiny_train_000000.bin", train), ("tiny_val_000000.bin", val)):
            raw = bytearray((folder / path).read_bytes())
            raw[1024:] = tokens.tobytes()
            (folder / path).write_bytes(raw)
        run = write_run(tmp_path / f"run-{name}", 50, data={"dir": str(folder)})
        check(base, [run])
        found = verdict_of(run)["suspicions"]
        assert len(found) == copied
        assert not copied or "100% of 256 stretches" in found[0]


def test_stretches_are_found_at_any_offset_and_across_pieces():
    rng = np.random.default_rng(8)
    train = rng.integers(0, 50_000, 4000).astype(np.uint16)
    probes = [train[i : i + 64] for i in (0, 1, 2, 3, 990, 3936)]
    probes += [
        np.append(train[10:73], np.uint16(train[73] + 1)),
        rng.integers(0, 50_000, 64).astype(np.uint16),
    ]
    pieces = [train[start : start + size] for start, size in pieces_of(4000, 1000)]
    assert shared(probes, iter(pieces)) == 6 / 8  # not the one that differs in its last token


# --- throughput --------------------------------------------------------------------------------------------


def test_throughput_is_checked_apart_and_only_on_the_same_hardware(tmp_path, base, capsys):
    slow = runs_of(tmp_path, (50, 51, 52), speed=4000.0)
    assert check(base, slow) == Verdict.PASS  # the loss is fine
    found = verdict_of(slow[0])["throughput"]
    assert found["verdict"] == "FAIL" and found["ratio"] == pytest.approx(0.8, abs=0.01)
    assert found["interval"][0] < found["ratio"] < found["interval"][1] < 0.82
    assert check(base, slow, "--throughput-margin", "0.05") == Verdict.FAIL
    same = runs_of(tmp_path / "same", (53, 54, 55))
    assert check(base, same, "--throughput-margin", "0.05") == Verdict.PASS
    other = runs_of(tmp_path / "other", (56, 57), env={"cpu": "Faster CPU"})
    assert check(base, other) == Verdict.PASS
    assert verdict_of(other[0])["throughput"]["compared"] is False
    capsys.readouterr()
    assert check(base, other, "--throughput-margin", "0.05") == 2
    assert "Faster CPU" in capsys.readouterr().err


def test_changes_are_listed_in_the_statement(tmp_path, base, capsys):
    run = write_run(tmp_path / "run", 50, config={"muon_lr": 0.018}, env={"train_gpt2_sha256": "9" * 64})
    check(base, [run])
    assert "muon_lr: 0.03 -> 0.018; train_gpt2.py: another version" in capsys.readouterr().out


# --- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--baseline", "no-such"),
        ("--baseline", "base", "nowhere"),
        ("--baseline", "base", "RUN", "--margin", "0"),
        ("--baseline", "base", "RUN", "--margin", "nan"),
        ("--baseline", "base", "RUN", "--alpha", "1"),
        ("--baseline", "base", "RUN", "--looks", "3,2"),
        ("--baseline", "base", "RUN", "--looks", "two"),
        ("--baseline", "base", "RUN", "--target", "3"),
        ("--baseline", "base", "RUN", "--question", "exact", "--margin", "0.1"),
        ("--baseline", "base", "RUN", "--question", "exact", "--looks", "2,3"),
        ("--baseline", "base", "RUN", "--watch", "RUN"),
        ("--baseline", "base", "--watch", "RUN", "--question", "same"),
        ("--baseline", "base", "RUN", "RUN"),
        ("--baseline", "base", "--watch", "nowhere"),
        ("--baseline", "base", "STOPPED"),
        ("--baseline", "nomargin", "RUN"),
    ],
)
def test_bad_input_is_one_line_exit_code_2_and_nothing_written(tmp_path, capsys, options):
    folder = record(tmp_path, n=3)
    record(tmp_path, n=3, name="nomargin", margin=None)
    names = {
        "RUN": write_run(tmp_path / "run", 50),
        "STOPPED": write_run(tmp_path / "s", 51, reason="stopped"),
    }
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert harness("regress", "--folder", folder, *(names.get(o, o) for o in options)) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and out == ""
    assert sorted(tmp_path.rglob("*")) == before


# --- real runs ---------------------------------------------------------------------------------------------


def tiny(run_dir: Path, data: Path, seed: int, **flags: object) -> list[str]:
    """The command line of a tiny real training."""
    options = {
        **TINY,
        "max-steps": 20,
        "val-every": 4,
        "seed": seed,
        "data": data,
        "run-dir": run_dir,
        **flags,
    }
    return ["sample", *(item for name, value in options.items() for item in (f"--{name}", str(value)))]


def train(*command_lines: list[str]) -> subprocess.Popen[bytes]:
    """Real trainings one after another, in one other process (torch takes seconds to import)."""
    code = "import sys, json, train_gpt2; sys.exit(max(map(train_gpt2.main, json.loads(sys.argv[1]))))"
    return subprocess.Popen([sys.executable, "-c", code, json.dumps(command_lines)], cwd=ROOT)


def test_real_runs_through_record_regress_exact_and_watch(tmp_path, capsys):
    data = write_shards(tmp_path / "data", train=(2000, 37, 700), val=(90, 60))
    runs = [tmp_path / f"base-{seed}" for seed in range(3)]
    lines = [tiny(run, data, seed) for seed, run in enumerate(runs)]
    assert train(*lines, tiny(tmp_path / "again", data, 1)).wait() == 0
    folder = tmp_path / "baselines"
    assert harness("baseline", "--folder", folder, "record", "tiny", *runs, "--margin", "0.5") == 0
    assert check(folder, [tmp_path / "again"], "--question", "exact", name="tiny") == Verdict.PASS
    # Watched while it trains: a learning rate of nearly nothing leaves the band of three seeds.
    slow = {"muon-lr": 1e-5, "embed-lr": 1e-5, "head-lr": 1e-5}
    process = train(tiny(tmp_path / "broken", data, 9, **slow))
    while not (tmp_path / "broken" / "env.json").exists():
        time.sleep(0.05)
        assert process.poll() in (None, 0)
    options = ("--baseline", "tiny", "--folder", folder, "--poll", "0.1")
    assert harness("regress", "--watch", tmp_path / "broken", *options) == Verdict.FAIL
    assert process.wait() == 0
    assert "ALARM at step" in capsys.readouterr().out
    assert check(folder, [tmp_path / "broken"], name="tiny") == Verdict.FAIL


# --- injected faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", regress_faults.FAULTS)
def test_every_fault_still_goes_into_the_trainer(name):
    """The kept runs were made by these patches: each still applies, and changes what it says."""
    import train_gpt2

    fault = regress_faults.FAULTS[name]
    source = (ROOT / "train_gpt2.py").read_text()
    clean = train_gpt2.parse_args(["sample", *SAMPLE_FLAGS])
    faulty = train_gpt2.parse_args(["sample", *SAMPLE_FLAGS, *fault.flags])
    patched = regress_faults.patched_source(fault, source)
    compile(patched, name, "exec")
    assert (faulty != clean) + (patched != source) + fault.val_is_train == 1  # one fault, and only one


def test_faults_and_fresh_seeds_as_the_page_says():
    """Every fault has its row, made of kept runs; no check raised more false alarms than chance allows."""
    kept = regress_faults.read_kept()
    faulty = {run["fault"] for run in kept["runs"].values()} - {None}
    assert faulty == set(regress_faults.FAULTS) and len(kept["runs"]) >= 3 * len(faulty)
    page = regress_faults.PAGE.read_text()
    section = page.split("<!-- faults -->")[1].split("<!-- /faults -->")[0]
    for fault in regress_faults.FAULTS.values():
        assert f"| {fault.what} |" in section
    table = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    rows = [row for row in table if row[3].strip().endswith("%")]  # the stated rate
    for what, alarms, of, rate, _bound in rows:
        bound = sp.binom.ppf(0.98, int(of), float(rate.strip(" %")) / 100)
        assert int(alarms) <= bound, what
    assert len(rows) >= 3


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_fault_table_follows_from_the_kept_runs():
    assert regress_faults.table(regress_faults.read_kept()) in regress_faults.PAGE.read_text()


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_make_regress(tmp_path):
    """Three seeds trained here on the short schedule are judged against the committed baseline, and pass."""
    began = time.monotonic()
    command = [sys.executable, "-m", "harness", "regress", "--run-sample"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == Verdict.PASS, done.stdout.decode()[-2000:] + done.stderr.decode()[-2000:]
    print(f"{time.monotonic() - began:.0f} s")
