"""Hugging Face GPT-2 directories (config.json, safetensors): read into the `gpt2` recipe and written.

transformers itself is not needed. GPT-2's linear layers are stored as Conv1D, (inputs, outputs): transposed.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from train_gpt2 import GPT, RECIPES, Config, UserError

VOCABULARY = 50_257

# What a GPT-2 config may say and still be this architecture. A missing key has transformers' default, the
# value here.
SUPPORTED = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False, True),  # the same mathematics in another order
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


# Our name of each Hugging Face tensor; a layer's names stand behind `h.N.` and `blocks.N.`.
NAMES = {"wte": "wte", "wpe": "wpe", "ln_f": "norm_f"}
LAYER_NAMES = {
    "ln_1": "norm1",
    "ln_2": "norm2",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.proj",
    "mlp.c_fc": "mlp.fc",
    "mlp.c_proj": "mlp.proj",
}


def our_name(name: str) -> str:
    """`h.3.attn.c_attn.weight` -> `blocks.3.attn.qkv.weight`."""
    if name.startswith("h."):
        _, layer, rest = name.split(".", 2)
        module, kind = rest.rsplit(".", 1)
        return f"blocks.{layer}.{LAYER_NAMES[module]}.{kind}"
    module, kind = name.rsplit(".", 1)
    return f"{NAMES[module]}.{kind}"


def is_conv1d(name: str) -> bool:
    """Stored as (inputs, outputs), the transpose of a linear layer's weight."""
    return name.startswith("h.") and name.endswith(".weight") and ".ln_" not in name


def is_hf(folder: Path) -> bool:
    """Whether `folder` is not a run, whose config.json has a schema version."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'}: not readable as JSON ({error})") from None
    return isinstance(found, dict) and "schema" not in found


def read_config(folder: Path) -> Config:
    """The `gpt2` recipe with the sizes of config.json. Raises UserError for another architecture."""
    path = folder / "config.json"
    found = json.loads(path.read_text())
    for key, allowed in SUPPORTED.items():
        if found.get(key, allowed[0]) not in allowed:
            raise UserError(f"{path}: {key} is {found[key]!r}; only GPT-2 with {allowed[0]!r} can be loaded")
    sizes = {key: found.get(key) for key in ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size")}
    for key, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise UserError(f"{path}: {key} is {size!r}; a whole number above 0 is needed")
    width, heads = found["n_embd"], found["n_head"]
    if found["vocab_size"] != VOCABULARY:
        raise UserError(f"{path}: vocab_size is {found['vocab_size']}; GPT-2's is {VOCABULARY}")
    if width % heads:
        raise UserError(f"{path}: n_embd {width} is not a multiple of n_head {heads}")
    if found.get("n_inner") not in (None, 4 * width):
        raise UserError(f"{path}: n_inner is {found['n_inner']}; only 4 * n_embd = {4 * width} can be loaded")
    cfg = dataclasses.replace(
        RECIPES["gpt2"],
        n_layer=found["n_layer"],
        n_head=heads,
        n_embd=width,
        seq_len=found["n_positions"],
        precision="fp32",
    )
    if width // heads % 4:
        raise UserError(f"{path}: {width // heads} channels a head; a multiple of 4 is needed")
    return cfg


def hf_config(cfg: Config) -> dict[str, Any]:
    """config.json for GPT2LMHeadModel."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": VOCABULARY - 1,
        "eos_token_id": VOCABULARY - 1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "n_ctx": cfg.seq_len,
        "n_positions": cfg.seq_len,
        "n_embd": cfg.n_embd,
        "n_head": cfg.n_head,
        "n_layer": cfg.n_layer,
        "n_inner": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
    }


