"""Muon against float64 singular value decompositions, AdamW against torch's own, schedules against their closed forms."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

import train_gpt2
from train_gpt2 import (
    GPT,
    RECIPES,
    Config,
    Optimizer,
    assign_owners,
    learning_rate_factor,
    muon_momentum,
    muon_update,
    orthogonalize,
)

NO, YES = torch.zeros((), dtype=torch.bool), torch.ones((), dtype=torch.bool)


def scalar_map(s: Tensor) -> Tensor:
    """What five Polar Express steps do to a singular value s of a matrix of Frobenius norm 1, in float64.

    Amsel et al. 2025, algorithm 1: odd quintics, each but the last applied to s/1.01, after a division by 1.01.
    """
    coefficients = [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845749493, 0.4188073119525673),
    ]
    x = s / 1.01
    for i, (a, b, c) in enumerate(coefficients):
        y = x / 1.01 if i < 4 else x
        x = a * y + b * y**3 + c * y**5
    return x


# Over the values for which the five polynomials were made, [1e-3, 1], the map stays in this band; from 3e-3 on it
# stays above 0.876. A dense grid in float64, repeated in the first test.
BAND = (0.846, 1.124)
SHAPES = [(24, 24), (16, 64), (64, 16), (3, 40), (1, 8), (8, 1)]


def with_singular_values(rows: int, columns: int, values: Tensor, seed: int = 0) -> Tensor:
    """A float64 matrix with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    k = min(rows, columns)
    u = torch.linalg.qr(torch.randn(rows, k, generator=generator, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(columns, k, generator=generator, dtype=torch.float64))[0]
    return u * values @ v.T


def polar(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and V^T in float64, S of the matrix divided by its Frobenius norm."""
    u, s, vt = torch.linalg.svd(g.double() / g.double().norm(), full_matrices=False)
    return u, s, vt


def muon_reference(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor | None, lr: float, mu: float, wd: float, beta2: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One matrix in float64 by the written rules: Nesterov momentum, U f(S) V^T, NorMuon, cautious decay, step."""
    p, g, m = p.double(), g.double(), m.double()
    m = mu * m + (1 - mu) * g
    nesterov = mu * m + (1 - mu) * g
    u, s, vt = polar(nesterov)
    update = u * scalar_map(s) @ vt
    if v is not None:
        norm = update.norm()
        v = beta2 * v.double() + (1 - beta2) * (update**2).mean(1, keepdim=True)
        update = update / v.sqrt()
        update = update * norm / update.norm()
    decay = torch.where(update * p > 0, p, 0.0)
    update = update + wd * decay
    return p - lr * max(1, p.size(0) / p.size(1)) ** 0.5 * update, m, v


# ------------------------------------------------------------------------------- orthogonalization


def test_singular_values_end_in_the_stated_band() -> None:
    grid = torch.logspace(-3, 0, 100_001, dtype=torch.float64)
    f = scalar_map(grid)
    assert BAND[0] < f.min() < BAND[0] + 0.002 and BAND[1] - 0.002 < f.max() < BAND[1]
    assert scalar_map(grid[grid >= 3e-3]).min() > 0.876


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalization_against_svd(shape: tuple[int, int]) -> None:
    """Equal to U f(S) V^T, and so within the band of U V^T in spectral norm, at any scale of the input."""
    k = min(shape)
    values = torch.logspace(0, math.log10(8e-3), k, dtype=torch.float64) if k > 1 else torch.ones(1, dtype=torch.float64)
    g = with_singular_values(*shape, values)
    u, s, vt = polar(g)
    assert s.min() > 1e-3
    for scale in (1.0, 1e4, 1e-3):
        got = orthogonalize((g * scale).float()[None])[0].double()
        # fp32 rounding, times at most the slope 976 of the map at 0. The norm has 1e-7 added, which a small input feels.
        shrunk = s * scale / (scale + 1e-7 / 1.01 / g.norm().item())
        torch.testing.assert_close(got, u * scalar_map(shrunk) @ vt, rtol=0, atol=2e-4)
        assert torch.linalg.matrix_norm(got - u @ vt, 2) < max(1 - BAND[0], BAND[1] - 1) + 1e-3
        singular = torch.linalg.svdvals(got)
        assert BAND[0] - 1e-3 < singular.min() and singular.max() < BAND[1] + 1e-3


def test_random_gradients_come_out_near_their_polar_factor() -> None:
    """A Gaussian 64x256 matrix has singular values within a factor of 3: everything lands in the narrow part of the map."""
    g = torch.randn(3, 64, 256, generator=torch.Generator().manual_seed(0))
    out = orthogonalize(g).double()
    for one, result in zip(g, out, strict=True):
        u, s, vt = polar(one)
        torch.testing.assert_close(result, u * scalar_map(s) @ vt, rtol=0, atol=1e-5)
        assert torch.linalg.matrix_norm(result - u @ vt, 2) < 0.125
        # The direction is that of U V^T: cosine of the angle between the two.
        assert (result * (u @ vt)).sum() / (result.norm() * (u @ vt).norm()) > 0.995


def test_a_stack_is_orthogonalized_matrix_by_matrix_and_zero_stays_zero() -> None:
    g = torch.randn(4, 12, 20, generator=torch.Generator().manual_seed(0))
    g[2] *= 1e5
    g[3] = 0
    out = orthogonalize(g)
    for i in range(4):
        torch.testing.assert_close(out[i], orthogonalize(g[i : i + 1])[0], rtol=1e-5, atol=1e-6)
    assert not out[3].any()


# ------------------------------------------------------------------------------- Muon


@pytest.mark.parametrize("beta2", [0.0, 0.95])
@pytest.mark.parametrize("wd", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(16, 16), (48, 16), (16, 48)])
def test_muon_steps_equal_the_float64_statement(shape: tuple[int, int], wd: float, beta2: float) -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(2, *shape, generator=generator)
    m, v = torch.zeros(2, *shape), torch.zeros(2, shape[0], 1) if beta2 else None
    wanted = [(p[i].double(), m[i].double(), None if v is None else v[i].double()) for i in range(2)]
    for step in range(4):
        g = torch.randn(2, *shape, generator=generator) * 10.0 ** (step - 2)
        lr, mu = 0.03 / (step + 1), 0.85 + 0.03 * step
        new = muon_update(p, g, m, v, torch.tensor(lr), torch.tensor(mu), wd, beta2, NO)
        assert new is not p
        p = new
        for i in range(2):
            wanted[i] = muon_reference(wanted[i][0], g[i], wanted[i][1], wanted[i][2], lr, mu, wd, beta2)  # type: ignore[assignment]
            torch.testing.assert_close(p[i].double(), wanted[i][0], rtol=0, atol=3e-5 * lr / 0.01)
            torch.testing.assert_close(m[i].double(), wanted[i][1], rtol=1e-5, atol=1e-6)
            if v is not None:
                torch.testing.assert_close(v[i].double(), wanted[i][2], rtol=1e-4, atol=1e-8)


def test_cautious_decay_only_where_the_update_shrinks_the_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    p, g = torch.randn(1, 8, 8, generator=generator), torch.randn(1, 8, 8, generator=generator)
    step = [
        p - muon_update(p, g, torch.zeros(1, 8, 8), None, torch.tensor(1.0), torch.tensor(0.0), wd, 0.0, NO) for wd in (0.0, 0.25)
    ]
    shrinks = step[0] * p > 0
    assert 10 < shrinks.sum() < 54
    torch.testing.assert_close(step[1][~shrinks], step[0][~shrinks], rtol=0, atol=1e-6)
    torch.testing.assert_close((step[1] - step[0])[shrinks], 0.25 * p[shrinks], rtol=1e-5, atol=1e-6)


def test_normuon_rows_of_one_size_and_the_norm_kept() -> None:
    """At the first step the mean square is (1 - beta2) of the row's own, so that every row comes out equally long."""
    g = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    p, v = torch.zeros(1, 8, 32), torch.zeros(1, 8, 1)
    plain = muon_update(p, g, torch.zeros_like(g), None, torch.tensor(1.0), torch.tensor(0.9), 0.0, 0.0, NO)
    new = muon_update(p, g, torch.zeros_like(g), v, torch.tensor(1.0), torch.tensor(0.9), 0.0, 0.95, NO)
    torch.testing.assert_close(new.norm(), plain.norm())
    torch.testing.assert_close(new.norm(dim=2), new.norm(dim=2).mean().expand(1, 8))
    assert plain.norm(dim=2).std() > 1e-3


@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf])
def test_a_skipped_muon_update_changes_no_bit(poison: float) -> None:
    generator = torch.Generator().manual_seed(0)
    p, g, m = (torch.randn(2, 8, 8, generator=generator) for _ in range(3))
    v = torch.rand(2, 8, 1, generator=generator)
    g[0, 0, 0] += poison
    kept = [t.clone() for t in (p, m, v)]
    new = muon_update(p, g, m, v, torch.tensor(0.1), torch.tensor(0.9), 0.1, 0.95, YES)
    assert all(torch.equal(a, b) for a, b in zip(kept, (new, m, v), strict=True))


