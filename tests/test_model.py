"""The model against independent definitions: transformers' GPT-2, float64 cross entropy, and what must hold of any GPT."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt2
from train_gpt2 import GPT, RECIPES, Config, HeadLoss, cross_entropy_, head_nll, relu2_mlp

SMALL = {
    "gpt2": dataclasses.replace(RECIPES["gpt2"], n_layer=2, n_head=4, n_embd=64, seq_len=32, precision="fp32"),
    "speedrun": dataclasses.replace(
        RECIPES["speedrun"],
        n_layer=6,
        n_head=2,
        n_embd=32,
        seq_len=32,
        precision="fp32",
        head_precision="same",
    ),
    "sample": dataclasses.replace(RECIPES["sample"], n_layer=4, n_head=2, n_embd=32, seq_len=32),
}


def tiny(recipe: str, **changes: object) -> Config:
    """The recipe's architecture over 200 real and 56 padded ids."""
    return dataclasses.replace(SMALL[recipe], **({"vocab_size": 200, "padded_vocab": 256} | changes))  # type: ignore[arg-type]


def awake(model: GPT, seed: int = 0) -> GPT:
    """Random values in every parameter, so that nothing is hidden by a gate, mix or projection that starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * (0.3 if p.ndim < 2 else p.shape[-1] ** -0.5))
    return model


def random_ids(cfg: Config, rows: int, seed: int = 1) -> Tensor:
    return torch.randint(cfg.vocab_size, (rows, cfg.seq_len), generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------- against transformers


def test_gpt2_logits_loss_and_gradients_equal_transformers() -> None:
    """Over all 50,257 ids, with the same random weights and biases. fp32 on both sides: sums in another order."""
    from transformers import GPT2Config, GPT2LMHeadModel

    cfg = SMALL["gpt2"]
    model = awake(GPT(cfg))
    theirs = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_head=4,
            n_embd=64,
            n_positions=32,
            vocab_size=50257,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
        )
    ).train()
    names = {"wte.weight": "transformer.wte.weight", "wpe.weight": "transformer.wpe.weight"}
    names |= {f"norm_f.{k}": f"transformer.ln_f.{k}" for k in ("weight", "bias")}
    for i in range(2):
        for ours, hf in {
            "norm1": "ln_1", "norm2": "ln_2", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj", "mlp.fc": "mlp.c_fc",
            "mlp.proj": "mlp.c_proj",
        }.items():  # fmt: skip
            names |= {f"blocks.{i}.{ours}.{k}": f"transformer.h.{i}.{hf}.{k}" for k in ("weight", "bias")}
    mine, other = dict(model.named_parameters()), dict(theirs.named_parameters())
    assert set(names) == set(mine) and set(names.values()) == set(other), "a parameter has no counterpart"

    def as_theirs(name: str, t: Tensor) -> Tensor:
        if name == "wte.weight":
            return t[:50257]
        conv1d = name.startswith("blocks.") and name.endswith(".weight") and ".norm" not in name  # kept transposed by them
        return t.T if conv1d else t

    with torch.no_grad():
        for name, hf in names.items():
            other[hf].copy_(as_theirs(name, mine[name]))
    idx = random_ids(cfg, 3)
    idx[0, :4] = torch.tensor([50256, 50255, 0, 50256])
    targets = random_ids(cfg, 3, seed=2)
    targets[1, :2] = torch.tensor([50256, 0])

    logits = theirs(idx).logits
    assert logits.shape == (3, 32, 50257)
    torch.testing.assert_close(model.logits(idx), logits, rtol=1e-5, atol=1e-4)
    nll = F.cross_entropy(logits.view(-1, 50257), targets.view(-1), reduction="none")
    torch.testing.assert_close(model.nll(idx, targets).view(-1), nll, rtol=1e-5, atol=1e-5)
    without = model.nll(idx, targets)
    model.one_graph = True
    assert torch.equal(model.nll(idx, targets), without) and not model.nll(idx, targets).requires_grad
    loss = model(idx, targets)
    torch.testing.assert_close(loss, nll.sum(), rtol=1e-6, atol=0)
    (loss / 96).backward()
    (nll.sum() / 96).backward()
    for name, hf in names.items():
        assert mine[name].grad is not None and other[hf].grad is not None
        size = other[hf].grad.abs().max().item()  # type: ignore[union-attr]
        torch.testing.assert_close(
            as_theirs(name, mine[name].grad),
            other[hf].grad,
            rtol=1e-4,
            atol=1e-5 * size,
            msg=lambda m, n=name: f"{n}: {m}",
        )  # type: ignore[arg-type]
    assert not mine["wte.weight"].grad[50257:].any(), "padded rows got a gradient"  # type: ignore[index]


# ------------------------------------------------------------------------------- any recipe


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_later_tokens_never_change_earlier_predictions(recipe: str) -> None:
    cfg = tiny(recipe)
    model = awake(GPT(cfg)).eval()
    idx = random_ids(cfg, 4)
    before = model.logits(idx)
    for t in (1, 2, 11, 30, 31):
        changed = idx.clone()
        changed[:, t:] = (changed[:, t:] + 7) % cfg.vocab_size
        after = model.logits(changed)
        assert torch.equal(after[:, :t], before[:, :t]), f"a change at {t} is seen before it"
        assert ((after[:, t] - before[:, t]).abs().amax(-1) > 1e-3).all(), f"a change at {t} is not seen at {t}"
    # The last prediction depends on the first token, and so on every one in between.
    changed = idx.clone()
    changed[:, 0] = (changed[:, 0] + 7) % cfg.vocab_size
    assert ((model.logits(changed)[:, -1] - before[:, -1]).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_rows_of_a_batch_do_not_see_each_other(recipe: str) -> None:
    cfg = tiny(recipe)
    model = awake(GPT(cfg)).eval()
    idx = random_ids(cfg, 3)
    alone = torch.cat([model.logits(row[None]) for row in idx])
    torch.testing.assert_close(model.logits(idx), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_shorter_contexts_give_the_same_predictions(recipe: str) -> None:
    cfg = tiny(recipe)
    model = awake(GPT(cfg)).eval()
    idx = random_ids(cfg, 2)
    torch.testing.assert_close(model.logits(idx[:, :9]), model.logits(idx)[:, :9], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="33 positions"):
        model.logits(torch.zeros(1, 33, dtype=torch.int64))


@pytest.mark.parametrize("recipe", ["speedrun", "sample"])
def test_first_loss_is_the_uniform_one_where_the_head_starts_at_zero(recipe: str) -> None:
    cfg = dataclasses.replace(SMALL[recipe], tied_steps=0)
    model, idx = GPT(cfg), random_ids(cfg, 2)
    assert abs(math.log(50257) - 10.8249) < 5e-5
    assert model(idx, idx).item() / idx.numel() == pytest.approx(math.log(50257), rel=1e-6)
    assert not model.logits(idx).any() and model.logits(idx).shape == (2, 32, 50257)


def test_first_loss_of_gpt2_is_near_the_uniform_one() -> None:
    """Random tied embeddings of standard deviation 0.02 and width 64 give logits of about 0.16: e^0.013 of slack."""
    model, idx = GPT(SMALL["gpt2"]), random_ids(SMALL["gpt2"], 4)
    assert model(idx, idx).item() / idx.numel() != pytest.approx(math.log(50257), abs=1e-4)
    targets = random_ids(SMALL["gpt2"], 4, seed=5)
    assert model(idx, targets).item() / idx.numel() == pytest.approx(math.log(50257), abs=0.1)


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_padded_ids_never_count(recipe: str) -> None:
    """Whatever the padded rows of embedding and head hold, nothing that leaves the model changes, nor do they get gradients."""
    cfg = tiny(recipe)
    model, idx, targets = awake(GPT(cfg)), random_ids(cfg, 2), random_ids(cfg, 2, seed=2)
    targets[0, :3] = -1

    def everything() -> list[Tensor]:
        model.zero_grad()
        loss = model(idx, targets)
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [loss.detach(), model.logits(idx).detach(), model.nll(idx, targets), *grads]

    before = everything()
    padded = [p for n, p in model.named_parameters() if n.startswith(("wte", "head", "value_tables"))]
    assert len(padded) == (1 if cfg.tied_head else 2) + cfg.value_embeds
    for p in padded:
        assert p.grad is not None and not p.grad[200:].any()
        with torch.no_grad():
            p[200:] = 50.0
    for a, b in zip(before, everything(), strict=True):
        assert torch.equal(a, b)
    assert before[1].size(-1) == 200
    # The logits are a distribution over the real ids alone, and the losses are its.
    log_p = F.log_softmax(before[1].double(), -1)
    expected = -log_p.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1) * (targets >= 0)
    torch.testing.assert_close(before[2].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(before[0].double(), expected.sum(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_parameter_gets_a_gradient(recipe: str) -> None:
    model, idx = awake(GPT(tiny(recipe))), random_ids(tiny(recipe), 2)
    model(idx, random_ids(tiny(recipe), 2, seed=3)).backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not silent


def test_initial_weights_follow_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = GPT(tiny("sample", seed=3))
    torch.manual_seed(2)
    again, other = GPT(tiny("sample", seed=3)), GPT(tiny("sample", seed=4))
    a, b, c = (m.state_dict() for m in (first, again, other))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["wte.weight"], c["wte.weight"])


def test_gpt2_initial_weights_have_the_published_sizes() -> None:
    """0.02 everywhere, residual projections divided by sqrt(2 L): 5 standard errors of a standard deviation."""
    model = GPT(dataclasses.replace(SMALL["gpt2"], n_layer=3))
    for name, p in model.named_parameters():
        if p.ndim == 2:
            expected = 0.02 / math.sqrt(6) if name.endswith("proj.weight") else 0.02
            assert p.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * p.numel())), name
        else:
            assert torch.equal(p, torch.ones_like(p) if name.endswith("weight") else torch.zeros_like(p)), name


class Attentions(TorchDispatchMode):
    """Counts the attention forwards that run inside it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.count += "scaled_dot_product" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["selective", "block"])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_recomputation_changes_no_bit_and_selective_spares_attention(
    recipe: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`speedrun` with the fused MLP, in its form on the CPU, of which selective recomputation keeps the result."""
    cfg = tiny(recipe)
    plain, runs = train_gpt2.relu2_product, list[bool]()
    monkeypatch.setattr(train_gpt2, "fuses_mlp", lambda cfg, x: recipe == "speedrun")
    monkeypatch.setattr(train_gpt2, "relu2_product", lambda a, b, kept: (runs.append(kept is not None), plain(a, b, kept))[1])
    idx, targets = random_ids(cfg, 2), random_ids(cfg, 2, seed=2)
    models = [awake(GPT(cfg)) for _ in range(2)]
    for block in models[1].blocks:
        block.forward = train_gpt2.recomputing(block.forward, how)
    again = []
    for model in models:
        loss = model(idx, targets)
        with Attentions() as counted:
            loss.backward()
        again.append(counted.count)
    assert again == [0, 0 if how == "selective" else cfg.n_layer]
    if recipe == "speedrun":  # forward products: of both models, and those that were made again
        assert runs.count(False) == cfg.n_layer * (2 if how == "selective" else 3) and runs.count(True) == cfg.n_layer * 2
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert a.grad is not None and torch.equal(a.grad, b.grad), name
    assert torch.equal(models[0].nll(idx, targets), models[1].nll(idx, targets))


# ------------------------------------------------------------------------------- counts


def test_parameter_and_flop_counts_of_the_recipes() -> None:
    """gpt2: 124,439,808 parameters of GPT-2 small and 47 padded rows; 6 N + 12 L C T by hand."""
    gpt2 = RECIPES["gpt2"]
    assert train_gpt2.parameter_count(gpt2)["total"] == 124_439_808 + 47 * 768
    matmul = 12 * 12 * 768**2 + 50304 * 768
    assert train_gpt2.parameter_count(gpt2)["matmul"] == matmul
    assert train_gpt2.flops_per_token(gpt2) == 6 * matmul + 12 * 12 * 768 * 1024
    for recipe in ("speedrun", "sample"):
        cfg = tiny(recipe)
        in_blocks = 12 * cfg.n_layer * 32**2 + (cfg.n_layer * 12 * cfg.n_head if cfg.attn_gate else 0)
        assert train_gpt2.parameter_count(cfg)["matmul"] == in_blocks + 256 * 32
        assert train_gpt2.parameter_count(cfg)["total"] == sum(p.numel() for p in GPT(cfg).parameters())


def test_no_mfu_for_a_device_whose_peak_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train_gpt2.peak_flops(torch.device("cpu"), RECIPES["gpt2"]) is None
    cuda = torch.device("cuda", 0)
    # Names as the driver reports them; dense bf16 TFLOP/s of the vendor's datasheets.
    for name, peak in {
        "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756.0, "NVIDIA H200": 989.4, "NVIDIA GH200 480GB": 989.4,
        "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA A100 80GB PCIe": 312.0, "NVIDIA L4": 121.0, "NVIDIA L40S": 362.0,
        "NVIDIA L40": None, "NVIDIA H20": None, "NVIDIA GeForce RTX 3090 Ti": None, "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA GeForce RTX 4090": 165.2, "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None, "Tesla V100-SXM2-16GB": None,
        "NVIDIA H200 NVL": 835.5, "NVIDIA A10": None, "AMD Instinct MI300X": None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_, n=name: n)
        found = train_gpt2.peak_flops(cuda, RECIPES["gpt2"])
        assert (None if found is None else found / 1e12) == (None if peak is None else pytest.approx(peak, rel=2e-3)), name
        assert train_gpt2.peak_flops(cuda, dataclasses.replace(RECIPES["gpt2"], precision="fp32")) is None


# ------------------------------------------------------------------------------- loss


def loss_case(cap: float, n: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    """x (N, 24), w (256, 24) of which 200 rows are real, targets with gaps; N is not a multiple of the chunks."""
    generator = torch.Generator().manual_seed(int(cap) + 1)
    x, w = torch.randn(n, 24, generator=generator), 2 * torch.randn(256, 24, generator=generator)
    targets = torch.randint(200, (n,), generator=generator)
    targets[::7] = -1
    targets[-3:] = -1
    targets[:2] = torch.tensor([0, 199])
    w[200:] *= 100  # padded rows would dominate if they counted
    return x, w, targets


def reference(x: Tensor, w: Tensor, targets: Tensor, cap: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token losses, and the gradients of 0.25 times their sum, in float64 by torch's own cross entropy."""
    x64, w64 = x.double().requires_grad_(), w.double().requires_grad_()
    z = x64 @ w64[:200].T
    if cap:
        z = cap * torch.tanh(z / cap)
    nll = F.cross_entropy(z, targets, ignore_index=-1, reduction="none")
    dx, dw = torch.autograd.grad(0.25 * nll.sum(), (x64, w64))
    return nll.detach(), dx, dw, z.detach()


@pytest.mark.parametrize("cap", [0.0, 15.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_head_loss_equals_float64_cross_entropy(cap: float, precision: str) -> None:
    """fp32 to its rounding; 16-bit types to theirs (the reference sees the rounded inputs, logits are kept in 16 bits)."""
    x, w, targets = loss_case(cap)
    dtype = train_gpt2.COMPUTE_DTYPE[precision]
    x16 = x.to(dtype)
    nll, dx, dw, z = reference(x16.float(), w.to(dtype).float(), targets, cap)
    xs, ws = x16.clone().requires_grad_(), w.clone().requires_grad_()
    loss = HeadLoss.apply(xs, ws, targets, 200, cap, "same")
    assert loss.dtype == torch.float32 and loss.shape == ()
    (0.25 * loss).backward()
    assert xs.grad.dtype == dtype and ws.grad.dtype == torch.float32  # type: ignore[union-attr]
    unit = {"fp32": 2e-6, "bf16": 2**-8, "fp16": 2**-11}[precision]
    size = z.abs().max().item()  # a logit's rounding error, which is the loss's
    torch.testing.assert_close(loss.double(), nll.sum(), rtol=max(unit, 1e-6), atol=0)
    for got, want in ((xs.grad, dx), (ws.grad, dw)):
        tolerance = (2e-5 if precision == "fp32" else 2 * unit * size) * want.abs().max().item()
        torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)  # type: ignore[union-attr]
    got = head_nll(x16, w, targets, 200, cap)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), nll, rtol=0, atol=(4e-6 if precision == "fp32" else 2 * unit) * max(1.0, size))
    assert not got[targets < 0].any() and not xs.grad[targets < 0].any() and not ws.grad[200:].any()  # type: ignore[index]


