"""Document masks and windows: every kernel against one written out pair by pair, and the whole model with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import train_gpt2
from eval.__main__ import main as evaluate
from tests.train_support import flags, result, rows, shard_bytes, text
from train_gpt2 import EOT, GPT, RECIPES, Config, Exit, UserError, attend, main, parse_args


@pytest.fixture(autouse=True)
def _own_flash_attention() -> Iterator[None]:
    yield
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


T = 384  # three of FlexAttention's blocks


def config(**changes: Any) -> Config:
    small = {"n_layer": 2, "n_head": 2, "n_embd": 64, "seq_len": T, "padded_vocab": 50304, "value_embeds": 0}
    return dataclasses.replace(RECIPES["speedrun"], **(small | {"precision": "fp32", "head_precision": "same"} | changes))


def some_tokens(seed: int = 0) -> Tensor:
    """(3, T) tokens: documents of 1 to 200 tokens, one row that is a single document, one that starts within one."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(50256, (3, T), generator=generator)
    idx[0, [0, 1, 5, 127, 128, 255, 256, 300]] = EOT
    idx[1, [200, 383]] = EOT
    return idx


SIZES = {"vocab_size": 50257, "padded_vocab": 50304, "seq_len": 128, "micro_batch": 1, "val_tokens": 384, "value_embeds": 0}


def documents(folder: Path) -> Path:
    """Shards of documents of 70 tokens, 35 in the validation, for runs of SIZES."""
    folder.mkdir()
    for split, count, length in (("train", 3000, 70), ("val", 500, 35)):
        tokens = text(1, count)
        tokens[::length] = EOT
        (folder / f"documents_{split}_000000.bin").write_bytes(shard_bytes(tokens))
    return folder


