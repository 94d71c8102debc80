"""Promotions: each gate on run directories with a planted defect, the ledger, a real kill, and one whole decision."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness_support import write_run
from train_support import TINY
from trainer_jobs import CONTEXT

from harness import gates, ledger, promote
from harness.__main__ import main
from harness.common import UserError

PROFILE = {
    "limits": {"compute": 0.6, "memory": 0.25, "communication": 0.0, "data": 0.0, "launch": 0.15, "capacity": 0.14},
    "parts_ms": {"forward": 1.0, "backward": 2.0},
    "sentence": "arithmetic binds: matrix products and attention fill 60% of the step",
}
GB = 10**9

# --- run directories ---------------------------------------------------------------------------------------


def arm(
    root: Path,
    name: str,
    seeds: Sequence[int] = (1,),
    speed: Callable[[int], float] = lambda step: 1.0,
    steps: int = 200,
    shift: Callable[[int], float] = lambda seed: 0.0,
    **result: Any,
) -> list[Path]:
    """One run per seed; `speed` and `shift` are factors by step and nats by seed."""
    runs = []
    for seed in seeds:
        run = write_run(root / f"{name}-{seed}", steps=steps, seed=seed, shift=shift(seed), peak_mem_bytes=20 * GB, **result)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            if row["kind"] == "train":
                row["tokens_per_s"] *= speed(row["step"])
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs.append(run)
    return runs


def recovery(root: Path, off: float = 0.0, **record: Any) -> dict[str, Any]:
    """A twin and a run that was killed after step 31 and went on from 25; `off` nats apart after that."""
    twin, broken = write_run(root / "twin", steps=40), write_run(root / "broken", steps=40)
    rows = [json.loads(line) for line in (broken / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["kind"] == "train" and row["step"] > 27:
            row["loss"] += off
    (broken / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"twin": str(twin), "broken": str(broken), "killed_after_step": 31, "resumed_at": 25, **record}


def evidence(root: Path, candidate: list[Path] | None = None, **changes: Any) -> gates.Evidence:
    """A candidate a fifth faster that passes all gates, with changes."""
    control = changes.pop("control", None) or arm(root, "control")
    values: dict[str, Any] = {
        "objective": "throughput",
        "addresses": ("compute",),
        "tolerance": 0.01,
        "profile": PROFILE,
        "recovery": recovery(root) if "recovery" not in changes else None,
        "memory_limit": 100 * GB,
    }
    return gates.Evidence(
        control=control, candidate=candidate or arm(root, "candidate", speed=lambda s: 1.2), **(values | changes)
    )


def first_failure(e: gates.Evidence) -> int:
    """The number of the gate that decides; 0: accepted."""
    outcome = gates.evaluate(e)
    assert [gate.number for gate in outcome] == [1, 2, 3, 4, 5]
    assert all(gate.evidence for gate in outcome), "every gate says why"
    word, reason = gates.verdict(outcome)
    failed = [gate.number for gate in outcome if gate.status == "fail"]
    assert word == ("rejected" if failed else "accepted")
    assert not failed or reason.startswith(f"gate {failed[0]} ")
    return failed[0] if failed else 0


def gate(e: gates.Evidence, number: int) -> gates.Gate:
    return next(g for g in gates.evaluate(e) if g.number == number)


# --- planted defects fail at the right gate ----------------------------------------------------------------


def test_a_faster_candidate_is_accepted(tmp_path: Path):
    e = evidence(tmp_path)
    assert first_failure(e) == 0
    ratio, low, high = gate(e, 3).data["ratio"]
    assert low <= ratio <= high and ratio == pytest.approx(1.2, abs=0.02) and low > 1


def test_a_slower_one_fails_at_the_objective(tmp_path: Path):
    e = evidence(tmp_path, arm(tmp_path, "candidate", speed=lambda s: 0.95))
    assert first_failure(e) == 3 and "slower" in gate(e, 3).evidence


@pytest.mark.parametrize("steps", [75, 200])
def test_one_that_is_faster_in_its_first_50_steps_only_fails_at_the_objective(tmp_path: Path, steps: int):
    control = arm(tmp_path, "control", steps=steps)
    candidate = arm(tmp_path, "candidate", steps=steps, speed=lambda s: 1.3 if s <= 50 else 1.0)
    e = evidence(tmp_path, candidate, control=control)
    assert first_failure(e) == 3 and "does not last" in gate(e, 3).evidence


def test_a_machine_that_slows_down_under_both_arms_is_not_the_candidates_fault(tmp_path: Path):
    hot = lambda s: 1 - 0.001 * s / 2  # noqa: E731
    candidate = arm(tmp_path, "candidate", speed=lambda s: 1.2 * hot(s))
    assert first_failure(evidence(tmp_path, candidate, control=arm(tmp_path, "control", speed=hot))) == 0


def test_a_candidate_that_heats_the_device_is_judged_on_its_last_third(tmp_path: Path):
    """1.2 times as fast at first, 1.17 at the end; a twentieth less than at first is more than heat."""
    for fall, expected in ((0.03, 0), (0.12, 3)):
        candidate = arm(tmp_path, f"c{fall}", speed=lambda s, f=fall: 1.2 * (1 - f * min(s, 120) / 120))
        shutil.rmtree(tmp_path / "twin", ignore_errors=True)
        shutil.rmtree(tmp_path / "broken", ignore_errors=True)
        e = evidence(tmp_path, candidate, control=arm(tmp_path, f"control{fall}"))
        assert first_failure(e) == expected
        assert "in the last third" in gate(e, 3).evidence
        assert gate(e, 3).data["ratio"][0] == pytest.approx(1.2 * (1 - fall), abs=0.02)


@pytest.mark.parametrize("seeds", [(1,), (1, 2), (1, 2, 3, 4)])
def test_a_loss_shifted_by_two_hundredths_fails_at_the_loss(tmp_path: Path, seeds: Sequence[int]):
    noise = {1: 0.001, 2: -0.0012, 3: 0.0004, 4: -0.0007}
    control = arm(tmp_path, "control", seeds)
    for shift, expected in ((0.0, 0), (0.02, 2), (-0.02, 0)):  # better is as good as equal
        candidate = arm(tmp_path, f"c{shift}", seeds, speed=lambda s: 1.2, shift=lambda seed, x=shift: x + noise[seed])
        e = evidence(tmp_path, candidate, control=control, recovery=None) if expected else None
        if e is None:
            shutil.rmtree(tmp_path / "twin", ignore_errors=True)
            shutil.rmtree(tmp_path / "broken", ignore_errors=True)
            e = evidence(tmp_path, candidate, control=control)
        assert first_failure(e) == expected, gate(e, 2).evidence
        if len(seeds) > 2:
            assert "seeds" in gate(e, 2).evidence and gate(e, 2).data["verdict"] == ("FAIL" if expected else "PASS")


def test_what_is_not_shown_does_not_pass(tmp_path: Path):
    """Neither a loss difference that two noisy seeds leave open, nor a speed that differs more by launch than by arm."""
    noisy = arm(tmp_path, "noisy", (1, 2), speed=lambda s: 1.2, shift=lambda seed: {1: 0.012, 2: -0.02}[seed])
    e = evidence(tmp_path, noisy, control=arm(tmp_path, "control", (1, 2)))
    assert first_failure(e) == 2 and "not shown" in gate(e, 2).evidence and gate(e, 2).data["verdict"] == "INCONCLUSIVE"
    two = [*arm(tmp_path, "fast", speed=lambda s: 1.05), *arm(tmp_path, "slow", speed=lambda s: 0.97)]
    e = evidence(tmp_path / "speed", two)
    assert first_failure(e) == 3 and "no faster" in gate(e, 3).evidence
    ratio, low, high = gate(e, 3).data["ratio"]
    assert low < 1 < ratio < high


def test_losses_declared_bit_equal_must_be(tmp_path: Path):
    same = arm(tmp_path, "same", speed=lambda s: 1.2)
    assert first_failure(evidence(tmp_path, same, tolerance=0.0)) == 0
    rows = [json.loads(line) for line in (same[0] / "metrics.jsonl").read_text().splitlines()]
    rows[-3]["loss"] = rows[-3].get("loss", 0.0) + 1e-15 * 4
    (same[0] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    e = evidence(tmp_path / "again", same, tolerance=0.0)
    assert first_failure(e) == 2 and f"step {rows[-3]['step']}" in gate(e, 2).evidence


def test_small_losses_must_not_add_up(tmp_path: Path):
    e = evidence(tmp_path, origin=3.3)  # the final loss of these runs is about 3.35
    assert first_failure(e) == 2 and "added up" in gate(e, 2).evidence
    e.origin = 3.35
    assert first_failure(e) == 0


def test_other_data_is_not_compared(tmp_path: Path):
    other = arm(tmp_path, "other", speed=lambda s: 1.2, data={"dir": "x", "fingerprint": "0" * 16, "dataset": "other"})
    e = evidence(tmp_path, other)
    assert first_failure(e) == 2 and "not like with like" in gate(e, 2).evidence


def test_a_run_that_diverged_fails_at_the_loss(tmp_path: Path):
    bad = arm(tmp_path, "bad", speed=lambda s: 1.2, exit_reason="non_finite", exit_code=3, val_loss=None)
    assert first_failure(evidence(tmp_path, bad)) == 2


@pytest.mark.parametrize(("off", "expected"), [(0.0, 0), (0.003, 4)])
def test_losses_that_differ_after_the_resume_fail_at_the_recovery(tmp_path: Path, off: float, expected: int):
    e = evidence(tmp_path, recovery=recovery(tmp_path, off))
    assert first_failure(e) == expected
    assert ("step 28" in gate(e, 4).evidence) == bool(off), "the first step that is not the twin's"


@pytest.mark.parametrize("record", [{"resumed_at": 0}, {"resumed_at": 32}, {"problem": "the resume ended with 1"}])
def test_a_resume_from_nowhere_fails_at_the_recovery(tmp_path: Path, record: dict[str, Any]):
    assert first_failure(evidence(tmp_path, recovery=recovery(tmp_path, **record))) == 4


def test_memory_over_the_limit_fails_at_the_memory(tmp_path: Path):
    e = evidence(tmp_path, memory_limit=21 * GB)  # a peak of 20 leaves 5%
    assert first_failure(e) == 5 and "5% free" in gate(e, 5).evidence
    e.memory_limit = 23 * GB
    assert first_failure(e) == 0
    e.memory_limit = None
    assert first_failure(e) == 5, "an unknown size is not a pass"


def test_sharding_what_fits_is_rejected_with_the_profiles_reason(tmp_path: Path):
    e = evidence(tmp_path, addresses=("capacity",), recovery=None)
    assert first_failure(e) == 1
    assert "14% of the device's memory" in gate(e, 1).evidence and PROFILE["sentence"] in gate(e, 1).evidence
    assert gate(e, 4).status == "skipped", "nothing is killed for what is decided"
    full = {**PROFILE, "limits": {**PROFILE["limits"], "capacity": 0.93}}
    assert gate(evidence(tmp_path / "full", addresses=("capacity",), profile=full), 1).status == "pass"


def test_a_limit_that_holds_nothing_is_not_worth_a_candidate(tmp_path: Path):
    assert first_failure(evidence(tmp_path, addresses=("communication",))) == 1
    assert first_failure(evidence(tmp_path / "none", profile=None)) == 1


def test_without_a_killed_run_nothing_is_accepted(tmp_path: Path):
    assert first_failure(evidence(tmp_path, recovery=None)) == 4


@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
@pytest.mark.parametrize(("shift", "expected"), [(-0.3, 0), (0.001, 3), (-0.002, 3)])
def test_seconds_to_a_loss(tmp_path: Path, shift: float, expected: int, seeds: Sequence[int]):
    noise = {1: 0.0, 2: 0.003, 3: -0.003}
    candidate = arm(tmp_path, "candidate", seeds, shift=lambda seed: shift + noise[seed])
    e = evidence(tmp_path, candidate, control=arm(tmp_path, "control", seeds), objective="time_to_loss")
    assert first_failure(e) == expected, gate(e, 3).evidence
    if not expected:
        # 3.3 + 7.5 exp(-5 s / 200) - 0.3 = 3.3 + 7.5 exp(-5) at s = 200 / 5 * ln(7.5 / (0.3 + 7.5 exp(-5))), 0.25 s a step
        assert gate(e, 3).data["seconds"][0][1] == pytest.approx(0.25 * 122.4, rel=0.02)


def test_fitting_needs_the_controls_out_of_memory(tmp_path: Path):
    short = arm(tmp_path, "short", exit_reason="out_of_memory", exit_code=4, val_loss=None)
    assert first_failure(evidence(tmp_path, control=short, objective="fit", profile=None)) == 0
    (short[0] / "config.json").unlink()  # it ended in the warm-up, before anything else was written
    assert first_failure(evidence(tmp_path / "bare", control=short, objective="fit", profile=None)) == 0
    assert first_failure(evidence(tmp_path / "fits", objective="fit")) == 1


# --- the ledger --------------------------------------------------------------------------------------------


def decision(name: str, verdict: str = "accepted", loss: float = 3.3, ranks: int = 1) -> dict[str, Any]:
    arm_ = {"tokens_per_s": 5e5, "val_loss": loss, "peak_bytes": 20 * GB, "step_ms": 1.0}
    return {
        "kind": "decision", "date": "2026-12-01T00:00:00+00:00", "candidate": name, "recipe": "speedrun",
        "flags": {"control": ["--compile", "off"], "candidate": ["--compile", "on"]}, "ranks": {"control": 1, "candidate": ranks},
        "difference": {"compile": ["off", "on"]}, "objective": "throughput", "tolerance": 0.01, "rationale": "another order",
        "workload": {
            "key": "k", "recipe": "speedrun", "steps": 9, "batch_tokens": 64, "seq_len": 8, "seeds": [1],
            "dataset": "mix", "data_fingerprint": "f",
        },
        "gates": [{"number": 1, "name": "limit", "status": "pass", "evidence": "memory | binds", "data": {}}],
        "measured": {"control": arm_, "candidate": arm_, "ratio": [1.2, 1.1, 1.3]}, "software": {"torch": "2.13"},
        "hardware": {"text": "1 x H200"}, "verdict": verdict, "reason": "faster", "notes": ["one"],
    }  # fmt: skip


def test_the_ledger_grows_by_lines_and_notices_edits(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    first = ledger.append(decision("a"), path)
    kept = path.read_bytes()
    second = ledger.append(decision("b", "rejected", 3.4), path)
    assert path.read_bytes().startswith(kept) and (first["id"], second["id"]) == ("p001", "p002")
    assert [r["candidate"] for r in ledger.read(path)] == ["a", "b"]
    assert ledger.origin_loss(ledger.read(path), "k") == 3.3 and ledger.origin_loss(ledger.read(path), "other") is None
    lines = path.read_text().splitlines()
    edited = lines[1].replace("rejected", "accepted")  # the last line has none after it that would name its hash
    for damaged in (
        [lines[1]], [lines[0].replace("3.3", "3.2"), lines[1]], [lines[0], lines[0]], [lines[0], "{"], [lines[0], edited],
        [lines[0], "[]"], [lines[0], '{"schema": 1}'],
    ):  # fmt: skip
        path.write_text("\n".join(damaged) + "\n")
        with pytest.raises(UserError, match="restore"):
            ledger.read(path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(UserError, match="cannot be read"):
        ledger.read(path)
    path.write_text("\n".join(lines))  # its last line end was lost
    assert ledger.append(decision("c"), path)["id"] == "p003" and len(ledger.read(path)) == 3


def test_list_show_and_accept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "ledger.jsonl"

    def command(*argv: str) -> tuple[int, str, str]:
        code = main(["promote", *argv, "--ledger", str(path)])
        said = capsys.readouterr()
        return code, said.out, said.err

    assert command("list")[0] == 0 and json.loads(command("list", "--json")[1]) == []
    ledger.append(decision("compile"), path)
    ledger.append(decision("fsdp2", "rejected"), path)
    ledger.append(decision("ddp-2", ranks=2), path)
    assert [r["id"] for r in json.loads(command("list", "--json")[1])] == ["p001", "p002", "p003"]
    assert "gate 1, limit: **pass**" in command("show", "p001")[1]
    for bad in (("show", "p009"), ("show",), ("accept", "p002"), ("accept", "p003")):
        code, out, err = command(*bad)
        assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert ledger.control_of(ledger.read(path), "speedrun") is None
    assert command("accept", "p001")[0] == 0 and command("accept", "p001")[0] == 2
    current = ledger.control_of(ledger.read(path), "speedrun")
    assert current is not None and current["flags"] == ["--compile", "on"]
    assert command("accept", "p003", "--reason", "the run must end this week")[0] == 0
    table = (tmp_path / "ledger.md").read_text()
    assert "now the control (p004)" in table and "`fsdp2`" in table
    rows = [line for line in table.splitlines() if line.startswith("| [p")]
    assert len(rows) == 3 and all(row.count("|") == 11 for row in rows)


def test_the_committed_table_is_the_ledgers():
    if ledger.LEDGER.exists():
        assert ledger.TABLE.read_text() == ledger.table(ledger.read())


def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], shards: Path):
    out, kept = tmp_path / "runs", tmp_path / "ledger.jsonl"
    for argv in (
        [], ["no-such-candidate"], ["compile", "--seeds", "1,x"], ["compile", "--seeds", "1,1"], ["compile", "--rounds", "0"],
        ["compile", "--kill-steps", "3"], ["--candidate", "--no-such-flag 1"], ["compile", "--suite", "h200"],
        ["--candidate", "--n-layer 2", "--addresses", "warp"], ["compile", "--baseline", "nothing"],
        ["compile", "--control", "owner-2"], ["--suite", "devices"], ["--suite", "devices", "--gpus", "1"], ["ddp-1"],
        ["compile", "--control", "p001"], ["--candidate", "--n-layer 2", "--tolerance", "2"],
    ):  # fmt: skip
        code = main(
            ["promote", *argv, "--recipe", "sample", "--out", str(out), "--ledger", str(kept), "--", "--data", str(shards)]
        )
        message = capsys.readouterr().err
        assert code == 2 and message.startswith("error: ") and message.count("\n") == 1, argv
        assert not out.exists() and not kept.exists()


def test_every_candidate_is_a_difference_of_two_configs_and_says_why():
    from train_gpt2 import parse_args

    for c in [*promote.CANDIDATES.values(), *(promote.find_candidate(f"{name}-8") for name in promote.SEVERAL)]:
        old, new = (parse_args(["speedrun", *flags]) for flags in (c.control, c.flags))
        assert old != new or c.gpus != c.control_gpus, c.name
        assert c.objective in gates.OBJECTIVES and c.rationale and 0 <= c.tolerance < 0.02
        assert c.addresses or c.objective != "throughput"
    for names, flags in promote.SUITES.values():
        assert set(names) <= set(promote.NAMES)
        parse_args(["speedrun", *flags.split()])
    names, flags = promote.SUITES["kernels"]
    bare = promote.short(["speedrun", *flags.split()])
    arms = {name: (promote.find_candidate(name).control, promote.find_candidate(name).flags) for name in names}
    hashes = {name: [promote.short(["speedrun", *flags.split(), *arm]) for arm in pair] for name, pair in arms.items()}
    assert [pair.index(bare) if bare in pair else None for pair in hashes.values()] == [1, 1, 0, None, 0, 0]


def test_a_workload_does_not_depend_on_the_folder_of_its_text():
    kept = ["--compile", "on", "--seq-len", "64"]
    assert promote.without_folder([*kept[:2], "--data", "a/b", *kept[2:]]) == kept
    assert promote.without_folder(["--data=a", *kept]) == promote.without_folder([*kept, "--data", "c"]) == kept


@pytest.mark.parametrize(("name", "gpus", "control"), [("ddp-2", 2, 1), ("owner-over-ddp-4", 4, 4), ("fsdp2-16", 16, 16)])
def test_a_candidate_for_several_devices_exists_for_any_number(name: str, gpus: int, control: int):
    found = promote.find_candidate(name)
    assert (found.name, found.gpus, found.control_gpus) == (name, gpus, control)
    assert promote.find_candidate("fsdp2").gpus == 1 and promote.find_candidate("micro-batch-64").gpus == 1


@pytest.mark.parametrize("name", ["owner-1", "owner-0", "zero1", "owner-x", "compile-2", "owner--2", "-2", "owner-N"])
def test_other_names_are_refused(name: str):
    with pytest.raises(UserError, match=f"no candidate '{name}'"):
        promote.find_candidate(name)


# --- a suite, its trainings played from a table -------------------------------------------------------------


class Played:
    """A training that needs no time: its run directory is written at once, with the speed and loss of its flags."""

    made: list[str]  # run directories, in order

    def __init__(self, argv: Sequence[str], log: Path):
        from train_gpt2 import parse_args

        cfg = parse_args(list(argv))
        self.dir = Path(cfg.run_dir)
        self.running = self.dir.name.startswith("broken") and not cfg.resume  # until it is killed
        if cfg.recompute == "selective":
            raise OSError("the disk is full")
        speeds = {"flash": 0.9, "off": 0.5, "same": 0.95, "fsdp2": 0.9}
        speed = 1.0
        for value in (cfg.attention, cfg.compile, cfg.head_precision, cfg.parallel):
            speed *= speeds.get(value, 1.0)
        end = {"exit_reason": "finished", "checkpoints": {"bytes": 1, "saves": 2, "write_s": 0.1}}
        if self.dir.exists():
            shutil.rmtree(self.dir)
        shift = 0.3 if cfg.optimizer == "adamw" else 0.0
        (made,) = arm(self.dir.parent, "new", (cfg.seed,), lambda step: speed, cfg.max_steps, lambda seed: shift, **end)
        made.rename(self.dir)
        (self.dir / "checkpoints").mkdir()
        (self.dir / "checkpoints/latest").write_text("step-000001")
        if self.running:
            (self.dir / "result.json").unlink()
        if cfg.resume:  # as after a kill: what went before stays, and the last third is written again
            rows = (self.dir / "metrics.jsonl").read_text()
            tail = [line for line in rows.splitlines() if json.loads(line)["step"] > cfg.max_steps * 2 // 3]
            (self.dir / "metrics.jsonl").write_text(rows + "\n".join(tail) + "\n")
        Played.made.append(self.dir.name)

    def alive(self) -> bool:
        return self.running

    def kill(self) -> None:
        self.running = False

    def wait(self) -> int:
        return 0


def test_a_suite_shares_runs_survives_a_failure_and_goes_on_where_it_stopped(
    tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
):
    from harness.__main__ import build_parser

    Played.made = []
    profiles: list[str] = []

    def profile(recipe: str, flags: Sequence[str], out: Path, *rest: Any, **more: Any) -> dict[str, Any]:
        profiles.append(out.name)
        content = {"schema": 1, **PROFILE, "warnings": [], "step_ms": 1000.0, "device_bytes": 141 * GB}
        content |= {"tokens_per_s": 65_536.0, "mfu": 0.4, "peak_bytes": 20 * GB}
        write_run(out / "run", steps=12, peak_mem_bytes=20 * GB)
        (out / "profile.json").write_text(json.dumps(content))
        return content

    def call(*more: str) -> int:
        argv = ["promote", "--suite", "h200", "--recipe", "speedrun", "--ledger", str(tmp_path / "ledger.jsonl"), *more]
        args = build_parser("promote").parse_args(argv)
        args.trainer_flags, args.table = (
            ["--data", str(shards), "--batch-tokens", "65536", "--seq-len", "64"],
            tmp_path / "ledger.md",
        )
        lab = promote.Lab(tmp_path / "out", lambda argv, gpus, log: Played(argv, log), profile, say=lambda text: None)
        if args.stop_after:
            lab.deadline = 0.0
        lab.folder.mkdir(exist_ok=True)
        return promote._decide_all(args, promote._chosen(args), promote._plan(args), lab, [])

    everything = call
    call = lambda *more: everything("--anyway", *more)  # noqa: E731
    assert call("--stop-after", "1") == 3 and not Played.made and not (tmp_path / "ledger.jsonl").exists()
    capsys.readouterr()
    assert call() == 1, "one decision could not be made"
    said = capsys.readouterr().out
    verdicts = {r["candidate"]: r["verdict"] for r in ledger.read(tmp_path / "ledger.jsonl")}
    accepted = dict.fromkeys(("cudnn-attention", "compile", "muon", "fp8-all-head"), "accepted")
    assert verdicts == {**accepted, "fsdp2": "rejected"}, said
    assert "selective-recompute: no decision" in said and "the disk is full" in said
    records = {r["candidate"]: r for r in ledger.read(tmp_path / "ledger.jsonl")}
    assert records["fsdp2"]["reason"].startswith("gate 1 (limit): memory does not bind")
    assert records["compile"]["difference"] == {"compile": ["off", "on"]}
    assert {r["workload"]["steps"] for r in records.values()} == {60}, "a minute of steps of 1000 ms"
    runs = [name for name in Played.made if not name.startswith(("broken", "twin"))]
    assert len(runs) == len(set(runs))
    # The bare recipe is run once and again three decisions later; flash, compile off, adamw, same head and fsdp2 once.
    arms = [name.split("-")[0] for name in runs]
    assert len(runs) == 2 + 5 and max(arms.count(a) for a in arms) == 2
    assert len(profiles) == len(set(profiles)) == 4, "of the controls: flash, compile off, same head, bare"
    assert sum(name.startswith("broken") for name in Played.made) == 2, "one kill and one resume serve all four"
    made = list(Played.made)
    assert call() == 1 and Played.made == made, "nothing finished is made again"
    # Without --anyway the profile decides, and the candidates that it speaks against are not trained.
    for name in ("fsdp2", "selective-recompute"):
        (tmp_path / "out" / f"decision-{name}.json").unlink(missing_ok=True)
    assert everything() == 0 and Played.made == made
    last = ledger.read(tmp_path / "ledger.jsonl")[-1]
    assert last["candidate"] == "fsdp2" and last["reason"].startswith("gate 1 (limit): memory does not bind")
    assert last["measured"]["candidate"] == {} and last["measured"]["control"]["step_ms"] == 1000.0
    assert [g["status"] for g in last["gates"]] == ["fail", *["skipped"] * 4]
    assert "-" in (tmp_path / "ledger.md").read_text().splitlines()[-3]
    (tmp_path / "out" / "decision-fsdp2.json").unlink()
    assert everything() == 0, "a control without a loss is no origin to compare with"
    capsys.readouterr()
    assert everything("--seeds", "5") == 1 and Played.made == made
    assert capsys.readouterr().out.count("is a decision on another question (seeds)") >= 6


def test_a_kill_reaches_the_workers_of_torchrun(tmp_path: Path):
    """They are in sessions of their own, and would train on."""
    import psutil

    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys, time\n"
        "open(sys.argv[1] + '-' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "time.sleep(300)\n"
    )
    job = promote.Process([str(tmp_path / "pid")], 2, tmp_path / "log", trainer=script)
    deadline = time.monotonic() + 60
    while len(pids := [p for p in tmp_path.glob("pid-*") if p.read_text()]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    job.kill()
    assert len(pids) == 2, (tmp_path / "log").read_text()
    gone = lambda pid: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # noqa: E731
    while not all(gone(int(p.read_text())) for p in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert time.monotonic() < deadline


def test_what_an_orphan_still_writes_is_left_alone(tmp_path: Path):
    """A promote that was killed leaves its training behind, which would finish under the name of the next one."""
    from train_gpt2 import lock_run

    Played.made = []
    lab = promote.Lab(tmp_path, lambda argv, gpus, log: Played(argv, log), say=lambda text: None)
    (tmp_path / "arm").mkdir()
    orphan = lock_run(tmp_path / "arm", 0.0)
    with pytest.raises(ValueError, match="is being written by another process"):
        lab.train("arm", ["speedrun", "--data", "x"])
    assert not Played.made and (tmp_path / "arm").exists()
    orphan.close()
    assert lab.train("arm", ["speedrun", "--data", "x", "--max-steps", "60"]) == tmp_path / "arm"
    assert len(list(tmp_path.glob("arm.cut-*"))) == 1


def test_an_arm_without_a_steady_step_is_a_verdict_too(tmp_path: Path):
    short = arm(tmp_path, "short", steps=1)
    (short[0] / "metrics.jsonl").write_text("")
    e = evidence(tmp_path, short)
    assert gate(e, 3).status == "fail" and "no steps to measure" in gate(e, 3).evidence


# --- a real kill -------------------------------------------------------------------------------------------


def _train(argv: list[str], log: str, forgetful: bool) -> None:
    """A training in a process of its own; `forgetful`: its checkpoints give back no momentum."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    import torch

    import train_gpt2

    torch.set_num_threads(1)
    if forgetful:
        restore = train_gpt2.Trainer.restore

        def without_momentum(self: Any, meta: Any) -> None:
            restore(self, meta)
            for stack in self.optimizer.momentum.values():
                stack.zero_()

        train_gpt2.Trainer.restore = without_momentum  # type: ignore[method-assign]
    os._exit(train_gpt2.main(argv))