def test_fp8_logits_by_tensor_and_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """e4m3 keeps 3 bits of mantissa down to 2^-6: with a token and an id 1e5 times as large as the rest, one scale for the
    tensor (largest 448) leaves the rest below that; a scale a row keeps every product within 2^-4."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(300, 64, generator=generator).bfloat16(), torch.randn(208, 64, generator=generator).bfloat16() / 8
    x[7], w[5] = x[7] * 1e5, w[5] * 1e5
    targets = torch.randint(200, (300,), generator=generator)
    rest_x, rest_w = torch.arange(300) != 7, torch.arange(208) != 5
    z = x.double() @ w.double().T
    off = {}
    for by_row in (False, True):
        (x8, sx), (w8, sw) = (train_gpt2.to_fp8(t, by_row) for t in (x, w))
        assert sx.shape == ((300, 1) if by_row else ()) and x8.float().isfinite().all()
        z8 = (x8.double() * sx) @ (w8.double() * sw).T
        rest = rest_x[:, None] & rest_w
        off[by_row] = ((z8 - z)[rest].norm() / z[rest].norm()).item()
    assert off[True] < 2**-4 < off[False]
    want = F.cross_entropy(15 * torch.tanh(z[:, :200] / 15), targets, reduction="sum").item()
    xs, ws = x.clone().requires_grad_(), w.float().requires_grad_()
    loss = HeadLoss.apply(xs, ws, targets, 200, 15.0, "fp8-rows")
    loss.backward()
    assert loss.item() == pytest.approx(want, rel=5e-3) and xs.grad is not None and ws.grad is not None
    monkeypatch.setitem(train_gpt2.HEAD_CHUNK, "cpu", 64)
    assert HeadLoss.apply(x, w.float(), targets, 200, 15.0, "fp8-rows").item() == pytest.approx(loss.item(), rel=1e-6)
    assert abs(HeadLoss.apply(x, w.float(), targets, 200, 15.0, "fp8").item() - want) > 5 * abs(loss.item() - want)


@pytest.mark.parametrize("cap", [0.0, 15.0])
def test_a_head_all_in_fp8_against_float64(cap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of 3 bits of mantissa, logit gradients of 2: errors of a few percent, and no worse in several chunks."""
    x, w, targets = loss_case(cap)
    x, w = x[: len(x) // 16 * 16].bfloat16(), w.bfloat16().float()
    targets = targets[: len(x)]
    nll, dx, dw, _ = reference(x.float(), w, targets, cap)
    for chunk in (len(x), 64):
        monkeypatch.setitem(train_gpt2.HEAD_CHUNK, "cpu", chunk)
        xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
        loss = HeadLoss.apply(xs, ws, targets, 200, cap, "fp8-all")
        (0.25 * loss).backward()
        assert loss.item() == pytest.approx(nll.sum().item(), rel=1e-2)
        assert xs.grad.dtype == torch.bfloat16 and ws.grad.dtype == torch.float32  # type: ignore[union-attr]
        for got, want in ((xs.grad, dx), (ws.grad, dw)):
            assert 0.005 < ((got.double() - want).norm() / want.norm()).item() < 0.1  # type: ignore[union-attr]
            scale = (got.double() * want).sum() / want.square().sum()  # type: ignore[union-attr]
            assert scale.item() == pytest.approx(1, rel=0.01), "errors are spread around nothing"
        assert not xs.grad[targets < 0].any() and not ws.grad[200:].any()  # type: ignore[index]
    with torch.no_grad():
        assert HeadLoss.apply(x, w, targets, 200, cap, "fp8-all").item() == pytest.approx(loss.item(), rel=1e-5)


def test_the_fused_mlp_has_the_gradients_of_the_plain_one() -> None:
    """Central differences in float64 of its form on the CPU; the kernels are compared with that form below and on a GPU."""
    generator = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 3), (7, 3), (3, 7)))
    plain = F.relu(x @ up.T).square() @ down.T
    torch.testing.assert_close(relu2_mlp(x, up, down)[0], plain)
    assert torch.autograd.gradcheck(lambda *t: relu2_mlp(*t)[0], [t.requires_grad_() for t in (x, up, down)])
    with pytest.raises(AssertionError, match="no gradient of its own"):
        relu2_mlp(x, up, down)[1].sum().backward()
    torch.library.opcheck(relu2_mlp, (x, up, down), test_utils=("test_schema", "test_faketensor"))


