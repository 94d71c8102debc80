"""HellaSwag agrees with the public implementations, example by example."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from eval_support import hellaswag_rows, tiny, trained
from torch.nn import functional as F

from data.tokenizer import gpt2_encoding
from eval import hellaswag, scoring, val
from eval.export import export_hf
from eval.models import Model
from eval.scoring import Request, Scores
from train_gpt2 import GPT


def spread(count: int) -> list[dict[str, Any]]:
    """`count` rows taken evenly from the file: its first half is ActivityNet, its second WikiHow."""
    rows = hellaswag_rows()
    return [rows[i * len(rows) // count] for i in range(count)]


@functools.cache
def exported() -> Path:
    """The model trained a little, as a transformers directory."""
    folder = Path(tempfile.mkdtemp())
    export_hf(Model(trained(), trained().cfg, folder, "run"), folder)
    return folder


def our_rows(rows: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    net = trained()
    return hellaswag.evaluate(Model(net, net.cfg, exported(), "hf"), rows, kind, "fp32")[1]


# ---------------------------------------------------------------- against an independent float64 scorer


def nanogpt_render(row: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """build-nanogpt's render_example, told again: tokens and mask, (4, longest)."""
    encode = gpt2_encoding().encode_ordinary
    context = encode(row["ctx"])
    endings = [encode(" " + ending) for ending in row["endings"]]
    longest = max(len(context) + len(ending) for ending in endings)
    tokens = torch.zeros(4, longest, dtype=torch.long)
    mask = torch.zeros(4, longest)
    for i, ending in enumerate(endings):
        tokens[i, : len(context) + len(ending)] = torch.tensor(context + ending)
        mask[i, len(context) : len(context) + len(ending)] = 1
    return tokens, mask


