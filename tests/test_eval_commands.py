"""The commands as a person types them: files they leave, lines they print, mistakes they name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from eval_support import text_tokens, tiny, trained, write_run, write_shards

from data.tokenizer import gpt2_encoding
from eval import files, lambada, sample, stats
from eval.__main__ import COMMANDS, main
from eval.compare import compare
from train_gpt2 import EOT, GPT, read_json


def run_main(args: list[str]) -> int:
    try:
        return main(args)
    except SystemExit as stop:  # argparse
        return int(stop.code or 0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", trained(), write_shards(tmp_path / "data", text_tokens()[:1000]))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_hellaswag_files(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "rows.jsonl"
    args = ["hellaswag", str(run), "--limit", "30", "--save", str(saved), "--device", "cpu"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "llmc scoring, the FIRST 30 of 10,042 examples: a subset" in out
    found = read_json(run / "hellaswag-llmc.json")
    rows = lines(saved)
    assert rows == lines(run / "hellaswag-llmc.jsonl") and len(rows) == 30
    right = [int(np.argmin(np.array(r["nll"]) / r["tokens"])) == r["label"] for r in rows]
    assert found["acc_norm"] == pytest.approx(sum(right) / 30) and found["subset"] is True
    assert found["acc_norm_stderr"] == pytest.approx(stats.accuracy(right).se)
    # A smaller subset of the same weights does not take the place of a larger one.
    assert main(["hellaswag", str(run), "--limit", "5", "--device", "cpu"]) == 0
    assert "is kept: it covers 30 examples" in capsys.readouterr().out
    assert read_json(run / "hellaswag-llmc.json")["examples"] == 30


def test_lambada_by_hand(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Accuracy and loss of the last word, from the model's logits one passage at a time."""
    assert main(["lambada", str(run), "--limit", "6", "--device", "cpu"]) == 0
    rows = files.json_lines(files.obtain(files.LAMBADA))[:6]
    assert len(files.json_lines(files.obtain(files.LAMBADA))) == lambada.EXAMPLES
    found = lines(run / "lambada.jsonl")
    encode = gpt2_encoding().encode_ordinary
    for row, our in zip(rows, found):
        context, whole = encode(row["context"]), encode(row["context"] + " " + row["word"])
        with torch.no_grad():
            logits = trained().logits(torch.tensor([whole[-193:-1]]))[0].double()
        word = whole[len(context) :]
        chances = logits.log_softmax(-1)[-len(word) :]
        nll = -sum(chances[i, t].item() for i, t in enumerate(word))
        assert our["nll"] == pytest.approx(nll, rel=1e-5) and our["tokens"] == len(word)
        assert our["right"] == (chances.argmax(-1).tolist() == word)
    summary = read_json(run / "lambada.json")
    assert summary["nats_per_word"] == pytest.approx(np.mean([r["nll"] for r in found]))


def test_sampling_is_repeatable_and_obeys_its_settings() -> None:
    net = trained()
    context = [EOT, 464]

    def draw(**settings: float) -> list[int]:
        given = {"temperature": 1.0, "top_k": 50, "seed": 1} | settings
        return list(sample.generate(net, context, 12, given["temperature"], int(given["top_k"]), int(given["seed"])))

    assert draw() == draw() != draw(seed=2)
    greedy = draw(temperature=0)
    assert greedy == draw(top_k=1) == draw(top_k=1, seed=9)
    row = list(context)
    with torch.no_grad():
        for token in greedy:
            assert token == int(net.logits(torch.tensor([row]))[0, -1].argmax())
            row.append(token)


def test_only_real_ids_are_drawn() -> None:
    """Padding rows of the head that would win every draw are out of reach; top-k draws from the k best
    only.
    """
    net = GPT(tiny("sample", n_layer=1, n_embd=16, seq_len=32)).eval()
    with torch.no_grad():
        net.head.weight[50257:] = 100.0
        net.head.weight[:50257] = torch.randn(50257, 16, generator=torch.Generator().manual_seed(0))
    drawn = [t for seed in range(20) for t in sample.generate(net, [EOT], 5, 5.0, 0, seed)]
    assert len(drawn) > 50 and max(drawn) < EOT
    with torch.no_grad():
        best = set(net.logits(torch.tensor([[EOT]]))[0, -1].topk(3).indices.tolist())
    firsts = {next(sample.generate(net, [EOT], 1, 1.0, 3, seed), EOT) for seed in range(60)}
    assert firsts == best