CACHED = """
import torch, train_gpt2
from torch._dynamo.utils import counters
mlp = train_gpt2.MLP(train_gpt2.RECIPES["sample"])
x = torch.randn(2, 8, 256, requires_grad=True)
torch.compile(mlp.forward, fullgraph=True, dynamic=False)(x, True).sum().backward()
print({k: v for k, v in counters["aot_autograd"].items() if k.startswith("autograd_cache")})
"""


@pytest.mark.full
def test_a_compiled_block_with_the_fused_mlp_comes_from_disk_the_second_time(python: str, tmp_path: Path) -> None:
    """An autograd.Function in it would be compiled at every start; torch.compile keeps graphs with operators."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(train_gpt2.__file__).parent)}
    said = [
        subprocess.run([python, "-c", CACHED], cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    ]
    assert said == ["{'autograd_cache_miss': 1, 'autograd_cache_saved': 1}", "{'autograd_cache_hit': 1}"]


def test_extreme_logits_stay_finite() -> None:
    x = torch.full((2, 4), 100.0)
    w = torch.zeros(8, 4)
    w[0], w[1] = 100.0, -100.0  # logits of 4e4 and -4e4
    nll = head_nll(x, w, torch.tensor([0, 1]), 6, 0.0)
    torch.testing.assert_close(nll, torch.tensor([0.0, 8e4]))
    nll = head_nll(x, w, torch.tensor([0, 1]), 6, 15.0)
    torch.testing.assert_close(nll, torch.tensor([math.log1p(4 * math.exp(-15) + math.exp(-30)), 30.0]), rtol=1e-5, atol=1e-6)


def test_a_constant_factor_passes_through_and_no_gradient_is_made_without_need() -> None:
    x, w, targets = loss_case(15.0, n=64)
    with torch.no_grad():
        plain = HeadLoss.apply(x, w, targets, 200, 15.0, "same")
    grads = []
    for factor in (1.0, 3.0):
        xs = x.clone().requires_grad_()
        loss = HeadLoss.apply(xs, w, targets, 200, 15.0, "same")
        assert torch.equal(loss, plain)
        (factor * loss).backward()
        grads.append(xs.grad)
    torch.testing.assert_close(grads[1], 3 * grads[0])


INTERPRETED = """
import math, torch
import train_gpt2
assert train_gpt2.triton is not None
generator = torch.Generator().manual_seed(0)
for dtype, unit in ((torch.float32, 3e-6), (torch.bfloat16, 2**-7)):  # the interpreter truncates to bf16
    for cap in (0.0, 15.0):
        for grad in (True, False):
            z = (8 * torch.randn(8, 5120, generator=generator)).to(dtype)
            targets = torch.tensor([0, -1, 4999, 4096, -1, 7, 8, 9])
            nll = torch.full((8,), 7.0)
            z64 = z.double()[:, :5000].requires_grad_()
            capped = cap * torch.tanh(z64 / cap) if cap else z64
            want = torch.nn.functional.cross_entropy(capped, targets, ignore_index=-1, reduction="none")
            want.sum().backward()
            got = z.clone()
            lse = torch.empty(8)
            train_gpt2._cross_entropy_kernel[(8,)](
                got, targets, nll, lse, cap, 5000, 5120,
                HAS_CAP=cap > 0, GRAD=grad, FAST=False, BLOCK=4096, num_warps=8)
            torch.testing.assert_close(nll.double(), want.detach(), rtol=1e-5, atol=1e-5)
            if grad:
                torch.testing.assert_close(got[:, :5000].double(), z64.grad, rtol=unit, atol=3e-6)
                assert not got[:, 5000:].any() and not got[targets < 0].any()
            else:
                assert torch.equal(got, z)
            plain = z.clone()
            losses = train_gpt2.cross_entropy_(plain, targets, 5000, cap, grad)
            torch.testing.assert_close(nll, losses, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got, plain, rtol=unit, atol=3e-6)
            if not grad:  # the second kernel; the interpreter's own rounding to fp8 is rough
                g, gt = (torch.full(shape, 7.0).to(torch.float8_e5m2) for shape in ((8, 5120), (5120, 8)))
                train_gpt2._fp8_gradient_kernel[(2, 40)](
                    z, targets, lse, g.view(torch.uint8), gt.view(torch.int32), cap, 8, 5000, 5120, train_gpt2.FP8_UNIT,
                    HAS_CAP=cap > 0, FAST=False, ROWS=1, COLS=128, num_warps=8)
                got = g.double() / train_gpt2.FP8_UNIT
                assert (got[:, :5000] - z64.grad).norm() < 0.1 * z64.grad.norm()
                assert torch.equal(g.float().T, gt.float()) and not got[:, 5000:].any() and not got[targets < 0].any()