class Forked:
    """A training forked from a server that has torch in memory."""

    def __init__(self, argv: Sequence[str], log: Path, forgetful: bool):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.child = CONTEXT.Process(target=_train, args=(list(argv), str(log), forgetful))
        self.child.start()

    def alive(self) -> bool:
        return self.child.is_alive()

    def kill(self) -> None:
        self.child.kill()
        self.child.join()

    def wait(self) -> int:
        self.child.join(120)
        assert self.child.exitcode is not None
        return self.child.exitcode


def test_a_checkpoint_that_forgets_momentum_fails_at_the_recovery(tmp_path: Path, shards: Path):
    flags = TINY | {"data": shards, "head-precision": "same", "value-embeds": 1, "epochs": 9}
    argv = ["speedrun", *(f"--{k}={v}" for k, v in flags.items() if k not in ("max-steps", "val-every", "checkpoint-every"))]
    for forgetful in (False, True):
        start = lambda argv, gpus, log, f=forgetful: Forked(argv, log, f)  # noqa: E731
        lab = promote.Lab(tmp_path / f"lab-{forgetful}", start=start, say=lambda text: None)
        if forgetful:  # the twin that was never killed has nothing to forget
            shutil.copytree(tmp_path / "lab-False/kill/twin", lab.folder / "kill/twin")
        record = promote.kill_and_resume(lab, "kill", argv, steps=24)
        assert "problem" not in record, record
        assert 0 < record["resumed_at"] <= record["killed_after_step"] < 24 and record["aimed_at"] <= record["killed_after_step"]
        e = evidence(tmp_path / f"rest-{forgetful}", recovery=record)
        assert first_failure(e) == (4 if forgetful else 0), gate(e, 4).evidence
        assert ("to the last bit" in gate(e, 4).evidence) != forgetful
        assert promote.kill_and_resume(lab, "kill", argv, steps=24) == record, "made once"


