"""Baselines: frozen, hashed, never edited; and the published references that ship with the project."""

import json
import os
import statistics
import subprocess
import sys

import pytest
from regress_support import EVERY, STEPS, harness, record, val_curve, write_run

from harness.baseline import FOLDER, content_hash, load, names
from harness.common import UserError


def test_record_freezes_what_a_later_run_is_judged_by(tmp_path, capsys):
    folder = record(tmp_path, n=4)
    base = json.loads((folder / "base.json").read_text())
    losses = [val_curve(seed)[-1] for seed in range(4)]
    assert [run["val_loss"] for run in base["runs"]] == losses
    assert (
        base["mean"] == statistics.fmean(losses)
        and base["std"] == statistics.stdev(losses)
        and base["n"] == 4
    )
    assert base["facts"] == {
        "recipe": "sample",
        "data.fingerprint": "c" * 64,
        "val_protocol.data": "b" * 64,
        "val_protocol.tokens": 2048,
        "val_protocol.seq_len": 128,
        "val_protocol.document_mask": False,
        "val_protocol.dtype": "fp32",
        "train_tokens": STEPS * 1000,
    }
    assert [p["val_loss"] for p in base["runs"][2]["curve"]] == val_curve(2)
    assert [p["step"] for p in base["runs"][2]["curve"]] == list(range(0, STEPS + 1, EVERY))
    assert base["stack"]["cpu"] == "Some CPU" and base["stack"]["torch"] == "2.13.0+cpu"
    assert base["commands"] == [["sample"]] * 4 and base["margin"] == 0.02 and base["dataset"] == "a-text"
    assert len(base["runs"][0]["steady_tokens_per_s"]) == 54  # the first tenth of 60 steps is left out
    assert "seed" not in base["config"] and base["config"]["muon_lr"] == 0.03
    out = capsys.readouterr().out
    assert "n=4" in out and "Some CPU" in out


def test_speeds_that_say_nothing_are_left_out_with_the_reason(tmp_path, capsys):
    folder = record(tmp_path, n=3)
    runs = [tmp_path / f"base-{seed}" for seed in range(3)]
    more = ["--replace", "side by side", "--without-speed", "trained side by side", "--margin", 0.02]
    assert harness("baseline", "--folder", folder, "record", "base", *runs, *more) == 0
    base = load("base", folder)
    assert base["tokens_per_s"] is None and [r["steady_tokens_per_s"] for r in base["runs"]] == [[]] * 3
    assert base["mean"] == load("base", record(tmp_path / "usual", n=3))["mean"]
    assert harness("baseline", "--folder", folder, "show", "base") == harness("baseline", "--folder", folder, "verify") == 0
    capsys.readouterr()
    new = write_run(tmp_path / "new", seed=9)
    assert harness("regress", new, "--baseline", "base", "--folder", folder) in (0, 1, 3)
    assert "the baseline keeps no tokens/s: trained side by side" in capsys.readouterr().out


def test_list_show_verify(tmp_path, capsys):
    folder = record(tmp_path, n=3)
    assert harness("baseline", "--folder", folder, "list") == 0
    assert harness("baseline", "--folder", folder, "show", "base") == 0
    assert "train_gpt2_sha256" in capsys.readouterr().out
    assert harness("baseline", "--folder", folder, "verify") == 0
    assert capsys.readouterr().out == "base: ok\n"


@pytest.mark.parametrize("edit", ["mean", "margin", "curve", "extra"])
def test_an_edited_baseline_is_found_out_and_not_used(tmp_path, capsys, edit):
    folder = record(tmp_path, n=3)
    path = folder / "base.json"
    content = json.loads(path.read_text())
    if edit == "curve":
        content["runs"][1]["curve"][2]["val_loss"] += 1e-9
    else:
        content[edit] = 4.9
    path.write_text(json.dumps(content))
    capsys.readouterr()
    assert harness("baseline", "--folder", folder, "verify", "base") == 1
    assert "does not match its hash" in capsys.readouterr().out
    with pytest.raises(UserError, match="does not match its hash"):
        load("base", folder)


