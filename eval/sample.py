"""Text from a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from data.tokenizer import gpt2_encoding
from eval import common
from eval.models import open_model
from eval.scoring import arithmetic
from train_gpt2 import EOT, GPT, UserError


@torch.inference_mode()
def generate(net: GPT, context: list[int], count: int, temperature: float, top_k: int, seed: int) -> Iterator[int]:
    """Up to `count` tokens after `context`, ending before an end of text. Only real ids can be drawn.

    Temperature 0 takes the most likely token; top_k 0 draws from all. The draw is made on the CPU in
    float64, so one seed gives one text wherever the logits are the same.
    """
    device = next(net.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(context)
    for _ in range(count):
        idx_1T = torch.tensor([tokens[-net.cfg.seq_len :]], device=device)
        logits_V = net.head_logits(net.hidden(idx_1T)[0, -1:])[0].double().cpu()
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            if top_k and top_k < len(logits_V):
                logits_V[logits_V < logits_V.topk(top_k).values[-1]] = -torch.inf
            chances_V = F.softmax(logits_V / temperature, dim=-1)
            token = int(torch.multinomial(chances_V, 1, generator=generator))
        if token == EOT:
            return
        tokens.append(token)
        yield token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser, dtype=False)
    parser.add_argument("--prompt", default="", help="text to continue (default: none, a new document)")
    parser.add_argument("--tokens", type=common.positive, default=100, help="at most so many (default: %(default)s)")
    parser.add_argument("--count", type=common.positive, default=1, help="texts, with seeds SEED, SEED+1, …")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the most likely token each time")
    parser.add_argument("--top-k", type=int, default=50, help="draw from the k most likely; 0: from all")
    parser.add_argument("--seed", type=int, default=1)


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.temperature < float("inf") or args.top_k < 0:
        raise UserError("--temperature and --top-k must be 0 or more")
    device = common.pick_device(args.device)
    model = open_model(args.model, device)
    encoding = gpt2_encoding()
    # Every document of the training text starts with the end-of-text token, so a prompt does as well.
    context = [EOT, *encoding.encode_ordinary(args.prompt)]
    for n in range(args.count):
        with arithmetic(model.net, "fp32"):
            tokens = list(generate(model.net, context, args.tokens, args.temperature, args.top_k, args.seed + n))
        if args.count > 1:
            print(f"--- seed {args.seed + n}")
        print(args.prompt + encoding.decode(tokens))
    return 0