# --- the whole of it ---------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_whole_decision_on_a_small_recipe(tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]):
    """Profile, interleaved runs, gates, kill, record and table, by the command a person types."""
    own = {k: v for k, v in TINY.items() if k not in ("max-steps", "val-every", "checkpoint-every", "val-tokens")}
    own |= {"data": shards, "val-tokens": 128, "micro-batch": 8, "value-embeds": 1, "head-precision": "same"}
    kept = tmp_path / "ledger.jsonl"
    argv = ["--steps", "60", "--rounds", "1", "--out", str(tmp_path / "out"), "--ledger", str(kept), "--kill-steps", "60"]
    argv += ["--recipe", "speedrun", "--addresses", "compute launch memory"]
    flags = ["--", *(f"--{k}={v}" for k, v in own.items())]
    # Accumulating micro-batches of one sequence is the slow way to the same sum: a candidate that must come out.
    assert main(["promote", "--candidate", "--micro-batch 1", *argv, *flags]) == 0
    capsys.readouterr()
    assert main(["promote", "list", "--json", "--ledger", str(kept)]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["verdict"] == "rejected" and record["reason"].startswith("gate 3 (objective): slower"), record["reason"]
    assert [g["status"] for g in record["gates"]] == ["pass", "pass", "fail", "skipped", "pass"]
    assert record["difference"] == {"micro_batch": [8, 1]}
    assert abs(record["gates"][1]["data"]["difference"]) < 1e-3
    assert "micro-batch" in (tmp_path / "ledger.md").read_text()
    # And back: the control of before is now the candidate, measured anew, killed and resumed.
    own["micro-batch"] = 1
    flags = ["--", *(f"--{k}={v}" for k, v in own.items())]
    argv[argv.index(str(tmp_path / "out"))] = str(tmp_path / "back")
    assert main(["promote", "--candidate", "--micro-batch 8", *argv, *flags]) == 0
    record = ledger.read(kept)[-1]
    assert record["verdict"] == "accepted", record["reason"]
    assert record["recovery"]["signal"] == 9 and record["measured"]["candidate"]["checkpoint_bytes"] > 0
    assert main(["promote", "accept", record["id"], "--ledger", str(kept)]) == 0


def test_the_first_save_costs_its_block_and_the_longer_of_two_steps():
    rows = [{"step_ms": 100.0} for _ in range(20)]
    assert promote.first_stall(rows) is None and promote.first_stall([]) is None
    rows[5] |= {"save_ms": 7.0, "save_wait_ms": 50.0}
    rows[6]["step_ms"], rows[8]["step_ms"] = 130.0, 700.0
    rows[12] |= {"save_ms": 9.0, "step_ms": 900.0}
    assert promote.first_stall(rows) == 37