@torch.no_grad()
def float64_losses(net: torch.nn.Module, row: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Summed and mean loss of each ending, one ending per forward, all logits, transformers' GPT-2 in
    float64.
    """
    sums, means = [], []
    tokens, mask = nanogpt_render(row)
    for i in range(4):
        logits = net(tokens[i : i + 1]).logits[0, :-1].double()
        losses = F.cross_entropy(logits, tokens[i, 1:], reduction="none") * mask[i, 1:]
        sums.append(losses.sum().item())
        means.append((losses.sum() / mask[i, 1:].sum()).item())
    return sums, means


def check_against_float64(count: int) -> None:
    from transformers import GPT2LMHeadModel

    rows = spread(count)
    net = GPT2LMHeadModel.from_pretrained(exported()).double().eval()
    ours = our_rows(rows, "llmc")
    ties = 0
    for row, our in zip(rows, ours):
        sums, means = float64_losses(net, row)
        np.testing.assert_allclose(our["nll"], sums, rtol=2e-6)
        for values, choice in ((sums, our["choice_acc"]), (means, our["choice_acc_norm"])):
            ranked = sorted(values)
            if ranked[1] - ranked[0] < 1e-9:
                ties += 1
            else:
                assert choice == int(np.argmin(values))
    print(f"{count} examples, {ties} exact ties")
    assert ties <= count // 100


def test_llmc_scoring_against_float64() -> None:
    check_against_float64(8)


@pytest.mark.full
def test_llmc_scoring_against_float64_on_500() -> None:
    check_against_float64(500)


def test_modern_model_scored_one_by_one() -> None:
    """The same for the speedrun's architecture, by the model's own logits in float64."""
    net = GPT(tiny("speedrun", n_layer=4, n_head=2, value_embeds=1)).eval()
    torch.manual_seed(1)
    for p in net.parameters():  # zero-initialised parts would hide mistakes
        torch.nn.init.normal_(p, std=0.1)
    rows = spread(2)
    examples = hellaswag.render_llmc(rows, gpt2_encoding())
    got = scoring.score_groups(net, [e.requests for e in examples])
    net.double()
    net.dtype = torch.float64
    for i, row in enumerate(rows):
        tokens, mask = nanogpt_render(row)
        with torch.no_grad():
            hidden = net.hidden(tokens)
            z = net.cfg.softcap * torch.tanh(hidden @ net.head_weight[:50257].T / net.cfg.softcap)
            losses = F.cross_entropy(z[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none") * mask[:, 1:]
        np.testing.assert_allclose(got.nll[i], losses.sum(1).numpy(), rtol=1e-5)


# ---------------------------------------------------------------- against the real lm-eval


def lm_eval_samples(rows: Sequence[dict[str, Any]], model: Path) -> list[dict[str, Any]]:
    """lm-eval's own hellaswag task and pipeline on `rows`, from a local file instead of the hub."""
    import lm_eval
    import lm_eval.tasks.hellaswag.utils as utils
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    metrics = "".join(f"  - metric: {m}\n" for m in ("acc", "acc_norm", "acc_bytes"))
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (Path(scratch) / "local.yaml").write_text(
            f"include: {Path(utils.__file__).with_name('hellaswag.yaml')}\n"
            f"task: hellaswag_local\ntag: null\ndataset_path: json\ntraining_split: null\n"
            f"dataset_kwargs:\n  data_files:\n    validation: {file}\n  cache_dir: {scratch}\n"
            f"metric_list:\n{metrics}"
        )
        tasks = TaskManager(include_path=scratch, include_defaults=False)
        lm = HFLM(pretrained=str(model), tokenizer=str(model), device="cpu", dtype="float32", batch_size=16)
        found = lm_eval.simple_evaluate(
            model=lm, tasks=["hellaswag_local"], task_manager=tasks, bootstrap_iters=0, log_samples=True
        )
    assert found is not None
    (samples,) = found["samples"].values()
    return sorted(samples, key=lambda s: s["doc_id"])


def check_against_lm_eval(count: int) -> None:
    rows = spread(count)
    theirs = lm_eval_samples(rows, exported())
    ours = our_rows(rows, "lm-eval")
    assert len(theirs) == count
    for our, their in zip(ours, theirs):
        likelihoods = [float(response[0][0]) for response in their["resps"]]
        np.testing.assert_allclose(our["nll"], [-x for x in likelihoods], rtol=1e-5)
        for metric in ("acc", "acc_norm", "acc_bytes"):
            assert float(our[f"choice_{metric}"] == our["label"]) == their[metric], (our, their)
    right = {m: sum(s[m] for s in theirs) for m in ("acc", "acc_norm", "acc_bytes")}
    print(f"{count} examples, lm-eval's right answers {right}: equal example by example")


def test_equals_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check_against_lm_eval(12)


@pytest.mark.full
def test_equals_lm_eval_on_500() -> None:
    check_against_lm_eval(500)


def test_tokenization_equals_lm_evals() -> None:
    """Contexts and endings of a thousand rows: our cut of the joint encoding is the one lm-eval makes."""
    import lm_eval.tasks.hellaswag.utils as utils

    rows = spread(1000)
    encode = gpt2_encoding().encode_ordinary

    class Docs(list):
        def map(self, f):
            return [f(doc) for doc in self]

    docs = utils.process_docs(Docs(rows))
    for example, doc in zip(hellaswag.render_lm_eval(rows, gpt2_encoding()), docs):
        for request, choice, characters in zip(example.requests, doc["choices"], example.characters):
            # lm_eval.api.model.TemplateLM._encode_pair
            context, continuation = doc["query"], " " + choice
            spaces = len(context) - len(context.rstrip())
            if spaces:
                context, continuation = context[:-spaces], context[-spaces:] + continuation
            whole = encode(context + continuation)
            assert list(request.tokens) == whole
            assert request.scored == len(whole) - len(encode(context))
            assert characters == len(choice)


def test_clean_is_lm_evals() -> None:
    from lm_eval.tasks.hellaswag.utils import preprocess

    texts = [t for row in spread(2000) for t in (row["ctx"], row["ctx_b"], *row["endings"])]
    texts += [
        " [title] a [step]  b",
        "x [substeps] y",
        "[a] [b]",
        "  ",
        "a   b",
        "no [end",
        "multi\nline [x\ny] z",
    ]
    assert any("[" in t for t in texts[:-7])
    assert [hellaswag.clean(t) for t in texts] == [preprocess(t) for t in texts]


# ---------------------------------------------------------------- the engine


def test_batches_hold_everything_once_in_few_shapes() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 170, 1003).tolist()
    made = scoring.make_batches(lengths, [4] * 1003, 192, 4096)
    assert sorted(g for _, members in made for g in members) == list(range(1003))
    assert len({length for length, _ in made}) <= 192 // scoring.PAD_MULTIPLE
    for length, members in made:
        assert max(lengths[g] for g in members) <= length <= max(lengths[g] for g in members) + 15
        assert len(members) == 1 or 4 * len(members) * length <= 4096