z, lse, targets = torch.zeros(4, 128), torch.zeros(4), torch.zeros(4, dtype=torch.int64)
z.view(torch.int32)[1, 5] = 0x7FFFFFFF  # the NaN that a device's conversions make
g, gt = (torch.zeros(shape, dtype=torch.float8_e5m2) for shape in ((4, 128), (128, 4)))
train_gpt2._fp8_gradient_kernel[(1, 1)](
    z, targets, lse, g.view(torch.uint8), gt.view(torch.int32), 0.0, 4, 128, 128, train_gpt2.FP8_UNIT,
    HAS_CAP=False, FAST=False, ROWS=1, COLS=128, num_warps=4)
assert g.float().isnan().nonzero().tolist() == [[1, 5]] and gt.float().isnan().nonzero().tolist() == [[5, 1]]

# Tiles that reach over the edges, in buffers with one row more than the kernel may touch.
N, V, vocab = 20, 208, 201
z, targets = 4 * torch.randn(N, V, generator=generator), torch.randint(vocab, (N,), generator=generator)
want = torch.softmax(z[:, :vocab].double(), 1) - torch.nn.functional.one_hot(targets, vocab)
lse = torch.logsumexp(z[:, :vocab], 1) / math.log(2)
g, gt = (torch.full((rows + 1, columns), 7.0).to(torch.float8_e5m2) for rows, columns in ((N, V), (V, N)))
train_gpt2._fp8_gradient_kernel[(1, 4)](
    z, targets, lse, g.view(torch.uint8), gt.view(torch.int32), 0.0, N, vocab, V, train_gpt2.FP8_UNIT,
    HAS_CAP=False, FAST=False, ROWS=32, COLS=64, num_warps=4)