# ------------------------------------------------------------------------------- the whole optimizer

CONFIGS = {
    "gpt2": dataclasses.replace(
        RECIPES["gpt2"], n_layer=2, n_head=2, n_embd=24, seq_len=16, vocab_size=50, padded_vocab=64, precision="fp32",
        lr=1e-3, embed_lr=3e-3, scalar_lr=5e-3,
    ),
    "speedrun": dataclasses.replace(
        RECIPES["speedrun"], n_layer=6, n_head=2, n_embd=24, seq_len=16, vocab_size=50, padded_vocab=64, precision="fp32",
        head_precision="same", weight_decay=0.05,
    ),
}  # fmt: skip


def random_gradients(model: GPT, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def built(cfg: Config) -> tuple[GPT, Optimizer]:
    model = GPT(cfg)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model, Optimizer(model, cfg, 0, 1, compiled=False)


def adam_settings(name: str, p: Tensor, cfg: Config) -> tuple[float, float]:
    """Learning rate and weight decay that a parameter outside Muon must get, by what it is."""
    matrix = p.ndim == 2 and "gate" not in name
    if name == "head.weight" or (name == "wte.weight" and cfg.tied_steps):
        lr = cfg.head_lr
    elif name.split(".")[0] in ("wte", "wpe", "value_tables"):
        lr = cfg.embed_lr
    else:
        lr = cfg.lr if matrix else cfg.scalar_lr
    return lr, cfg.weight_decay if matrix else 0.0


@pytest.mark.parametrize("recipe", list(CONFIGS))
def test_optimizer_steps_equal_torch_adamw_and_muon(recipe: str) -> None:
    """Parameter by parameter: torch's plain (not fused) AdamW with that parameter's rate and decay, float64 Muon elsewhere."""
    cfg = CONFIGS[recipe]
    model, optimizer = built(cfg)
    muon = {
        n
        for n in dict(model.named_parameters())
        if cfg.optimizer == "muon" and n.split(".")[0] == "blocks" and n.split(".")[-2] in ("qkv", "proj", "fc")
    }
    assert len(muon) == (4 * cfg.n_layer if cfg.optimizer == "muon" else 0)
    twins: dict[str, torch.optim.AdamW] = {}
    weights: dict[str, Tensor] = {}
    state: dict[str, list] = {}
    for name, p in model.named_parameters():
        if name in muon:
            parts = p.detach().chunk(3) if "qkv" in name else [p.detach()]
            state[name] = [
                (
                    w.double(),
                    torch.zeros_like(w).double(),
                    torch.zeros(len(w), 1).double() if cfg.muon_beta2 else None,
                )
                for w in parts
            ]
        else:
            weights[name] = p.detach().clone().requires_grad_()
            lr, wd = adam_settings(name, p, cfg)
            twins[name] = torch.optim.AdamW(
                [weights[name]],
                lr=lr,
                betas=(cfg.beta1, cfg.beta2),
                eps=cfg.eps,
                weight_decay=wd,
                foreach=False,
                fused=False,
            )
    rates = {n: t.param_groups[0]["lr"] for n, t in twins.items()}
    assert len(set(rates.values())) > 2, "several learning rates are under test"
    for step in range(4):
        random_gradients(model, step)
        factor, mu, scale = (1.0, 0.5, 0.25, 0.05)[step], 0.85 + 0.02 * step, (None, 0.5, None, 0.125)[step]
        for name, p in model.named_parameters():
            assert p.grad is not None
            g = p.grad * (scale or 1.0)
            if name in muon:
                parts = g.chunk(3) if "qkv" in name else [g]
                state[name] = [
                    muon_reference(s[0], part, s[1], s[2], cfg.muon_lr * factor, mu, cfg.muon_wd, cfg.muon_beta2)
                    for s, part in zip(state[name], parts, strict=True)
                ]
            else:
                weights[name].grad = g.clone()
                twins[name].param_groups[0]["lr"] = rates[name] * factor
                twins[name].step()
        optimizer.step(factor, mu, None if scale is None else torch.tensor(scale), NO)
        for name, p in model.named_parameters():
            if name in muon:
                torch.testing.assert_close(
                    p.detach().double(),
                    torch.cat([s[0] for s in state[name]]),
                    rtol=0,
                    atol=1e-4,
                    msg=lambda m, n=name: f"{n}: {m}",
                )
            else:
                torch.testing.assert_close(
                    p.detach(),
                    weights[name].detach(),
                    rtol=1e-5,
                    atol=1e-6,
                    msg=lambda m, n=name: f"{n}: {m}",
                )


def test_query_key_and_value_are_orthogonalized_apart() -> None:
    """The step of each third is orthogonal by itself; that of the fused matrix as one would not be."""
    cfg = dataclasses.replace(CONFIGS["speedrun"], muon_beta2=0.0, muon_wd=0.0, muon_lr=1.0)
    model, optimizer = built(cfg)
    weight = model.blocks[0].attn.qkv.weight
    before = weight.detach().clone()
    random_gradients(model, 0)
    gradient = weight.grad.clone()
    gradient[:24] *= 100  # as one matrix, the query part would drown the others
    weight.grad = gradient.clone()
    optimizer.step(1.0, 0.9, None, NO)
    step = (before - weight.detach()).double()
    for part, g in zip(step.chunk(3), gradient.chunk(3), strict=True):
        u, s, vt = polar(g)
        torch.testing.assert_close(part, u * scalar_map(s) @ vt, rtol=0, atol=1e-3)
        assert torch.linalg.svdvals(part).min() > BAND[0] - 1e-2


@pytest.mark.parametrize("recipe", list(CONFIGS))
def test_a_skipped_step_changes_no_bit_of_weights_or_state(recipe: str) -> None:
    model, optimizer = built(CONFIGS[recipe])
    random_gradients(model, 0)
    optimizer.step(1.0, 0.9, None, NO)

    def everything() -> dict[str, Tensor]:
        return {k: v.clone() for k, v in (model.state_dict() | optimizer.state()).items()}

    before = everything()
    for poison in (0.0, math.nan, math.inf):
        random_gradients(model, 1)
        for p in model.parameters():
            p.grad.view(-1)[0] += poison  # type: ignore[union-attr]
        optimizer.step(1.0, 0.9, torch.tensor(poison + 0.5), YES)
    after = everything()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    random_gradients(model, 1)
    optimizer.step(1.0, 0.9, None, NO)
    changed = everything()
    assert not any(torch.equal(before[k], changed[k]) for k in before if not k.startswith("step"))


@pytest.mark.parametrize("recipe", list(CONFIGS))
def test_state_names_every_parameter_once(recipe: str) -> None:
    cfg = CONFIGS[recipe]
    model, optimizer = built(cfg)
    random_gradients(model, 0)
    optimizer.step(1.0, 0.9, None, NO)
    names = dict(model.named_parameters())
    expected = set()
    for n in names:
        muon = train_gpt2.is_muon(n, cfg)
        expected |= {f"{k}.{n}" for k in (("momentum", "second") if muon else ("step", "exp_avg", "exp_avg_sq"))}
    assert set(optimizer.state()) == expected
    for key, value in optimizer.state().items():
        kind, name = key.split(".", 1)
        if kind in ("momentum", "exp_avg", "exp_avg_sq"):
            assert value.shape == names[name].shape
    # The momentum under a name is that parameter's: after one step from zero it is (1 - mu) of the gradient.
    for n, p in names.items():
        if train_gpt2.is_muon(n, cfg):
            torch.testing.assert_close(optimizer.state()[f"momentum.{n}"], (1 - 0.9) * p.grad, rtol=1e-4, atol=1e-6)  # type: ignore[operator]


def test_tied_steps_are_those_of_a_model_with_one_weight() -> None:
    """Against a model whose head is its embedding: autograd adds up the gradients there. Later the two go apart."""
    apart = dataclasses.replace(CONFIGS["speedrun"], tied_steps=4, x0_mix=False)
    one = dataclasses.replace(apart, tied_head=True, tied_steps=0, embed_lr=apart.head_lr)
    apart = dataclasses.replace(apart, embed_lr=apart.head_lr)  # of the value embeddings, which are no part of this
    models = [GPT(cfg) for cfg in (apart, one)]
    assert torch.equal(models[0].head_weight, models[0].wte.weight) and models[0].head_weight is not models[0].wte.weight
    assert models[0].wte.weight.std().item() == pytest.approx(0.005, rel=0.1)
    models[1].load_state_dict({k: v for k, v in models[0].state_dict().items() if k != "head.weight"})
    optimizers = [Optimizer(model, model.cfg, 0, 1, compiled=False) for model in models]
    idx, targets = torch.randint(50, (2, 4, 16), generator=torch.Generator().manual_seed(5)).unbind()
    losses: list[list[float]] = [[], []]
    for step in range(6):
        for model, optimizer, seen in zip(models, optimizers, losses):
            loss = model(idx, targets) / targets.numel()
            loss.backward()
            optimizer.finish_gradients(torch.zeros(1), tied=step < model.cfg.tied_steps)
            optimizer.step(1.0, 0.9, None, NO)
            optimizer.zero_grad()
            seen.append(loss.item())
        tied = torch.equal(models[0].head_weight, models[0].wte.weight)
        assert tied == (step < 4)
    assert losses[0][:5] == pytest.approx(losses[1][:5], abs=2e-4) and losses[0][0] - losses[0][4] > 0.1
    assert abs(losses[0][5] - losses[1][5]) > 1e-3


def test_gradient_norm_is_that_of_all_gradients() -> None:
    model, optimizer = built(CONFIGS["speedrun"])
    random_gradients(model, 0)
    expected = math.sqrt(sum((p.grad.double() ** 2).sum().item() for p in model.parameters()))  # type: ignore[union-attr]
    control = torch.tensor([3.0, 1.0])
    assert optimizer.finish_gradients(control).item() == pytest.approx(expected, rel=1e-6)
    assert control.tolist() == [3.0, 1.0]


# ------------------------------------------------------------------------------- owners


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("recipe", ["gpt2", "speedrun"])
def test_owners_are_total_balanced_and_the_same_everywhere(recipe: str, world: int) -> None:
    cfg = RECIPES[recipe]
    with torch.device("meta"):
        model = GPT(cfg)
    costs = {n: float(p.numel()) for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2}
    owner = assign_owners(costs, world)
    assert set(owner) == set(costs) and set(owner.values()) == set(range(world))
    load = [sum(costs[n] for n in costs if owner[n] == r) for r in range(world)]
    # Longest-processing-time rule (Graham 1969): within 4/3 - 1/(3 m) of the best, which is at least the mean.
    best = max(sum(costs.values()) / world, max(costs.values()))
    assert max(load) <= (4 / 3 - 1 / (3 * world)) * best
    if world <= 4:
        assert max(load) <= 1.05 * sum(costs.values()) / world
    backwards = assign_owners(dict(reversed(costs.items())), world)
    assert backwards == owner, "the assignment depends on the order of the names"


# ------------------------------------------------------------------------------- schedules

COSINE = dataclasses.replace(RECIPES["gpt2"], warmup_steps=10, max_steps=110)
LINEAR = dataclasses.replace(RECIPES["sample"], warmup_steps=0, warmdown_frac=0.4, max_steps=100, final_lr_frac=0.05)


def test_warm_up_is_linear_and_never_zero() -> None:
    for cfg in (
        COSINE,
        dataclasses.replace(LINEAR, warmup_steps=10),
        dataclasses.replace(COSINE, schedule="constant"),
    ):
        assert [learning_rate_factor(cfg, s) for s in range(10)] == pytest.approx([(s + 1) / 10 for s in range(10)])
        assert learning_rate_factor(cfg, 10) == pytest.approx(1.0)


def test_cosine_corner_values() -> None:
    """llm.c's: 0.5 (1 + cos(pi t)) with t from 0 after warm-up to 1 at max_steps, one step after the last update."""
    values = [learning_rate_factor(COSINE, s) for s in range(10, 111)]
    assert values == pytest.approx([0.5 * (1 + math.cos(math.pi * i / 100)) for i in range(101)], abs=1e-12)
    assert values[50] == pytest.approx(0.5) and values[-1] == pytest.approx(0.0, abs=1e-12) and values[-2] > 0
    floor = dataclasses.replace(COSINE, final_lr_frac=0.1)
    assert learning_rate_factor(floor, 110) == pytest.approx(0.1) and learning_rate_factor(floor, 10_000) == pytest.approx(0.1)
    assert learning_rate_factor(floor, 60) == pytest.approx(0.1 + 0.9 * 0.5)


def test_linear_corner_values() -> None:
    values = [learning_rate_factor(LINEAR, s) for s in range(101)]
    assert values[:61] == [1.0] * 61
    assert values[60:] == pytest.approx([0.05 + 0.95 * (1 - i / 40) for i in range(41)])
    assert values[80] == pytest.approx(0.525) and values[100] == pytest.approx(0.05)
    assert all(learning_rate_factor(dataclasses.replace(LINEAR, warmdown_frac=0.0), s) == 1.0 for s in range(100))
    whole = dataclasses.replace(LINEAR, warmdown_frac=1.0, final_lr_frac=0.0)
    assert [learning_rate_factor(whole, s) for s in (0, 50, 99)] == pytest.approx([1.0, 0.5, 0.01])


def test_constant_schedule() -> None:
    cfg = dataclasses.replace(COSINE, schedule="constant", warmup_steps=0)
    assert {learning_rate_factor(cfg, s) for s in range(110)} == {1.0}


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_recipes_never_start_or_end_at_zero(recipe: str) -> None:
    cfg = RECIPES[recipe]
    values = [learning_rate_factor(cfg, s) for s in range(cfg.max_steps)]
    assert values[0] > 0 and min(values) > 0 and max(values) == pytest.approx(1.0)
    assert max(abs(a - b) for a, b in itertools.pairwise(values)) < 0.02  # no jump anywhere


def test_momentum_warm_up() -> None:
    cfg = dataclasses.replace(RECIPES["sample"], muon_momentum=0.95, muon_momentum_warmup=100)
    assert [muon_momentum(cfg, s) for s in (0, 50, 99, 100, 5000)] == pytest.approx([0.85, 0.90, 0.949, 0.95, 0.95])
    assert muon_momentum(dataclasses.replace(cfg, muon_momentum_warmup=0), 0) == 0.95