def test_padding_and_company_change_nothing() -> None:
    """A row alone and the same row in a batch of longer ones: equal to float tolerance."""
    net, examples = small_vocabulary(150)
    groups = [e.requests for e in examples]
    together = scoring.score_groups(net, groups, batch_tokens=16384)
    alone = scoring.score_groups(net, groups, batch_tokens=1)
    np.testing.assert_allclose(together.nll, alone.nll, rtol=1e-6)


def test_rows_longer_than_the_context_lose_their_start() -> None:
    net = GPT(tiny(seq_len=32)).eval()
    row = list(range(100, 160))
    scores = scoring.score_groups(net, [[Request(row, 10), Request(row, 50)]])
    assert scores.truncated == 2
    assert scores.scored.tolist() == [[10, 32]]
    with torch.no_grad():
        nll = net.nll(torch.tensor([row[-33:-1]]), torch.tensor([row[-32:]]))[0].double()
    np.testing.assert_allclose(scores.nll[0], [nll[-10:].sum(), nll.sum()], rtol=1e-6)


def test_greedy_is_the_continuation_a_model_would_write() -> None:
    net = trained()
    row = [50256, 464, 1048]
    with torch.no_grad():
        for _ in range(3):
            row.append(int(net.logits(torch.tensor([row]))[0, -1].argmax()))
    wrong = [*row[:-1], (row[-1] + 1) % 50257]
    scores = scoring.score_groups(net, [[Request(row, 3)], [Request(wrong, 3)]], greedy=True)
    assert scores.greedy[:, 0].tolist() == [True, False]


def test_margin_is_what_it_takes_to_change_a_choice() -> None:
    """Errors a little under half of the margin each never change a choice; a little over can."""
    rng = np.random.default_rng(0)
    examples = hellaswag.render_lm_eval(spread(100), gpt2_encoding())
    scored = np.array([[r.scored for r in e.requests] for e in examples])
    nll = scored * rng.normal(4.0, 0.3, scored.shape)
    before = Scores(nll, np.zeros_like(nll, bool), scored, 0)
    for kind in ("llmc", "lm-eval"):
        margin = hellaswag.margin(examples, before, kind)
        chosen = hellaswag.choices(examples, before, kind)
        for part, changes in ((0.499, False), (0.501, True)):
            changed = np.zeros(len(examples), bool)
            for signs in np.ndindex(2, 2, 2, 2):
                error = (np.array(signs) * 2 - 1) * part * margin[:, None]
                after = hellaswag.choices(examples, Scores(nll + error, before.greedy, scored, 0), kind)
                for metric in chosen:
                    changed |= after[metric] != chosen[metric]
            assert changed.all() if changes else not changed.any()


@pytest.mark.parametrize("kind", ["llmc", "lm-eval"])
def test_bf16_with_near_ties_again_makes_float32s_choices(kind: str) -> None:
    net, examples = small_vocabulary(800)
    groups = [e.requests for e in examples]
    exact = scoring.score_groups(net, groups, "fp32")
    rough = scoring.score_groups(net, groups, "bf16")
    mixed = scoring.score_exactly(net, groups, lambda s: hellaswag.margin(examples, s, kind), tolerance=0.02)
    assert mixed.bf16_error > 0.02 / 4  # larger than the first tolerance allows for: it had to grow
    assert mixed.retried >= (hellaswag.margin(examples, rough, kind) < 4 * mixed.bf16_error).sum()
    assert scoring.NEAREST <= mixed.retried < len(groups) // 2
    changed = 0
    for metric, chosen in hellaswag.choices(examples, exact, kind).items():
        np.testing.assert_array_equal(hellaswag.choices(examples, mixed, kind)[metric], chosen)
        changed += int((hellaswag.choices(examples, rough, kind)[metric] != chosen).sum())
    assert changed > 0  # bfloat16 alone does change choices here, so the test can fail