got = g.double()[:N] / train_gpt2.FP8_UNIT
assert (got[:, :vocab] - want).norm() < 0.1 * want.norm() and not got[:, vocab:].any()
assert torch.equal(g[:N].float().T, gt[:V].float()) and (g[N].float() == 7).all() and (gt[V].float() == 7).all()

from triton.tools.tensor_descriptor import TensorDescriptor
def tiles(t, *shape):
    return TensorDescriptor.from_tensor(t, list(shape))
(M, N, K), sizes = (256, 512, 128), dict(BM=128, BN=256, BK=64, PROGRAMS=3)
x = torch.randn(M, K, generator=generator).half()  # products of bf16 are beyond the interpreter
up, down = (torch.randn(N, K, generator=generator) / 8).half(), (torch.randn(K, N, generator=generator) / 8).half()
want = train_gpt2.relu2_product(x.double(), up.double(), None)
got = torch.empty(M, N).half()
train_gpt2._relu2_kernel[(3,)](
    tiles(x, 128, 64), tiles(up, 256, 64), tiles(got, 128, 128), tiles(got, 128, 128), M, N, K, BACK=False, **sizes)
torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=1e-5)
bad = up.clone()
bad[3, 5] = math.nan
spoilt = torch.empty(M, N).half()
train_gpt2._relu2_kernel[(3,)](
    tiles(x, 128, 64), tiles(bad, 256, 64), tiles(spoilt, 128, 128), tiles(spoilt, 128, 128), M, N, K, BACK=False, **sizes)