def test_sample_longer_than_the_context(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """200 tokens from a context of 192: the window moves on."""
    args = ["sample", str(run), "--prompt", "The man", "--tokens", "200", "--device", "cpu", "--top-k", "1"]
    assert main(args) == 0
    assert capsys.readouterr().out.startswith("The man")


def test_compare_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_shards(tmp_path / "data", text_tokens()[:1000])
    a = write_run(tmp_path / "a", GPT(tiny("gpt2")).eval(), data)
    b = write_run(tmp_path / "b", trained(), data)
    for folder in (a, b):
        for command in (["val"], ["hellaswag", "--limit", "20"], ["lambada", "--limit", "20"]):
            assert main([command[0], str(folder), *command[1:], "--device", "cpu"]) == 0
    capsys.readouterr()
    config = read_json(a / "config.json")
    assert config["config"].pop("tied_steps") == 0  # as of a run that is older than the field
    (a / "config.json").write_text(json.dumps(config))
    assert main(["compare", str(a), str(b), "--save", str(tmp_path / "c.json")]) == 0
    out = capsys.readouterr().out
    found = read_json(tmp_path / "c.json")
    assert "tied_steps" not in found["config"]
    by_name = {row["name"]: row for row in found["rows"]}
    rows = [lines(folder / "hellaswag-llmc.jsonl") for folder in (a, b)]
    right = [[r["choice_acc_norm"] == r["label"] for r in table] for table in rows]
    paired = stats.paired_accuracy(*right)
    accuracy = by_name["HellaSwag llmc acc_norm"]
    assert accuracy["mcnemar_exact_p"] == paired.p_value
    assert accuracy["difference"]["value"] == pytest.approx(np.mean(right[1]) - np.mean(right[0]))
    loss = by_name["val loss"]
    own = [read_json(folder / "result.json")["val_loss"] for folder in (a, b)]
    assert loss["difference"]["value"] == pytest.approx(own[1] - own[0], abs=1e-5)
    assert loss["difference"]["high"] < 0  # training a little helps, and the interval says so
    assert "McNemar" not in out and "only A" in out and "val loss" in out
    assert (b / "compare-a.png").stat().st_size > 5000 and (b / "compare-a.svg").is_file()


@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_goes_away_is_no_error(run: Path, buffered: bool) -> None:
    command = [sys.executable, "-m", "eval", "compare", str(run), str(run)]
    environment = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 0


def test_compare_never_sets_different_protocols_side_by_side(tmp_path: Path, run: Path) -> None:
    other = write_run(tmp_path / "other", trained(), tmp_path / "data", val_tokens=2 * 192)
    assert main(["val", str(run), "--device", "cpu"]) == main(["val", str(other), "--device", "cpu"]) == 0
    found = compare(run, other)
    assert found["same_val_protocol"] is False and found["rows"] == []


def test_compare_refuses_results_of_other_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hellaswag", str(run), "--limit", "1", "--device", "cpu"]) == 0
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"weights_sha256": "0" * 64}))
    capsys.readouterr()
    assert main(["compare", str(run), str(run)]) == 2
    assert "was measured on other weights" in capsys.readouterr().err


def test_one_example_has_no_interval(run: Path, tmp_path: Path) -> None:
    assert main(["hellaswag", str(run), "--limit", "1", "--device", "cpu"]) == 0
    assert main(["compare", str(run), str(run), "--save", str(tmp_path / "c.json")]) == 0
    rows = {r["name"]: r for r in read_json(tmp_path / "c.json")["rows"]}
    assert rows["HellaSwag llmc acc"]["difference"]["low"] is None


def test_bench_compares_with_the_loop(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", str(run), "--limit", "8", "--loop", "4", "--device", "cpu", "--save", str(file)]) == 0
    found = read_json(file)
    assert found["equal_choices"] == {"acc": 4, "acc_norm": 4}
    assert found["ratio"] == pytest.approx(found["batched_examples_per_second"] / found["loop_examples_per_second"])


def test_reference_says_where_the_hub_is_not_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert main(["reference", "gpt2"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("error: ") and "http://127.0.0.1:9: ConnectionError" in err and "--from DIR" in err


def test_reference_from_a_folder_compares_with_the_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both scorings of whatever the folder holds; other weights than OpenAI's are told apart."""
    run = write_run(tmp_path / "run", trained())
    assert main(["export", str(run), "--format", "hf", "--out", str(tmp_path / "hf")]) == 0
    assert main(["reference", "gpt2", "--from", str(tmp_path / "hf"), "--limit", "4", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "does not hold the published weights" in out
    assert "llmc scoring, the FIRST 4" in out and "lm-eval scoring, the FIRST 4" in out
    assert "published 29.55" not in out  # a subset has nothing to be compared with


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["hellaswag", "RUN", "--limit", "0"], "'0' is not a whole number above 0"),
        (["hellaswag", "RUN", "--limit", "20000"], "the file has 10,042 examples"),
        (["hellaswag", "RUN", "--scoring", "mine"], "invalid choice: 'mine'"),
        (["hellaswag", "RUN", "--save", "no/such/x.jsonl"], "no/such is no folder"),
        (["hellaswag", "nowhere"], "nowhere: no such directory"),
        (["hellaswag", "EMPTY"], "no config.json"),
        (["hellaswag"], "the following arguments are required: MODEL"),
        (["lambada", "RUN", "--limit", "6000"], "the file has 5,153 passages"),
        (["sample", "RUN", "--temperature", "-1"], "must be 0 or more"),
        (["export", "RUN", "--format", "onnx"], "invalid choice: 'onnx'"),
        (["export", "RUN", "--format", "hf", "--out", "no/such/dir"], "is no folder"),
        (["compare", "RUN", "EMPTY"], "no config.json"),
        (["val", "UNFINISHED"], "has not finished"),
        (["val", "BROKEN"], "does not fit its config"),
        (["val", "OTHER"], "does not fit its config"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        ([], "required: COMMAND"),
    ],
)
def test_mistakes_are_one_line(args: list[str], said: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"RUN": run} | {n: tmp_path / n for n in ("EMPTY", "UNFINISHED", "BROKEN", "OTHER")}
    names["EMPTY"].mkdir()
    write_run(names["UNFINISHED"], trained())
    (names["UNFINISHED"] / "model.safetensors").unlink()
    write_run(names["BROKEN"], trained())
    weights = names["BROKEN"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:10_000])
    write_run(names["OTHER"], trained())  # weights of another recipe
    (names["OTHER"] / "config.json").write_bytes(
        (write_run(tmp_path / "sample", GPT(tiny("sample"))) / "config.json").read_bytes()
    )
    before = sorted(tmp_path.rglob("*"))
    assert run_main([str(names.get(a, a)) for a in args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and said in err, err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main([command, "--help"]) == 0
    assert "usage: python -m eval " + command in capsys.readouterr().out