def by_pairs(q: Tensor, k: Tensor, v: Tensor, idx: Tensor, documents: bool, window: int, scale: float) -> Tensor:
    """Attention in float64, from the definition: a loop over queries, with the keys that each may see listed."""
    out = torch.zeros_like(q, dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    for b in range(len(idx)):
        start = 0
        for t in range(idx.size(1)):
            if documents and idx[b, t] == EOT:
                start = t
            low = max(start, t - window + 1) if window else start
            weights = torch.einsum("hd,khd->hk", q[b, t], k[b, low : t + 1]).mul(scale).softmax(-1)
            out[b, t] = torch.einsum("hk,khd->hd", weights, v[b, low : t + 1])
    return out


CASES = [(True, 0), (False, 100), (True, 100), (True, 1), (False, 128), (True, 257), (False, T), (False, 10_000)]


@pytest.mark.parametrize("documents, window", CASES)
def test_sdpa_with_a_mask_is_attention_pair_by_pair(documents: bool, window: int) -> None:
    model = GPT(config(document_mask=documents, window=window))
    idx = some_tokens()
    q, k, v = torch.randn(3, 3, T, 2, 32, generator=torch.Generator().manual_seed(1)).unbind()
    mask = model.attention_mask(idx)
    assert mask is None or mask.ndim == (4 if documents else 2)
    assert (mask is None) == (not documents and window >= T)
    want = by_pairs(q, k, v, idx, documents, window, 0.2)
    torch.testing.assert_close(attend(q, k, v, mask, 0.2).double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("documents, window", CASES)
def test_flex_and_varlen_masks_allow_the_same_pairs_as_sdpa(documents: bool, window: int) -> None:
    """FlexAttention has no backward on a CPU and varlen no kernel: what their masks say is compared, pair by pair."""
    model = GPT(config(document_mask=documents, window=window, precision="bf16"))
    idx = some_tokens(2)
    mask = model.attention_mask(idx)
    want = torch.ones(3, T, T).tril().bool() if mask is None else mask[:, 0] if documents else mask.expand(3, T, T)
    b, q, k = torch.meshgrid(torch.arange(3), torch.arange(T), torch.arange(T), indexing="ij")

    model.kernel = "flex"
    flex = model.attention_mask(idx)
    assert torch.equal(flex.mask_mod(b, None, q, k), want)
    # A block is listed if any pair in it is allowed, and as full, where no pair is looked at, only if all are.
    blocks = want.view(3, T // 128, 128, T // 128, 128)
    every = blocks.all(4).all(2)
    some = blocks.any(4).any(2) & ~every
    for numbers, listed, expected in (
        (flex.kv_num_blocks, flex.kv_indices, some),
        (flex.full_kv_num_blocks, flex.full_kv_indices, every),
    ):
        for i in range(3):
            for row in range(T // 128):
                got = listed[i, 0, row, : numbers[i, 0, row]].tolist()
                assert sorted(got) == expected[i, row].nonzero().flatten().tolist()

    model.kernel = "varlen"
    counted = model.attention_mask(idx)
    model.most_documents = 50
    varlen = model.attention_mask(idx)
    assert len(varlen.bounds) == 50 + 3 + 1 and varlen.bounds.unique().tolist() == counted.bounds.unique().tolist()
    calls: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, *rest, **more: calls.append((rest, more)) or q)
        x = torch.zeros(3, T, 2, 32)
        assert attend(x, x, x, varlen, 0.5).shape == x.shape
    (_, _, *rest), more = calls[0]
    assert rest[0] is rest[1] is varlen.bounds and rest[2:] == [T, T]
    assert more == {"scale": 0.5, "window_size": (window - 1 if 0 < window < T else -1, 0)}
    assert varlen.bounds.dtype == torch.int32 and varlen.bounds[0] == 0 and varlen.bounds[-1] == 3 * T
    document = torch.searchsorted(varlen.bounds, torch.arange(3 * T, dtype=torch.int32), right=True).view(3, T)
    same = document[:, :, None] == document[:, None, :]
    assert torch.equal(same & (k <= q) & (q - k < varlen.window), want)


def test_flex_forward_is_sdpa_with_the_mask() -> None:
    model = GPT(config(document_mask=True, window=100))
    idx = some_tokens(3)
    q, k, v = torch.randn(3, 3, T, 2, 32, generator=torch.Generator().manual_seed(1)).unbind()
    want = attend(q, k, v, model.attention_mask(idx), 0.2)
    model.kernel = "flex"
    with torch.no_grad(), pytest.warns(UserWarning, match="flex_attention called without torch.compile"):
        torch.testing.assert_close(attend(q, k, v, model.attention_mask(idx), 0.2), want, rtol=1e-4, atol=1e-5)


def test_documents_do_not_see_one_another_and_a_window_ends() -> None:
    """Through a whole model, whose smear and key offset are off: they reach back one token, also over a document's start."""

    def logits(model: GPT, idx: Tensor) -> Tensor:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.ndim >= 2 and "gate" not in name:  # zero-initialised otherwise
                    p.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
            return model.logits(idx)

    idx = some_tokens(4)[1:2]
    other = idx.clone()
    other[0, :200] = (other[0, :200] + 1) % 50256
    model = GPT(config(document_mask=True, smear=False, key_offset=False))
    assert torch.equal(logits(model, idx)[:, 200:], logits(model, other)[:, 200:])
    assert not torch.allclose(logits(model, idx)[:, 199], logits(model, other)[:, 199])
    open_ended = GPT(config(smear=False, key_offset=False))
    assert not torch.allclose(logits(open_ended, idx)[:, 210], logits(open_ended, other)[:, 210])
    windowed = GPT(config(window=50, smear=False, key_offset=False))  # two layers see 2 x 49 tokens back
    assert torch.allclose(logits(windowed, idx)[:, 298:], logits(windowed, other)[:, 298:], atol=1e-6)
    assert not torch.allclose(logits(windowed, idx)[:, 290], logits(windowed, other)[:, 290], atol=1e-6)


def test_key_offset_takes_the_still_channels_of_the_token_before() -> None:
    cfg = config(key_offset=True, n_head=1, n_embd=64)
    block = GPT(cfg).blocks[0].attn
    seen: list[Tensor] = []
    whole = train_gpt2.attend

    def spy(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Tensor:
        seen.append(k)
        return whole(q, k, v, mask, scale)

    x, rope = torch.randn(1, T, 64, generator=torch.Generator().manual_seed(0)), train_gpt2.rotary_table(T, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt2, "attend", spy)
        block(x, None, rope, None)
        block.key_offset = False
        block(x, None, rope, None)
    shifted, plain = (k[0, :, 0] for k in seen)
    still = [c for c in range(64) if (rope[1, :, c % 32] == 0).all()]  # no sine at any position: not rotated
    assert len(still) == 32
    moving = [c for c in range(64) if c not in still]
    assert torch.equal(shifted[:, moving], plain[:, moving])
    assert torch.equal(shifted[1:, still], plain[:-1, still]) and torch.equal(shifted[0], plain[0])


def test_masks_are_refused_where_they_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="flex needs compiled blocks and a --seq-len that is a multiple of 128"):
        parse_args(["speedrun", "--attention", "flex", "--seq-len", "100", "--val-tokens", "1000"])
    for name, why in {"flex": r" \(FlexAttention has no backward on a CPU\)", "fa3": "", "fa4": ""}.items():
        with pytest.raises(UserError, match=f"--attention {name} needs a CUDA device{why}$"):
            train_gpt2.choose_attention(dataclasses.replace(config(), attention=name), torch.device("cpu"))
    with pytest.raises(UserError, match="fp8-rows needs --n-embd"):
        parse_args(["speedrun", "--head-precision", "fp8-rows", "--n-embd", "24", "--n-head", "2"])
    with pytest.raises(UserError, match="key-offset needs --position rotary"):
        parse_args(["gpt2", "--key-offset"])
    with pytest.raises(UserError, match="--tied-steps 4000 is for a head of its own: add --tied-steps 0"):
        parse_args(["speedrun", "--tied-head"])
    with pytest.raises(UserError, match="document-mask needs a --vocab-size above 50256"):
        parse_args(["speedrun", "--document-mask", "--vocab-size", "50256"])


def test_a_masked_run_resumes_exactly_and_is_measured_again_by_its_own_protocol(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = documents(tmp_path / "data")

    def train(name: str, **changes: Any) -> list[float]:
        assert main(flags("speedrun", folder, tmp_path / name, **(SIZES | changes))) == Exit.OK
        return [row["loss"] for row in rows(tmp_path / name, "train")]

    masked = {"window": 20, "document_mask": True, "key_offset": True, "checkpoint_every": 2}
    whole = train("run", **masked)
    assert result(tmp_path / "run")["val_protocol"]["document_mask"] is True
    capsys.readouterr()
    for extra in ([], ["--document-mask"]):
        assert evaluate(["val", str(tmp_path / "run"), "--device", "cpu", *extra]) == 0
    assert "equal to the run's own" in (said := capsys.readouterr().out) and "document_mask=True" in said
    again = train("run", **masked, resume=4)
    assert again[-2:] == whole[-2:] and len(again) == 8
    assert len({tuple(train("plain")), tuple(train("window", window=20)), tuple(whole[:6])}) == 3


def test_the_bound_on_documents_holds_for_any_start(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).choice([5, EOT], 1000, p=[0.9, 0.1])
    tokens[-40:] = tokens[:40] = EOT  # where the stream wraps
    for i, part in enumerate((tokens[:300], tokens[300:])):
        (tmp_path / f"x_train_{i:06d}.bin").write_bytes(shard_bytes(part))
    stream = train_gpt2.TokenStream(train_gpt2.find_shards(tmp_path, "train"))
    for span in (1, 7, 128, 1000):
        exact = max(int((stream.slice(at, span) == EOT).sum()) for at in range(1000))
        assert exact <= train_gpt2.most_documents(stream, span, 10_000) <= 2 * exact
    dense = np.full(1000, 5)
    dense[500:] = EOT  # beyond what will be read
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "x_train_000000.bin").write_bytes(shard_bytes(dense))
    assert train_gpt2.most_documents(train_gpt2.TokenStream(train_gpt2.find_shards(tmp_path / "y", "train")), 50, 400) == 0


@pytest.mark.parametrize("window", [0, 20, 300, 1024, 4096])
@pytest.mark.parametrize("documents", [False, True])
def test_the_trial_of_a_backend_has_a_mask_where_the_run_has_one(
    documents: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: list[Any] = []
    whole = train_gpt2.attend
    monkeypatch.setattr(train_gpt2, "attend", lambda q, k, v, mask, scale: masks.append(mask) or whole(q, k, v, mask, scale))
    cfg = config(document_mask=documents, window=window, seq_len=1024)
    operator, kernel = train_gpt2.choose_attention(cfg, torch.device("cpu"))
    masked = documents or 0 < window < 1024
    assert kernel == "sdpa" and "flash" in operator and (masks[0] is None) == (not masked)
    if masked and window:
        seen = masks[0].reshape(-1, 256, 256)[0, -1].sum()  # keys of the last query
        assert seen == (min(window, 128) if window < 1024 else 256)


def test_fp32_takes_a_mask_of_sdpa_whatever_the_kernel_and_a_graphics_card_states_no_mfu_for_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = GPT(config(document_mask=True))
    model.kernel = "varlen"
    assert isinstance(model.attention_mask(some_tokens()), Tensor)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    for documents, peak in ((False, 989.4e12), (True, None)):
        cfg = config(document_mask=documents, precision="bf16")
        assert train_gpt2.peak_flops(torch.device("cuda"), cfg) == peak


@pytest.mark.parametrize("operator, kernel", [("varlen_attn", "varlen"), ("flex_attention", "flex"), ("math", "sdpa")])
def test_the_trainer_uses_the_kernel_that_was_chosen(
    operator: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = documents(tmp_path / "data")
    monkeypatch.setattr(train_gpt2, "choose_attention", lambda *_: (operator, kernel))
    monkeypatch.setattr(train_gpt2.Trainer, "warm_up", lambda self: None)
    trainer = train_gpt2.Trainer(
        parse_args(flags("speedrun", folder, tmp_path / "run", **SIZES, val_batch=8, document_mask=True))
    )
    trainer.setup()
    assert trainer.model.kernel == kernel
    # A batch of 1,024 tokens of validation holds the most: 30 documents, counted over two such spans.
    assert trainer.model.most_documents == (None if kernel != "varlen" else pytest.approx(66, abs=4))
    trainer.checkpoints.close()
    trainer.lock.close()


def test_flops_and_memory_plans_know_the_window() -> None:
    from harness.plan import config_model

    narrow, wide = config(window=100), config()
    per_token = 12 * 2 * 64 * (T - 100)
    assert train_gpt2.flops_per_token(wide) - train_gpt2.flops_per_token(narrow) == per_token
    for cfg in (narrow, wide):
        model = config_model(cfg)
        assert model.flops_per_token == train_gpt2.flops_per_token(cfg)
        assert model.matmul_parameters == train_gpt2.parameter_count(cfg)["matmul"]


def test_the_largest_logit_is_one_that_the_mask_allows() -> None:
    q, k = torch.zeros(2, 1, 4, 1, 2).unbind()
    q[0, :, 0, 0], k[0, :, 0, 0] = 1.0, torch.tensor([9.0, 1.0, 2.0, 3.0])  # the first key is out of the window of the last
    seen = []
    for mask in (None, torch.eye(4).bool(), torch.eye(4).bool()[None, None]):
        with train_gpt2.LargestLogit() as largest:
            attend(q, k, k, mask, 1.0)
        seen.append(largest.value)
    assert seen == [9.0, 9.0, 9.0]
    q[0, 0] = 0  # only later queries are left
    with train_gpt2.LargestLogit() as largest:
        attend(q, k, k, torch.eye(4).bool(), 1.0)
    assert largest.value == 3.0


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "efficient", "flex", "fa3", "fa4"])
@pytest.mark.parametrize("documents, window", CASES[:3] + CASES[-2:-1])
def test_kernels_and_their_gradients_are_attention_pair_by_pair(kernel: str, documents: bool, window: int) -> None:
    cfg = config(document_mask=documents, window=window, attention=kernel, precision="bf16", n_embd=256)
    device = torch.device("cuda", 0)
    try:
        _, chosen = train_gpt2.choose_attention(cfg, device)
    except UserError as e:
        if kernel not in ("fa3", "fa4"):  # those need to be installed, and a torch that passes windows on to them
            raise
        pytest.skip(str(e))
    model, idx = GPT(cfg).to(device), some_tokens().to(device)
    model.kernel = chosen
    inputs = torch.randn(3, 3, T, 2, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    call = torch.compile(attend, fullgraph=True, dynamic=False)
    results = []
    for make in (
        lambda q, k, v: call(q, k, v, model.attention_mask(idx), 0.12),
        lambda q, k, v: by_pairs(q, k, v, idx.cpu(), documents, window, 0.12),
    ):
        where = device if not results else "cpu"
        q, k, v = (x.to(where).requires_grad_() for x in inputs)
        y = make(q, k, v)
        y.backward(torch.ones_like(y) * torch.linspace(-1, 1, 128, device=where).to(y.dtype))
        results.append([t.double().cpu() for t in (y, q.grad, k.grad, v.grad)])
    for name, got, want in zip(("y", "dq", "dk", "dv"), *results, strict=True):
        assert (got - want).norm() < 0.01 * want.norm(), name
