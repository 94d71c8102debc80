"""Validation loss by protocol, from first principles and against the trainer's own number."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from eval_support import text_tokens, tiny, trained, write_run, write_shards

from data.tokenizer import gpt2_encoding
from eval import val
from eval.__main__ import main
from train_gpt2 import EOT, GPT, RECIPES, read_json


def small(**changes: object) -> GPT:
    """Learned positions and decisive weights."""
    net = GPT(tiny("gpt2", n_layer=1, n_embd=16, seq_len=64, **changes)).eval()
    torch.manual_seed(2)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return net


def one_by_one(net: GPT, tokens: np.ndarray, context_of: dict[int, int]) -> np.ndarray:
    """(targets,) nats: target t is predicted from tokens[context_of[t] : t] by the model's logits, one at
    a time.
    """
    out = []
    with torch.no_grad():
        for t in range(1, len(tokens)):
            logits = net.logits(torch.from_numpy(tokens[None, context_of[t] : t]))[0, -1].double()
            out.append(-logits.log_softmax(-1)[int(tokens[t])].item())
    return np.array(out)


def documents(count: int) -> np.ndarray:
    """Random text with an end-of-text token every 1 to 40 tokens, two of them side by side, one at a
    window's edge.
    """
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, 50256, count)
    tokens[np.cumsum(rng.integers(1, 40, count // 20))[: count // 40]] = EOT
    tokens[[0, 64, 100, 101]] = EOT
    return tokens


@pytest.mark.parametrize(
    ("seq_len", "stride", "mask"),
    [(64, 64, False), (32, 32, False), (64, 16, False), (64, 64, True), (64, 24, True)],
)
def test_every_target_has_the_stated_context(seq_len: int, stride: int, mask: bool) -> None:
    """Against predicting each target alone from exactly the tokens that the protocol lets it see."""
    net, tokens = small(), documents(201)
    context_of, position_of = {}, {}
    for t in range(1, 201):
        # The first window that covers target t: windows start at multiples of the stride.
        start = max(0, -(-(t - seq_len) // stride) * stride)
        if mask:  # the document of the last input, tokens[t - 1], starts at its last end-of-text token
            start = max([start, *(i for i in range(t) if tokens[i] == EOT)])
        context_of[t], position_of[t] = start, t - start
    expected = one_by_one(net, tokens, context_of)
    losses = val.measure(net, tokens, seq_len, stride, mask, "fp32", batch_tokens=256)
    assert losses.count == 200
    assert losses.nll == pytest.approx(expected.sum(), rel=1e-6)
    positions = np.array([position_of[t] for t in range(1, 201)])
    for p in range(1, seq_len + 1):
        assert losses.position_count[p - 1] == (positions == p).sum()
        assert losses.position_nll[p - 1] == pytest.approx(expected[positions == p].sum(), rel=1e-5, abs=1e-9)
    np.testing.assert_allclose(losses.block_nll, expected, rtol=1e-4)  # 200 targets, 200 blocks
    text = tokens[1:] != EOT
    assert losses.text_nll == pytest.approx(expected[text].sum(), rel=1e-6)


def test_bits_per_byte_by_hand() -> None:
    """A model that finds every id equally likely: log2(50257) bits a token, over the bytes of the text."""
    net = GPT(tiny("sample", n_layer=1, n_embd=16, seq_len=64)).eval()  # its head starts at zero
    text = "Naïve café: 日本語 and 😀 emoji, cut into bytes.\n"
    tokens = np.array([EOT, *gpt2_encoding().encode_ordinary(text), EOT, *gpt2_encoding().encode_ordinary(text)])
    losses = val.measure(net, tokens, 64, 64, False, "fp32")
    found = val.summarize(losses, {})
    assert losses.text_bytes == 2 * len(text.encode())
    pieces = len(tokens) - 2
    assert found["nats_per_token"] == pytest.approx(math.log(50257), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(math.log2(50257) * pieces / (2 * len(text.encode())), rel=1e-6)


def test_same_numbers_whatever_the_batch() -> None:
    net, tokens = small(), text_tokens()[:401]
    one = val.measure(net, tokens, 64, 32, True, "fp32", batch_tokens=64)
    two = val.measure(net, tokens, 64, 32, True, "fp32", batch_tokens=4096)
    assert one.nll == pytest.approx(two.nll, rel=1e-7)
    np.testing.assert_array_equal(one.position_count, two.position_count)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    data = write_shards(tmp_path / "data", text_tokens()[:2000])
    return write_run(tmp_path / "run", trained(), data)


def test_the_runs_own_number_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["val", str(run), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    own = read_json(run / "result.json")
    assert "equal to the run's own" in out
    data = own["val_protocol"]["data"][:12]
    assert f"protocol data={data} tokens=768 seq_len=192 document_mask=False dtype=fp32\n" in out
    (file,) = run.glob("val-*.json")
    found = read_json(file)
    assert found["protocol"] == own["val_protocol"]
    assert found["nats_per_token"] == pytest.approx(own["val_loss"], abs=1e-9)
    assert (file.with_suffix(".png")).stat().st_size > 5000 and (file.with_suffix(".svg")).is_file()


def test_a_wrong_number_in_the_run_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = json.loads((run / "result.json").read_text())
    own["val_loss"] += 0.01
    (run / "result.json").write_text(json.dumps(own))
    assert main(["val", str(run), "--device", "cpu"]) == 1
    assert "NOT equal" in capsys.readouterr().out


def test_other_protocols_are_other_numbers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stated protocol is printed, stored under its own name, and never called the run's own number."""
    args = [
        "val",
        str(run),
        "--device",
        "cpu",
        "--tokens",
        "500",
        "--seq-len",
        "96",
        "--stride",
        "24",
        "--document-mask",
    ]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "run's own" not in out and "document_mask=cut" in out and "stride=24" in out and "bits per byte" in out
    assert main(["val", str(run), "--device", "cpu"]) == 0
    assert len({read_json(f)["nats_per_token"] for f in run.glob("val-*.json")}) == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--tokens", "5000"], "2,000 val tokens, 5,001 are needed; use --tokens 1920"),
        (["--seq-len", "500"], "the model's context is 192 tokens"),
        (["--stride", "300"], "--stride 300 is above --seq-len 192"),
        (["--tokens", "0"], "'0' is not a whole number above 0"),
        (["--data", "nowhere"], "no *_val_*.bin shards in nowhere"),
        (["--save", "no/such/folder/x.json"], "no/such/folder is no folder"),
    ],
)
def test_bad_input(run: Path, args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.iterdir())
    try:
        code = main(["val", str(run), "--device", "cpu", *args])
    except SystemExit as stop:
        code = stop.code
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1 and err.startswith("error: ") and said in err, err
    assert sorted(run.iterdir()) == before


def test_exchanged_val_shards_are_noticed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = next((run.parent / "data").glob("*.bin"))
    content = bytearray(shard.read_bytes())
    content[1024 + 40] ^= 1
    shard.write_bytes(content)
    assert main(["val", str(run), "--device", "cpu"]) == 2
    assert "not the val tokens of this run (data differ" in capsys.readouterr().err


def test_sizes_of_the_published_protocol() -> None:
    """10,485,760 tokens in rows of 1024 are 10,240 windows; the last recipe's budget divides evenly."""
    cfg = RECIPES["gpt2"]
    made = val.windows(cfg.val_tokens, cfg.seq_len, cfg.seq_len)
    assert len(made) == 10_240 and made[-1] == (cfg.val_tokens - 1024, 1024, 1024)