def test_a_resealed_lie_about_the_mean_is_found_out_too(tmp_path):
    folder = record(tmp_path, n=3)
    content = json.loads((folder / "base.json").read_text())
    content["mean"] -= 0.001
    content["hash"] = content_hash(content)
    (folder / "base.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="does not follow from its losses"):
        load("base", folder)


def test_replacing_needs_a_reason_which_is_kept_with_what_it_replaced(tmp_path, capsys):
    folder = record(tmp_path, n=3)
    before = (folder / "base.json").read_bytes()
    runs = [write_run(tmp_path / f"new-{seed}", seed, shift=0.1) for seed in range(3)]
    command = ["baseline", "--folder", folder, "record", "base", *runs]
    assert harness(*command) == 2
    assert "never edited" in capsys.readouterr().err
    assert harness(*command, "--replace", " ") == 2
    assert (folder / "base.json").read_bytes() == before
    assert harness(*command, "--replace", "a new tokenizer") == 0
    history = load("base", folder)["history"]
    assert [h["reason"] for h in history] == ["a new tokenizer"]
    assert (
        history[0]["hash"] == json.loads(before)["hash"] and history[0]["mean"] == json.loads(before)["mean"]
    )
    assert harness(*command, "--replace", "and again") == 0
    assert [h["reason"] for h in load("base", folder)["history"]] == ["a new tokenizer", "and again"]
    command[4] = "other"
    assert harness(*command, "--replace", "nothing there") == 2


@pytest.mark.parametrize(
    "change, named",
    [
        ({"data": {"fingerprint": "e" * 64}}, "data.fingerprint"),
        ({"protocol": {"tokens": 4096}}, "val_protocol.tokens"),
        ({"config": {"muon_lr": 0.02}}, "muon_lr"),
        ({"env": {"torch": "2.14"}}, "torch"),
        ({"env": {"cpu": "Other CPU"}}, "cpu"),
        ({"env": {"train_gpt2_sha256": "f" * 64}}, "train_gpt2.py"),
        ({"reason": "non_finite"}, "diverged"),
        ({"reason": "stopped"}, "did not finish"),
        ({"val": [*val_curve(2)[:-1], 5.0, 5.0]}, "other token counts"),
    ],
)
def test_runs_of_a_baseline_differ_in_the_seed_alone(tmp_path, capsys, change, named):
    runs = [write_run(tmp_path / str(seed), seed) for seed in range(2)]
    runs.append(write_run(tmp_path / "2", 2, **change))
    assert harness("baseline", "--folder", tmp_path / "b", "record", "base", *runs) == 2
    err = capsys.readouterr().err
    assert named in err and err.startswith("error: ") and err.count("\n") == 1
    assert not (tmp_path / "b").exists()


def test_two_runs_of_one_seed_are_no_two_samples(tmp_path, capsys):
    runs = [write_run(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 1), ("c", 1))]
    assert harness("baseline", "--folder", tmp_path / "b", "record", "base", *runs) == 2
    assert "share seed 1" in capsys.readouterr().err
    same = [write_run(tmp_path / f"s{seed}", seed, val=val_curve(0)) for seed in range(3)]
    assert harness("baseline", "--folder", tmp_path / "b", "record", "base", *same) == 2
    assert "seed does not reach the run" in capsys.readouterr().err
    assert harness("baseline", "--folder", tmp_path / "b", "record", "base", *runs[:2]) == 2
    assert "at least 3 seeds" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ("show", "no-such"),
        ("verify", "../etc"),
        ("record", "a/b", "nowhere"),
        ("record", "base", "nowhere"),
        ("record", "base", "nowhere", "--margin", "-1"),
        (
            "publish",
            "x",
            "29.55",
            "--metric",
            "hellaswag_acc_norm",
            "--dataset",
            "h",
            "--source",
            "s",
            "--scoring",
            "llmc",
        ),
        ("publish", "x", "0.29", "--metric", "hellaswag_acc_norm", "--dataset", "h", "--source", "s"),
        (
            "publish",
            "x",
            "3.28",
            "--metric",
            "val_loss",
            "--dataset",
            "h",
            "--source",
            "s",
            "--scoring",
            "llmc",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, argv):
    code = harness("baseline", "--folder", tmp_path / "b", *argv)
    err = capsys.readouterr().err
    if argv[0] == "verify":
        assert code == 2
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert not (tmp_path / "b").exists()


def test_every_shipped_baseline_is_as_it_was_recorded(capsys):
    assert harness("baseline", "verify") == 0
    kinds = {name: load(name)["kind"] for name in names(FOLDER)}
    assert set(kinds.values()) == {"runs", "published"}


@pytest.mark.parametrize(
    "name, value, key",
    [
        ("llmc-gpt2-124m-fineweb", 3.2722, "kjj0/fineweb10B-gpt2"),
        ("speedrun-target-fineweb", 3.28, "kjj0/fineweb10B-gpt2"),
        ("openai-gpt2-124m-fineweb", 3.4250, "kjj0/fineweb10B-gpt2"),
        ("openai-gpt2-124m-fineweb-edu", 3.2924, "kjj0/finewebedu10B-gpt2"),
        ("openai-gpt2-124m-hellaswag-llmc", 0.2955, "llmc"),
        ("openai-gpt2-124m-hellaswag-lm-eval", 0.3114, "lm-eval"),
    ],
)
def test_published_references(name, value, key):
    content = load(name)
    assert content["kind"] == "published" and content["value"] == value and content["source"]
    assert key in str(content["datasets"]) or content["scoring"] == key


def test_the_committed_sample_baseline_has_its_seeds_and_curves():
    content = load("sample-cpu-short")
    assert content["facts"]["recipe"] == "sample" and content["stack"]["device"] == "cpu"
    assert content["n"] >= 10
    assert content["margin"] and all(len(run["curve"]) == 7 for run in content["runs"])


@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_goes_away_is_no_error(buffered: bool) -> None:
    command = [sys.executable, "-m", "harness", "baseline", "list"]
    environment = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 0
