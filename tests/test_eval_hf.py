"""Hugging Face directories in and out, against the real transformers; damaged ones are one clear line."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_support import hellaswag_rows, text_tokens, tiny, trained, write_run
from safetensors.torch import load_file, save_file

from data.tokenizer import gpt2_encoding
from eval import hf, val
from eval.__main__ import main
from eval.models import open_model
from train_gpt2 import GPT, RECIPES, Config, UserError, load_run

CPU = torch.device("cpu")
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 96}


def random_transformers(folder: Path, **settings: Any) -> Any:
    """A randomly initialised GPT2LMHeadModel, saved as transformers saves it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    net = GPT2LMHeadModel(GPT2Config(**(SIZES | {"initializer_range": 0.2} | settings))).eval()
    for (
        name,
        p,
    ) in net.named_parameters():  # biases and norms away from their 0 and 1, which would hide mistakes
        if p.ndim == 1:
            torch.nn.init.normal_(p, mean=float("ln" in name and "weight" in name), std=0.2)
    net.save_pretrained(folder)
    return net


def test_transformers_to_ours_and_back(tmp_path: Path) -> None:
    """Identical logits both ways in float32, identical val loss."""
    from transformers import GPT2LMHeadModel

    theirs = random_transformers(tmp_path / "in")
    ours = open_model(tmp_path / "in", CPU)
    assert main(["export", str(tmp_path / "in"), "--format", "hf", "--out", str(tmp_path / "out")]) == 0
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
    for (name, a), (_, b) in zip(theirs.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    idx = torch.randint(50257, (3, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, got, back = theirs(idx).logits, ours.net.logits(idx), again(idx).logits
    assert got.shape == expected.shape == (3, 96, 50257)
    assert expected.std() > 0.5  # not a model without preferences
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)
    assert torch.equal(back, expected)
    tokens = text_tokens()[: 5 * 96 + 1]
    loss = val.measure(ours.net, tokens, 96, 96, False, "fp32").nll / (5 * 96)
    with torch.no_grad():
        rows = torch.from_numpy(tokens)
        logits = theirs(rows[:-1].view(5, 96)).logits.double()
        expected_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[1:]).item()
    assert loss == pytest.approx(expected_loss, abs=2e-6)


def test_exported_run_and_its_tokenizer(tmp_path: Path) -> None:
    """`export --format hf` of a run: AutoModel and AutoTokenizer load it, text gives the same logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = write_run(tmp_path / "run", trained())
    assert main(["export", str(run), "--format", "hf"]) == 0
    folder = run / "export-hf"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encode = gpt2_encoding().encode
    texts = [t for row in hellaswag_rows()[::100] for t in (row["ctx"], " " + row["endings"][1])]
    texts += [
        "Hello world",
        "<|endoftext|>a",
        "  two  spaces\n\n\ttab",
        "naïve 你好 😀 ½",
        "\x00\x7f\u200b",
        "we'll  don't",
    ]
    for text in texts:
        assert tokenizer.encode(text) == encode(text, allowed_special="all"), text
    idx = torch.tensor([tokenizer.encode(texts[0])])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder).eval()(idx).logits
        torch.testing.assert_close(theirs, trained().logits(idx), rtol=1e-5, atol=1e-5)


def test_merges_are_openais() -> None:
    """merges.txt is OpenAI's vocab.bpe to the byte: its sha256 is the one tiktoken has for that file."""
    import hashlib
    import inspect

    import tiktoken_ext.openai_public as public

    from eval.tokenizer_files import tokenizer_files

    merges = tokenizer_files(gpt2_encoding(), 1024)["merges.txt"]
    assert f'vocab_bpe_hash="{hashlib.sha256(merges).hexdigest()}"' in inspect.getsource(public.gpt2)


def test_other_recipes_leave_as_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = GPT(tiny("speedrun", n_layer=2, value_embeds=1))
    run = write_run(tmp_path / "run", net)
    assert main(["export", str(run), "--format", "hf"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "gpt2 recipe" in err and "--format safetensors" in err
    assert not (run / "export-hf").exists()
    assert main(["export", str(run), "--format", "safetensors", "--out", str(tmp_path / "out")]) == 0
    loaded, cfg = load_run(tmp_path / "out")
    assert cfg.recipe == "speedrun"
    for name, value in net.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert main(["export", str(run), "--format", "safetensors", "--out", str(tmp_path / "out")]) == 2
    assert "exists" in capsys.readouterr().err


def test_openais_file_layout(tmp_path: Path) -> None:
    """OpenAI's own upload has no `transformer.` prefix and carries the causal masks."""
    random_transformers(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    plain = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    for layer in range(2):
        plain[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(96, 96)).view(1, 1, 96, 96)
    (tmp_path / "b").mkdir()
    save_file(plain, tmp_path / "b" / "model.safetensors")
    shutil.copy(tmp_path / "a" / "config.json", tmp_path / "b")
    a, b = open_model(tmp_path / "a", CPU).net, open_model(tmp_path / "b", CPU).net
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def _tensor(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def _setting(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(found))

    return damage


def _cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


BIAS = "transformer.h.1.mlp.c_fc.bias"
QKV = "transformer.h.0.attn.c_attn.weight"
DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (_tensor(lambda t: t.pop(BIAS)), "tensor h.1.mlp.c_fc.bias is missing"),
    (_tensor(lambda t: t.update({QKV: t[QKV].T.contiguous()})), "h.0.attn.c_attn.weight has shape (96, 32)"),
    (_tensor(lambda t: t.update({"score.weight": torch.zeros(2, 32)})), "unknown tensor score.weight"),
    (_tensor(lambda t: t.update({"lm_head.weight": torch.zeros(50257, 32)})), "only a tied head"),
    (_cut, "damaged or not a safetensors file"),
    (_pickle_only, "no model.safetensors; convert pytorch_model.bin"),
    (_setting(model_type="llama"), "model_type is 'llama'"),
    (_setting(activation_function="relu"), "activation_function is 'relu'"),
    (_setting(vocab_size=50304), "vocab_size is 50304"),
    (_setting(n_layer="12"), "n_layer is '12'"),
    (_setting(n_inner=100), "n_inner is 100"),
    (_setting(n_positions=128), "wpe.weight has shape (96, 32), config.json says (128, 32)"),
    (lambda f: (f / "config.json").write_text("<html>"), "not readable as JSON"),
    (lambda f: (f / "config.json").unlink(), "no config.json"),
    (shutil.rmtree, "no such directory"),
]


@functools.cache
def pristine() -> Path:
    import tempfile

    folder = Path(tempfile.mkdtemp()) / "model"
    random_transformers(folder)
    return folder


@pytest.mark.parametrize(("damage", "said"), DAMAGES, ids=[said for _, said in DAMAGES])
def test_damaged_directory_is_one_line(
    damage: Callable[[Path], Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(pristine(), folder)
    damage(folder)
    capsys.readouterr()
    assert main(["sample", str(folder), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and said in err, err


def test_shapes_are_those_transformers_has() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        net = GPT2LMHeadModel(GPT2Config())
    theirs = {n.removeprefix("transformer."): tuple(p.shape) for n, p in net.named_parameters()}
    assert hf.shapes(tiny(n_layer=12, n_head=12, n_embd=768, seq_len=1024)) == theirs


def test_every_field_of_the_model_is_known_to_the_export() -> None:
    """A new field of Config that changes the model must be refused by `to_hf`, or be listed here as one that does not."""
    names = [f.name for f in dataclasses.fields(Config)]
    model = set(names[names.index("n_layer") : names.index("optimizer")])
    sizes = {"n_layer", "n_head", "n_embd", "seq_len", "vocab_size", "padded_vocab"}
    assert model == sizes | {"zero_init"} | set(hf.ARCHITECTURE)
    assert all(value == getattr(RECIPES["gpt2"], field) for field, value in hf.ARCHITECTURE.items())
    for field, value in {"window": 8, "document_mask": True, "key_offset": True}.items():
        net = GPT(tiny("gpt2", n_layer=1, n_embd=16, seq_len=64, **{field: value}))
        with pytest.raises(UserError, match=f"here {field} is {value}"):
            hf.to_hf(net)