def shapes(cfg: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of a GPT-2 directory (without the `transformer.` prefix) and its shape."""
    d = cfg.n_embd
    out: dict[str, tuple[int, ...]] = {"wte.weight": (VOCABULARY, d), "wpe.weight": (cfg.seq_len, d)}
    for i in range(cfg.n_layer):
        linear = {"attn.c_attn": 3 * d, "attn.c_proj": d, "mlp.c_fc": 4 * d, "mlp.c_proj": d}
        for name, outputs in linear.items():
            inputs = 4 * d if name == "mlp.c_proj" else d
            out[f"h.{i}.{name}.weight"] = (inputs, outputs)
            out[f"h.{i}.{name}.bias"] = (outputs,)
        for name in ("ln_1", "ln_2"):
            out[f"h.{i}.{name}.weight"] = out[f"h.{i}.{name}.bias"] = (d,)
    out["ln_f.weight"] = out["ln_f.bias"] = (d,)
    return out


def read_tensors(folder: Path, cfg: Config) -> dict[str, torch.Tensor]:
    """All tensors as float32, checked against `shapes`. Raises UserError with the tensor's name."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        hint = "; convert pytorch_model.bin with transformers' save_pretrained" if any(folder.glob("*.bin")) else ""
        raise UserError(f"{folder}: no model.safetensors{hint}")
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a dict)
                    found[name.removeprefix("transformer.")] = tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: damaged or not a safetensors file ({error})") from None
    # OpenAI's files carry the causal mask of each layer as a buffer.
    masks = [name for name in found if name.endswith((".attn.bias", ".attn.masked_bias"))]
    for name in masks:
        del found[name]
    expected = shapes(cfg)
    head = found.pop("lm_head.weight", None)
    for name, shape in expected.items():
        if name not in found:
            raise UserError(f"{folder}: tensor {name} is missing; the directory is incomplete or of another model")
        if tuple(found[name].shape) != shape:
            raise UserError(f"{folder}: tensor {name} has shape {tuple(found[name].shape)}, config.json says {shape}")
    if extra := sorted(found.keys() - expected.keys()):
        raise UserError(f"{folder}: unknown tensor {extra[0]}; the model is not a plain GPT-2")
    if head is not None and not torch.equal(head, found["wte.weight"]):
        raise UserError(f"{folder}: lm_head.weight differs from wte.weight; only a tied head can be loaded")
    return {name: tensor.float() for name, tensor in found.items()}


def build(cfg: Config, tensors: dict[str, torch.Tensor]) -> GPT:
    """The model with weights from `read_tensors`; rows of the embedding that no id reaches are zero."""
    state = {our_name(n): t.T.contiguous() if is_conv1d(n) else t for n, t in tensors.items()}
    embedding = torch.zeros(cfg.padded_vocab, cfg.n_embd)
    embedding[:VOCABULARY] = state["wte.weight"]
    state["wte.weight"] = embedding
    with torch.device("meta"):
        net = GPT(cfg)
    net.load_state_dict(state, assign=True)
    net.rope = torch.empty(0)
    return net


# The fields in which a run may differ from the `gpt2` recipe and still be a GPT2LMHeadModel.
ARCHITECTURE = {
    "position": "learned",
    "norm": "layer",
    "activation": "gelu",
    "bias": True,
    "tied_head": True,
    "qk_norm": False,
    "softcap": 0.0,
    "attn_scale": 0.0,
    "x0_mix": False,
    "value_embeds": 0,
    "unet_skip": False,
    "attn_gate": False,
    "smear": False,
    "key_offset": False,
    "document_mask": False,
    "window": 0,
}


def to_hf(net: GPT) -> dict[str, torch.Tensor]:
    """Tensors of GPT2LMHeadModel, float32, real ids only. Raises UserError if the model is no plain GPT-2."""
    for field, value in ARCHITECTURE.items():
        if (found := getattr(net.cfg, field)) != value:
            raise UserError(
                f"--format hf needs the gpt2 recipe's architecture; here {field} is {found!r}, not {value!r};"
                " use --format safetensors"
            )
    state = net.state_dict()
    out = {}
    for name, shape in shapes(net.cfg).items():
        tensor = state[our_name(name)].detach().float().cpu()
        tensor = tensor[:VOCABULARY] if name == "wte.weight" else tensor.T if is_conv1d(name) else tensor
        assert tuple(tensor.shape) == shape
        out["transformer." + name] = tensor.contiguous()
    return out