assert spoilt[:, 3].isnan().all() and spoilt.isnan().sum() == M, "a NaN is no zero"
kept, back = got.clone(), torch.empty(M, N).half()
train_gpt2._relu2_kernel[(3,)](
    tiles(x, 128, 64), tiles(down, 64, 256), tiles(kept, 128, 128), tiles(back, 128, 128), M, N, K, BACK=True, **sizes)
want = train_gpt2.relu2_product(x.double(), down.double(), kept.double())
torch.testing.assert_close(back.double(), want, rtol=2e-3, atol=1e-3)
print("equal")
"""


def test_triton_kernel_equals_float64_and_the_plain_form(python: str, tmp_path: Path) -> None:
    """The GPU kernel in Triton's interpreter, in a process of its own since the switch is read at import.

    FAST, one instruction of the device for tanh, is the only part that it cannot run.
    """
    pytest.importorskip("triton")
    where = str(Path(train_gpt2.__file__).parent)
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": where}
    done = subprocess.run([python, "-c", INTERPRETED], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "equal"


def test_plain_cross_entropy_overwrites_logits_by_gradients_only_when_asked() -> None:
    z = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(40)
    kept = z.clone()
    cross_entropy_(kept, targets, 200, 0.0, grad=False)
    assert torch.equal(kept, z)
    cross_entropy_(kept, targets, 200, 0.0, grad=True)
    want = torch.softmax(z[:, :200].double(), 1) - F.one_hot(targets, 200)
    torch.testing.assert_close(kept[:, :200].double(), want, rtol=1e-5, atol=1e-7)
    assert not kept[:, 200:].any()