def test_ties_are_counted() -> None:
    """A model without preferences: every ending of one length ties."""
    row = dict(hellaswag_rows()[0], endings=["a a a", "a a a", "b b b b", "c c c c c"])
    examples = hellaswag.render_llmc([row], gpt2_encoding())
    scores = Scores(np.array([[2.0, 2.0, 3.0, 9.0]]), np.zeros((1, 4), bool), np.array([[3, 3, 4, 5]]), 0)
    assert hellaswag.ties(examples, scores, "llmc") == {"acc": 1, "acc_norm": 1}
    assert hellaswag.choices(examples, scores, "llmc")["acc"].tolist() == [0]


# ---------------------------------------------------------------- ranks


def small_vocabulary(count: int) -> tuple[GPT, list[hellaswag.Example]]:
    """A model of 256 ids and the file's examples with ids modulo 256: real lengths, small head."""
    rows = hellaswag_rows()[:count]
    net = GPT(tiny(n_layer=1, n_embd=16, vocab_size=256, padded_vocab=256)).eval()
    torch.manual_seed(3)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3)
    examples = []
    for e in hellaswag.render_llmc(rows, gpt2_encoding()):
        requests = tuple(Request([t % 256 for t in r.tokens], r.scored) for r in e.requests)
        examples.append(hellaswag.Example(e.index, e.ind, e.label, requests, e.characters, e.utf8_bytes))
    return net, examples


def score_file(count: int, path: Path) -> None:
    net, examples = small_vocabulary(count)
    # First a single batch, of which the ranks above 0 have no share and still must not wait for ever.
    one = scoring.score_groups(net, [examples[0].requests])
    scores = scoring.score_groups(net, [e.requests for e in examples])
    np.testing.assert_allclose(scores.nll[0], one.nll[0], rtol=1e-6)
    path.write_text("\n".join(map(json.dumps, hellaswag.per_example(examples, scores, "llmc"))))


def val_sums() -> list[list[float]]:
    """The validation loss's sums over 41 windows, which neither 2 nor 3 divides."""
    net = small_vocabulary(1)[0]
    losses = val.measure(net, np.arange(41 * 64 + 1) % 251, 64, 64, False, "fp32", batch_tokens=128)
    sums = [losses.position_nll, losses.position_count, losses.block_nll]
    return [[losses.nll, losses.text_nll, losses.text_bytes], *(s.tolist() for s in sums)]


def rank_worker(rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    for ranks in (3, 2):
        if rank < ranks:
            dist.init_process_group("gloo", f"file://{folder}/meet{ranks}", rank=rank, world_size=ranks)
            score_file(count, Path(folder) / f"{ranks}-{rank}.jsonl")
            (Path(folder) / f"{ranks}-{rank}.val").write_text(json.dumps(val_sums()))
            dist.destroy_process_group()


def check_ranks(count: int, folder: Path) -> None:
    hellaswag_rows()  # in the cache before three processes ask for it
    torch.multiprocessing.spawn(rank_worker, (count, str(folder)), nprocs=3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    score_file(count, folder / "alone.jsonl")
    torch.set_num_threads(threads)
    alone = (folder / "alone.jsonl").read_bytes()
    assert alone.count(b"\n") == count - 1
    for name in ("2-0", "2-1", "3-0", "3-1", "3-2"):
        assert (folder / f"{name}.jsonl").read_bytes() == alone, name
        for a, b in zip(json.loads((folder / f"{name}.val").read_text()), val_sums(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def test_ranks_give_one_file(tmp_path: Path) -> None:
    check_ranks(301, tmp_path)


@pytest.mark.full
def test_ranks_give_one_file_on_all_examples(tmp_path: Path) -> None:
    check_ranks(10_042, tmp_path)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_gpu_makes_the_cpus_choices() -> None:
    cpu = trained()
    gpu = GPT(cpu.cfg)
    gpu.load_state_dict(cpu.state_dict())
    gpu = gpu.cuda().eval()
    rows = spread(300)
    for kind in hellaswag.RENDER:
        on_cpu = hellaswag.evaluate(Model(cpu, cpu.cfg, exported(), "hf"), rows, kind)[1]
        on_gpu = hellaswag.evaluate(Model(gpu, gpu.cfg, exported(), "hf"), rows, kind)[1]
        keys = [k for k in on_cpu[0] if k.startswith("choice")]
        assert [[r[k] for k in keys] for r in on_cpu] == [[r[k] for k in keys] for r in on_gpu]
