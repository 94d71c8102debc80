"""What a run will take, before anything is rented: memory, time, cost, checkpoints, and a strategy.

    python -m harness plan --model gpt2 --gpu H100 --count 8 --tokens 10B [--price 2.5] [--spot-mtbf 6h]

Every figure is arithmetic on stated inputs; nothing is measured here and no price is invented. Units are
decimal (1 GB = 10^9 bytes), as in the papers and data sheets. docs/plan.md has each formula's source.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.common import UserError, human_count, read_json, run_directory
from harness.gpus import GPUS, SPARSITY, Gpu, find_gpu

if TYPE_CHECKING:
    from train_gpt2 import Config

GB = 1e9
ASSUMED_MFU = 0.40  # llm.c's 124M reaches 41% on 8 H100; the usual planning figure for dense models
USABLE = 0.90  # of a GPU's memory: the rest goes to the CUDA context, NCCL buffers and fragmentation
NODE = 8  # GPUs of a usual node
# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4).
DEVICE_MTBF_HOURS = 16384 * 54 * 24 / 419
HOST_COPY = 25 * GB  # bytes per second to pinned host memory over PCIe 4.0 x16, for the checkpoint stall
BILLING_SECONDS = {"second": 1, "minute": 60, "hour": 3600}
# What this trainer's compiled blocks keep for the backward, in bytes per token over the width, counted on the
# tensors that autograd saves (docs/plan.md says how). 32 is Korthikanti's 34 without dropout's masks.
KEPT_BLOCK = 32.1
KEPT_HIDDEN = 8.0  # the MLP's hidden layer before its activation, which the fused MLP on Hopper does not keep
KEPT_SEPARATE_QK = 6.2  # queries, keys and values beside the fused ones that norm and rotation start from
KEPT_VALUE_TABLE = 12.0  # a table of value embeddings, with the two mixes it goes into
KEPT_OUTSIDE = 2.1  # embedding
KEPT_SMEAR = 2.0
HEAD_CHUNK = 16384  # tokens whose logits exist at once; train_gpt2.HEAD_CHUNK
BACKWARD_SHARE = 2 / 3  # of a step's FLOPs: each matmul costs one product forward and two backward


# ---------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Shape:
    """Sizes that activations depend on."""

    layers: int
    width: int
    heads: int
    seq_len: int
    vocab: int
    window: int = 0

    @property
    def attended(self) -> int:
        """Tokens that attention reaches, without the causal discount."""
        return min(self.seq_len, self.window or self.seq_len)


@dataclass(frozen=True)
class Model:
    """A model as the arithmetic sees it; `shape` is None when only a parameter count was given."""

    name: str
    parameters: int  # everything stored, a tied head once
    matmul_parameters: int  # those that multiply every token: N in 6 * N
    muon_parameters: int  # those whose optimizer keeps one moment instead of two
    shape: Shape | None
    kept: float | None = None  # 16-bit activations this trainer keeps, in bytes per token over the width
    fp8_gradients: bool = False  # of the logits, which then exist beside them and twice
    fused_mlp: bool = False  # on Hopper

    @property
    def flops_per_token(self) -> float:
        """6 * N_matmul + 12 * L * d * T: forward and backward, attention without the causal discount."""
        attention = 12 * self.shape.layers * self.shape.width * self.shape.attended if self.shape else 0
        return 6 * self.matmul_parameters + attention


def gpt_model(name: str, layers: int, width: int, heads: int, seq_len: int = 1024, vocab: int = 50304) -> Model:
    """A GPT-2 shaped model: 12 d^2 matmul weights a layer, learned positions, biases, tied head."""
    blocks = layers * 12 * width**2
    biases_and_norms = layers * 13 * width + 2 * width  # 9 d biases and 4 d norm a layer, the final norm
    matmul = blocks + vocab * width
    shape = Shape(layers, width, heads, seq_len, vocab)
    kept = KEPT_BLOCK * layers + KEPT_OUTSIDE
    return Model(name, matmul + seq_len * width + biases_and_norms, matmul, 0, shape, kept)


# Radford et al. 2019, table 2; widths and heads as released. The vocabulary is padded from 50,257.
GPT2_FAMILY: dict[str, tuple[int, int, int]] = {
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}


def recipe_model(name: str, given: dict[str, int]) -> Model:
    """The model of one of the trainer's recipes. Imports torch."""
    from train_gpt2 import RECIPES

    if name not in RECIPES:
        raise UserError(
            f"unknown model {name!r}: name one of {', '.join([*GPT2_FAMILY, *RECIPES])}, or give "
            "--layers, --width, --heads, --seq-len and --vocab"
        )
    if given:
        raise UserError(f"--model {name} has its own sizes: name one of {', '.join(GPT2_FAMILY)} to change them")
    return config_model(RECIPES[name])


def config_model(cfg: Config) -> Model:
    """The model that a trainer's config describes, counted on the real module. Imports torch."""
    from train_gpt2 import parameter_count

    muon = 12 * cfg.n_layer * cfg.n_embd**2 if cfg.optimizer == "muon" else 0
    per_block = KEPT_BLOCK + (KEPT_SEPARATE_QK if cfg.qk_norm or cfg.position == "rotary" else 0)
    kept = cfg.n_layer * per_block + KEPT_VALUE_TABLE * cfg.value_embeds
    kept += KEPT_OUTSIDE + (KEPT_SMEAR if cfg.smear else 0)
    parameters = parameter_count(cfg)
    shape = Shape(cfg.n_layer, cfg.n_embd, cfg.n_head, cfg.seq_len, cfg.padded_vocab, cfg.window)
    fp8 = cfg.head_precision == "fp8-all"
    return Model(cfg.recipe, parameters["total"], parameters["matmul"], muon, shape, kept, fp8, cfg.fusable_mlp)


# ------------------------------------------------------------------------------------------ arithmetic


def hours(flops: float, count: int, peak_tflops: float, mfu: float) -> float:
    """Training hours: FLOPs / (count * peak * MFU * 3600)."""
    return flops / (count * peak_tflops * 1e12 * mfu * 3600)


def zero_bytes(stage: int, ranks: int) -> float:
    """Bytes of model state per parameter and rank at ZeRO stage 0 (DDP) to 3, from 16 in all.

    bf16 weights 2 and gradients 2, fp32 master weights and two moments 12 (Rajbhandari et al. 2020).
    """
    return {0: 16.0, 1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}[stage]


def own_bytes(model: Model, sharded: bool, ranks: int) -> float:
    """Bytes of state on one rank in this trainer's layout: fp32 weights and gradients, the moments
    (two for AdamW, one for Muon) replicated or, when sharded, divided by owner (ZeRO-1)."""
    moments = 8 * (model.parameters - model.muon_parameters) + 4 * model.muon_parameters
    return 8 * model.parameters + moments / (ranks if sharded else 1)


def state_bytes(model: Model, stage: int, ranks: int, trainable: int | None = None) -> float:
    """Bytes of state on one rank. With adapters only the `trainable` ones have gradients and optimizer
    state; the frozen rest is 2 bytes a parameter, which stage 3 alone shards."""
    if trainable is None:
        return model.parameters * zero_bytes(stage, ranks)
    frozen = 2 * (model.parameters - trainable) / (ranks if stage == 3 else 1)
    return frozen + trainable * zero_bytes(stage, ranks)


POLICIES = ("none", "selective", "per-block", "sqrt segments")


def activation_bytes(
    shape: Shape, micro_batch: int, policy: str = "none", quadratic: bool = False, tensor_parallel: int = 1
) -> float:
    """Bytes of 16-bit activations kept for the backward: s*b*h*L*(10 + 24/t + 5*a*s/(h*t)).

    Korthikanti et al. 2022 (arXiv 2205.05198), equation 2. `quadratic` keeps the s*s attention scores, as
    attention without a fused kernel does. Policies: `selective` keeps the inputs of the norms and the
    outputs of attention and of the matmuls that something other than an addition reads, and rebuilds norms
    and activations: s*b*h*L*(4 + 16/t), never the scores. `per-block` keeps each block's input (2*s*b*h)
    and rebuilds one block at a time. `sqrt segments` keeps every sqrt(L)-th input and rebuilds one segment
    at a time (Chen et al. 2016, arXiv 1604.06174).
    """
    tokens_width = shape.seq_len * micro_batch * shape.width
    scores = 5 * shape.heads * shape.seq_len / (shape.width * tensor_parallel) if quadratic else 0
    per_layer = tokens_width * (10 + 24 / tensor_parallel + scores)
    block_input = 2 * tokens_width
    if policy == "none":
        return shape.layers * per_layer
    if policy == "selective":
        return shape.layers * tokens_width * (4 + 16 / tensor_parallel)
    if policy == "per-block":
        return shape.layers * block_input + per_layer
    segments = max(1, round(math.sqrt(shape.layers)))
    return segments * block_input + math.ceil(shape.layers / segments) * per_layer


def logits_bytes(shape: Shape, micro_batch: int) -> float:
    """Logits in fp32 and their gradient; a loss that works in chunks needs only a chunk of it."""
    return 2 * 4 * micro_batch * shape.seq_len * shape.vocab


def trainer_peak(model: Model, micro_batch: int, ranks: int = 1, sharded: bool = False, gpu: Gpu | None = None) -> float | None:
    """Predicted peak bytes of this trainer on one GPU (None: the most that it may take on any): at the head, when all
    activations are kept and the logits of a chunk exist in bf16. None for a model whose activations it cannot know."""
    if model.shape is None or model.kept is None:
        return None
    width, vocab = model.shape.width, model.shape.vocab
    tokens = micro_batch * model.shape.seq_len
    chunk = min(tokens, HEAD_CHUNK)
    logits = (4 if model.fp8_gradients and (gpu is None or gpu.fp8) else 2) * chunk * vocab
    head = 6 * vocab * width + 4 * vocab * width * (tokens > chunk)  # 16-bit weight, fp32 gradient, its next part
    copies = 2 * 12 * model.shape.layers * width**2  # 16-bit block weights, kept for the backward
    kept = model.kept - (KEPT_HIDDEN * model.shape.layers if model.fused_mlp and gpu and gpu.hopper else 0)
    activations = tokens * width * (kept + 4)  # and the head's input with its gradient
    return own_bytes(model, sharded, ranks) + copies + activations + logits + head


def largest_micro_batch(shape: Shape, room: float, policy: str, tensor_parallel: int = 1) -> int:
    """Sequences per forward that fit in `room` bytes beside the model state (0 if none)."""
    one = activation_bytes(shape, 1, policy, tensor_parallel=tensor_parallel) + logits_bytes(shape, 1)
    return max(0, int(room // one))


def all_reduce_seconds(size: float, ranks: int, link: float) -> float:
    """A ring all-reduce of `size` bytes moves 2 (n-1)/n of them over each link (link in bytes/s)."""
    return 2 * (ranks - 1) / ranks * size / link


def pipeline_bubble(stages: int, microbatches: int, virtual: int = 1) -> float:
    """Idle time over ideal time: (p-1)/m, divided by v interleaved stages (Narayanan et al. 2021)."""
    return (stages - 1) / (microbatches * virtual)


def checkpoint_interval(stall: float, mtbf: float) -> float:
    """Seconds between checkpoints that lose least: sqrt(2 * stall * MTBF) (Young 1974; Daly 2006)."""
    return math.sqrt(2 * stall * mtbf)


# ---------------------------------------------------------------------------------------------- input


def quantity(text: str) -> float:
    """'10B' -> 1e10. For argparse."""
    units = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    factor = units.get(text[-1:].lower(), 1)
    return positive(text[:-1] if factor != 1 else text) * factor


def duration(text: str) -> float:
    """'6h', '10m', '30s', '2d' -> seconds. For argparse."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    if text[-1:].lower() not in units:
        raise argparse.ArgumentTypeError(f"{text!r} needs a unit: 30s, 10m, 6h or 2d")
    return positive(text[:-1]) * units[text[-1].lower()]


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive and finite")
    return value


def share(text: str) -> float:
    """'0.4' or '40%' -> 0.4. For argparse."""
    return positive(text[:-1]) / 100 if text.endswith("%") else positive(text)


def whole(text: str) -> int:
    value = quantity(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number")
    return int(value)


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("plan", help="memory, time, cost and strategy of a run")
    add = parser.add_argument_group("model").add_argument
    add("--model", help=f"{', '.join(GPT2_FAMILY)} or a recipe of the trainer (default: gpt2)")
    add("--params", type=quantity, help="only a parameter count, such as 7B: no activations")
    for flag, text in (
        ("layers", "blocks"),
        ("width", "model width"),
        ("heads", "attention heads"),
        ("seq-len", "tokens per sequence"),
        ("vocab", "vocabulary, padding included"),
    ):
        add(f"--{flag}", type=whole, help=text)
    add("--trainable-params", type=whole, help="adapters: only so many parameters are trained")
    add = parser.add_argument_group("hardware").add_argument
    add("--gpu", help=", ".join(g.name for g in GPUS))
    add("--count", type=whole, default=1, help="number of GPUs (default: 1)")
    add("--peak", type=positive, help="by hand: dense 16-bit peak in TFLOP/s")
    add("--memory", type=positive, help="by hand: GB per GPU")
    add("--bandwidth", type=positive, help="by hand: GB/s between GPUs, one direction")
    add("--price", type=positive, help="per GPU and hour, in your currency")
    add(
        "--billed-by",
        choices=BILLING_SECONDS,
        default="hour",
        help="unit that is rounded up to (default: hour)",
    )
    add("--spot-mtbf", type=duration, help="mean time between preemptions of the whole instance, such as 6h")
    add(
        "--device-mtbf",
        type=duration,
        default=DEVICE_MTBF_HOURS * 3600,
        help=f"mean time between failures of one GPU (default: {DEVICE_MTBF_HOURS:,.0f}h, Llama 3's fleet)",
    )
    add = parser.add_argument_group("work").add_argument
    add("--tokens", type=quantity, default=1e10, help="training tokens, such as 10B (default: 10B)")
    add("--mfu", type=share, help="share of the peak that is reached, such as 0.4 or 40%%")
    add("--measured", metavar="RUN", help="take MFU, setup, validation and checkpoint shares from a real run")
    add("--quoted-hours", type=positive, help="hours that someone promised: solves for the MFU instead")
    add("--micro-batch", type=whole, default=8, help="sequences per forward and rank (default: 8)")
    add("--batch-tokens", type=whole, default=524288, help="tokens per optimizer step (default: 524288)")
    add("--contingency", type=share, help="share of training time added for what goes wrong, by hand")
    add("--checkpoint-stall", type=duration, help="time that a save stops training, such as 2s")
    add("--tensor-parallel", type=whole, default=1, help="t in the activation formula (default: 1)")
    add("--pipeline", type=whole, default=1, help="pipeline stages p")
    add("--pipeline-microbatches", type=whole, default=8, help="micro-batches m per step in the pipeline")
    add("--virtual-stages", type=whole, default=1, help="interleaved stages v per GPU")
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def run(args: argparse.Namespace) -> int:
    plan = make_plan(args)
    print(json.dumps(plan, indent=2) if args.json else render(plan))
    return 0


def choose_model(args: argparse.Namespace) -> Model:
    """The model that the flags describe. Raises UserError where they contradict each other."""
    sizes = {key: getattr(args, key) for key in ("layers", "width", "heads", "seq_len", "vocab")}
    given = {key: value for key, value in sizes.items() if value is not None}
    if args.params is not None:
        if args.model or given:
            raise UserError("--params stands alone: give a count, or a model, or sizes")
        count = int(args.params)
        return Model(f"{human_count(count)} parameters", count, count, 0, None)
    if args.model is not None and args.model not in GPT2_FAMILY:
        return recipe_model(args.model, given)
    known = args.model or ("gpt2" if not given else None)
    base = dict(zip(("layers", "width", "heads"), GPT2_FAMILY[known])) if known else {}
    sizes = base | given
    if missing := [key for key in ("layers", "width", "heads") if key not in sizes]:
        raise UserError("a model by hand also needs --" + ", --".join(missing))
    if sizes["width"] % sizes["heads"]:
        raise UserError(f"a width of {sizes['width']} is not divisible by {sizes['heads']} heads")
    return gpt_model((known or "custom") + (", changed" if known and given else ""), **sizes)


def choose_gpu(args: argparse.Namespace) -> Gpu:
    """The GPU from the table or by hand. Raises UserError for a peak of the wrong kind."""
    by_hand = (args.peak, args.memory, args.bandwidth)
    if args.gpu is None:
        if None in by_hand:
            raise UserError("name a GPU with --gpu, or give --peak, --memory and --bandwidth together")
        return Gpu(
            "by hand",
            args.peak,
            args.peak,
            None,
            args.memory,
            args.bandwidth,
            args.bandwidth,
            "given by hand",
        )
    gpu = find_gpu(args.gpu)
    if args.peak is not None:
        wrong = {
            "with sparsity": SPARSITY * gpu.peak,
            "fp8": gpu.fp8,
            "fp8 with sparsity": SPARSITY * (gpu.fp8 or 0),
            "TF32": gpu.peak / 2,
        }
        for kind, peak in wrong.items():
            if peak and abs(args.peak - peak) <= 0.01 * peak:
                raise UserError(
                    f"--peak {args.peak:g} is {gpu.name}'s {kind} peak; training in 16 bits is measured "
                    f"against the dense one, {gpu.peak:g} TFLOP/s"
                )
        gpu = replace(gpu, bf16=args.peak)
    return replace(gpu, memory=args.memory or gpu.memory, link=args.bandwidth or gpu.link)


def check_mfu(mfu: float, gpu: Gpu, source: str) -> float:
    """Refuse an MFU above 100% with its likely cause."""
    if mfu <= 1:
        return mfu
    cause = "the tokens, the hours or the model are another run's"
    if mfu <= SPARSITY:
        cause = (
            f"it would be {100 * mfu / SPARSITY:.0f}% of twice that, so the figure was likely "
            "computed with the "
            "peak for sparsity or fp8, or for twice the GPUs"
        )
    raise UserError(
        f"{source} means {100 * mfu:.0f}% of {gpu.name}'s dense 16-bit peak of {gpu.peak:g} TFLOP/s, which cannot be: {cause}"
    )


# ----------------------------------------------------------------------------------------------- plan


def make_plan(args: argparse.Namespace) -> dict[str, Any]:
    """All figures as one JSON-ready object. Raises UserError for contradictory or impossible input."""
    model, gpu = choose_model(args), choose_gpu(args)
    if args.trainable_params is not None and args.trainable_params > model.parameters:
        raise UserError(f"--trainable-params {args.trainable_params:,} exceeds the model's {model.parameters:,}")
    measured = read_json(run_directory(args.measured) / "result.json") if args.measured else None
    flops = {
        "6N + attention": model.flops_per_token * args.tokens,
        "6N": 6 * model.matmul_parameters * args.tokens,
    }
    mfu, mfu_source = choose_mfu(args, gpu, measured, flops["6N + attention"])
    step_tokens = args.batch_tokens
    time = {name: hours(f, args.count, gpu.peak, mfu) for name, f in flops.items()}
    training_seconds = time["6N + attention"] * 3600
    checkpoints = plan_checkpoints(args, model, gpu, training_seconds, measured)
    memory = plan_memory(args, model, gpu)
    return {
        "schema": 1,
        "model": {
            "name": model.name,
            "parameters": model.parameters,
            "matmul_parameters": model.matmul_parameters,
            "flops_per_token": model.flops_per_token,
            "flops_per_token_6n": 6 * model.matmul_parameters,
        },
        "gpu": {
            "name": gpu.name,
            "count": args.count,
            "peak_tflops": gpu.peak,
            "memory_gb": gpu.memory,
            "link_gb_per_s": gpu.link,
            "precision": "bf16" if gpu.bf16 else "fp16",
            "source": gpu.source,
        },
        "work": {
            "tokens": args.tokens,
            "steps": math.ceil(args.tokens / step_tokens),
            "batch_tokens": step_tokens,
            "flops": flops["6N + attention"],
            "flops_6n": flops["6N"],
        },
        "mfu": {"value": mfu, "source": mfu_source},
        "hours": {
            "value": time["6N + attention"],
            "by_6n": time["6N"],
            "gpu_hours": time["6N + attention"] * args.count,
            "gpu_hours_by_6n": time["6N"] * args.count,
        },
        "cost": plan_cost(args, training_seconds, checkpoints, measured),
        "memory": memory,
        "communication": plan_communication(args, model, gpu, mfu),
        "pipeline": {
            "stages": args.pipeline,
            "microbatches": args.pipeline_microbatches,
            "virtual_stages": args.virtual_stages,
            "bubble": pipeline_bubble(args.pipeline, args.pipeline_microbatches, args.virtual_stages),
        },
        "checkpoints": checkpoints,
        "strategy": choose_strategy(args, model, gpu),
    }


def choose_mfu(args: argparse.Namespace, gpu: Gpu, measured: dict[str, Any] | None, flops: float) -> tuple[float, str]:
    if sum(x is not None for x in (args.mfu, args.measured, args.quoted_hours)) > 1:
        raise UserError("give one of --mfu, --measured and --quoted-hours")
    if args.mfu is not None:
        return check_mfu(args.mfu, gpu, f"--mfu {args.mfu:g}"), "given"
    if args.quoted_hours is not None:
        mfu = hours(flops, args.count, gpu.peak, 1.0) / args.quoted_hours
        return check_mfu(mfu, gpu, f"--quoted-hours {args.quoted_hours:g}"), "solved from the quoted hours"
    if measured is not None:
        if measured.get("mfu") is None:
            raise UserError(
                f"{args.measured} has no MFU (it ran on {measured.get('device')}): measure on a GPU of the table, or give --mfu"
            )
        return check_mfu(measured["mfu"], gpu, args.measured), f"measured in {args.measured}"
    return ASSUMED_MFU, "assumed"


def plan_checkpoints(
    args: argparse.Namespace, model: Model, gpu: Gpu, training: float, measured: dict[str, Any] | None
) -> dict[str, Any]:
    """Interval, expected failures and the work they cost (seconds)."""
    # fp32 weights and two moments, one moment fewer where Muon trains
    size = 12.0 * model.parameters - 4 * model.muon_parameters
    copied = size if size <= USABLE * gpu.memory * GB else size / args.count  # by one rank; sharded if it must be
    stall = args.checkpoint_stall or copied / HOST_COPY
    if args.spot_mtbf is not None:
        mtbf, kind = args.spot_mtbf, "the whole instance's, on spot: not divided by its GPUs"
    else:
        mtbf, kind = args.device_mtbf / args.count, f"one GPU's, divided by {args.count}"
    interval = checkpoint_interval(stall, mtbf)
    failures = training / mtbf
    setup = setup_seconds(measured)
    return {
        "bytes": size,
        "stall_seconds": stall,
        "stall_source": "given" if args.checkpoint_stall else f"copy to host memory at {HOST_COPY / GB:.0f} GB/s",
        "mtbf_hours": mtbf / 3600,
        "mtbf_kind": kind,
        "interval_seconds": interval,
        "expected_failures": failures,
        "lost_seconds_per_failure": interval / 2 + setup,
        "overhead_share": stall / interval + (interval / 2 + setup) / mtbf,
    }


def setup_seconds(measured: dict[str, Any] | None) -> float:
    """Seconds from a start to the end of the first step, compilation included; 0 when nothing was measured."""
    return float((measured or {}).get("startup_seconds") or 0)


def plan_cost(
    args: argparse.Namespace, training: float, checkpoints: dict[str, Any], measured: dict[str, Any] | None
) -> dict[str, Any]:
    """Seconds to pay for beside training, and the price of it all; no price is invented."""
    extra: dict[str, float] = {}
    if measured is not None:
        trained = float(measured["train_seconds"])
        extra["setup"] = setup_seconds(measured)
        extra["validation"] = training * float(measured["val_seconds"]) / trained
        extra["checkpoints"] = training * float(measured["checkpoint_stall_seconds"]) / trained
        extra["retries"] = checkpoints["expected_failures"] * checkpoints["lost_seconds_per_failure"]
    if args.contingency is not None:
        extra["contingency"] = training * args.contingency
    seconds = training + sum(extra.values())
    unit = BILLING_SECONDS[args.billed_by]
    billed = math.ceil(seconds / unit - 1e-9) * unit / 3600
    return {
        "extra_seconds": extra,
        "billed_hours": billed,
        "billed_by": args.billed_by,
        "price_per_gpu_hour": args.price,
        "total": None if args.price is None else args.price * args.count * billed,
    }


def plan_memory(args: argparse.Namespace, model: Model, gpu: Gpu) -> dict[str, Any]:
    """Bytes per rank: state by ZeRO stage, this trainer's own layout, activations by policy, logits."""
    n, trainable = args.count, args.trainable_params
    states = [state_bytes(model, stage, n, trainable) for stage in range(4)]
    result: dict[str, Any] = {
        "state": dict(zip(("ddp", "zero1", "zero2", "zero3"), states)),
        "saving": [states[0] / s for s in states[1:]],
        "own_layout": own_bytes(model, False, n),
        "own_layout_sharded": own_bytes(model, True, n),
    }
    if trainable is not None:
        result["adapters"] = {
            "trainable": trainable,
            "optimizer_bytes": 12 * trainable,
            "frozen_bytes": 2 * (model.parameters - trainable),
        }
    if (shape := model.shape) is None:
        return result | {"activations": None}
    t, b = args.tensor_parallel, args.micro_batch
    result["activations"] = {
        "micro_batch": b,
        "by_policy": {
            p: {
                "fused": activation_bytes(shape, b, p, False, t),
                "with_quadratic": activation_bytes(shape, b, p, True, t),
            }
            for p in POLICIES
        },
        "per_layer_fused": activation_bytes(shape, b, "none", False, t) / shape.layers,
    }
    result["logits"] = logits_bytes(shape, b)
    predicted = functools.partial(trainer_peak, model, gpu=gpu)
    if (peak := predicted(b)) is not None:
        fits = (m for m in range(4096, 0, -1) if (predicted(m) or 0) <= USABLE * gpu.memory * GB)
        result["trainer"] = {"peak": peak, "largest_micro_batch": next(fits, 0)}
    room = USABLE * gpu.memory * GB - states[0]
    result["largest_micro_batch"] = {p: largest_micro_batch(shape, room, p, t) for p in POLICIES}
    return result


def plan_communication(args: argparse.Namespace, model: Model, gpu: Gpu, mfu: float) -> dict[str, Any]:
    """Seconds per step of the gradient all-reduce, and of the backward it can hide behind."""
    trained = args.trainable_params or model.parameters
    size = 4.0 * trained  # fp32 gradients, as this trainer reduces them
    seconds = all_reduce_seconds(size, args.count, gpu.link * GB)
    compute = model.flops_per_token * args.batch_tokens / args.count / (gpu.peak * 1e12 * mfu)
    seq_len = model.shape.seq_len if model.shape else 1024
    per_rank = args.batch_tokens / args.count
    last = min(1.0, args.micro_batch * seq_len / per_rank)  # only the last micro-batch's backward overlaps
    backward = BACKWARD_SHARE * compute * last
    return {
        "gradient_bytes": size,
        "all_reduce_seconds": seconds,
        "step_compute_seconds": compute,
        "overlappable_backward_seconds": backward,
        "hides": seconds <= backward,
        "exposed_share_at_worst": seconds / (compute + seconds),
    }


@dataclass(frozen=True)
class Rung:
    """One strategy and the bytes per rank that it needs."""

    name: str
    need: float


def ladder(model: Model, count: int, trainable: int | None) -> Iterator[Rung]:
    """Strategies in the order in which they are worth their trouble, each at a micro-batch of 1 (a larger
    batch is accumulated): the first that fits is the right one."""

    def need(stage: int, policy: str = "none") -> float:
        size = state_bytes(model, stage, count, trainable)
        if model.shape is not None:
            size += activation_bytes(model.shape, 1, policy) + logits_bytes(model.shape, 1)
        return size

    yield Rung("DDP" if count > 1 else "one GPU, nothing sharded", need(0))
    if count > 1:
        yield Rung("ZeRO-1 (optimizer state sharded by owner)", need(1))
        if count <= NODE:
            yield Rung("FSDP2, reshard_after_forward=False (like ZeRO-2)", need(2))
        yield Rung("FSDP2, reshard_after_forward=True (like ZeRO-3)", need(3))
    if model.shape is not None:
        stage, base = (3, "FSDP2 (like ZeRO-3)") if count > 1 else (0, "one GPU")
        yield Rung(f"{base} and selective recomputation", need(stage, "selective"))
        yield Rung(f"{base} and whole blocks recomputed", need(stage, "per-block"))


def choose_strategy(args: argparse.Namespace, model: Model, gpu: Gpu) -> dict[str, Any]:
    """The first rung that fits, why those before it do not, what comes next, and when to move on."""
    room = USABLE * gpu.memory * GB
    rungs = list(ladder(model, args.count, args.trainable_params))
    split, split_reason = model_parallelism(model, room)
    chosen = next((i for i, rung in enumerate(rungs) if rung.need <= room), None)
    usable = f"of {gigabytes(room)} usable"
    if chosen is None:
        best = min(rungs, key=lambda rung: rung.need)
        recommended, next_step = split, "more or larger GPUs"
        reason = f"{best.name} takes {gigabytes(best.need)} a rank {usable}; {split_reason}"
    else:
        recommended = rungs[chosen].name
        smaller = (rung.name for rung in rungs[chosen + 1 :] if rung.need < rungs[chosen].need)
        next_step = next(smaller, split)
        reason = f"takes {gigabytes(rungs[chosen].need)} a rank {usable}, and nothing simpler fits"
        if chosen == 0:
            reason = f"{gigabytes(rungs[0].need)} a rank {usable}: the smallest that fits is the control"
        else:
            reason += f" ({rungs[chosen - 1].name} takes {gigabytes(rungs[chosen - 1].need)})"
    smallest = smallest_gpu(model, args.trainable_params)
    return {
        "usable_bytes": room,
        "recommended": recommended,
        "need_bytes": None if chosen is None else rungs[chosen].need,
        "reason": reason,
        "next_step": next_step,
        "smallest_gpu": smallest.name if smallest else None,
        "framework": framework(args.count, chosen is not None),
    }


def model_parallelism(model: Model, room: float) -> tuple[str, str]:
    """What splits the model itself, by what is too large: one sequence's activations, or everything."""
    if model.shape is not None and activation_bytes(model.shape, 1, "per-block") > room / 2:
        return (
            "context parallelism",
            "one sequence's activations alone fill the GPU, so the sequence is split",
        )
    return (
        "tensor parallelism inside the node, then pipeline stages across nodes",
        "nothing smaller fits, so the layers themselves are split (expert parallelism is for mixtures of experts)",
    )


def smallest_gpu(model: Model, trainable: int | None) -> Gpu | None:
    """The smallest GPU of the table on which one sequence trains, to debug on; None if there is none. Only with
    native bf16: bugs are looked for in the arithmetic that the real run will use."""
    need = next(ladder(model, 1, trainable)).need
    fitting = [gpu for gpu in GPUS if gpu.bf16 and need <= USABLE * gpu.memory * GB]
    return min(fitting, key=lambda gpu: (gpu.memory, gpu.peak), default=None)


def framework(count: int, fits: bool) -> str:
    """Where to train: here, or what to move to and why."""
    if fits and count <= NODE:
        return "this trainer: it fits without splitting layers, on one node"
    if fits:
        return (
            "torchtitan: the same FSDP2 over several nodes, with elastic launch and sharded "
            "checkpoints; this "
            "trainer starts one node"
        )
    return (
        "torchtitan (tensor, pipeline and context parallelism on PyTorch's own primitives), or Megatron-LM "
        "where hundreds of GPUs and the last percent of MFU matter"
    )


# ------------------------------------------------------------------------------------------------ text


def gigabytes(size: float) -> str:
    return f"{size / GB:,.3g} GB" if size < 100 * GB else f"{size / GB:,.0f} GB"


def clock(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.4g} h"


def render(plan: dict[str, Any]) -> str:
    """The plan for a person, one topic a paragraph, 100 columns wide."""
    indent = 15 * " "
    return "\n".join(
        textwrap.fill(text, 100, initial_indent=f"{name:15s}", subsequent_indent=indent + "  ") for name, text in lines(plan)
    )


def lines(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    model, gpu, work, mfu, time = (plan[key] for key in ("model", "gpu", "work", "mfu", "hours"))
    n = gpu["count"]
    yield (
        "model",
        (
            f"{model['name']}: {human_count(model['parameters'])} parameters, of which "
            f"N = {human_count(model['matmul_parameters'])} multiply every token"
        ),
    )
    yield (
        "",
        "  (the head counts once, tied or not; positions, norms and biases are looked up or added: not in N)",
    )
    yield "FLOPs", f"{model['flops_per_token'] / 1e6:,.2f} MFLOP a token by 6 * N + 12 * L * d * T"
    gap = model["flops_per_token"] / model["flops_per_token_6n"] - 1
    yield (
        "",
        (
            f"{model['flops_per_token_6n'] / 1e6:,.2f} by 6 * N, which leaves out attention's "
            "products between tokens "
            f"({100 * gap:.0f}% more here; no discount for the causal half)"
        ),
    )
    yield (
        "work",
        (
            f"{human_count(work['tokens'])} tokens = {work['steps']:,} steps of {work['batch_tokens']:,}: "
            f"{work['flops']:.2e} FLOP ({work['flops_6n']:.2e} by 6N)"
        ),
    )
    yield (
        "hardware",
        (
            f"{n} x {gpu['name']}: {gpu['peak_tflops']:g} TFLOP/s dense {gpu['precision']}, "
            f"{gpu['memory_gb']:g} GB, {gpu['link_gb_per_s']:g} GB/s to its peers [{gpu['source']}]"
        ),
    )
    yield "MFU", f"{100 * mfu['value']:.1f}% ({mfu['source']})"
    yield (
        "time",
        (
            f"{time['value']:,.2f} h = {time['gpu_hours']:,.1f} GPU-hours, attention counted; "
            f"{time['by_6n']:,.2f} h = {time['gpu_hours_by_6n']:,.1f} by 6N"
        ),
    )
    cost = plan["cost"]
    for name, seconds in cost["extra_seconds"].items():
        yield "", f"  + {clock(seconds)} {name}"
    if not cost["extra_seconds"]:
        yield (
            "",
            "  (no allowance for setup, checkpoints and retries: --measured RUN or --contingency gives one)",
        )
    billed = f"{cost['billed_hours']:,.4g} h of {n} GPUs billed by the {cost['billed_by']}"
    yield (
        "cost",
        f"{cost['total']:,.2f} for {billed}" if cost["total"] is not None else f"{billed}; no price was given",
    )
    yield from memory_lines(plan)
    comm = plan["communication"]
    if n > 1:
        verdict = "hides in" if comm["hides"] else "does NOT hide in"
        yield (
            "communication",
            (
                f"{gigabytes(comm['gradient_bytes'])} of fp32 gradients a step: all-reduce "
                f"{clock(comm['all_reduce_seconds'])}, {verdict} the last micro-batch's backward of "
                f"{clock(comm['overlappable_backward_seconds'])}; step "
                f"{clock(comm['step_compute_seconds'])}, "
                f"at worst {100 * comm['exposed_share_at_worst']:.1f}% exposed"
            ),
        )
    pipeline = plan["pipeline"]
    if pipeline["stages"] > 1:
        yield (
            "pipeline",
            (
                f"bubble {100 * pipeline['bubble']:.1f}% = (p-1)/(m*v) for p={pipeline['stages']}, "
                f"m={pipeline['microbatches']}, v={pipeline['virtual_stages']}"
            ),
        )
    ckpt = plan["checkpoints"]
    yield (
        "checkpoints",
        (
            f"{gigabytes(ckpt['bytes'])} every {clock(ckpt['interval_seconds'])} = sqrt(2 * stall * "
            "MTBF), stall "
            f"{clock(ckpt['stall_seconds'])} ({ckpt['stall_source']}), MTBF {ckpt['mtbf_hours']:,.0f} h "
            f"({ckpt['mtbf_kind']})"
        ),
    )
    yield (
        "",
        (
            f"{ckpt['expected_failures']:.2g} failures expected, "
            f"{clock(ckpt['lost_seconds_per_failure'])} lost by each; "
            f"saves and losses cost {100 * ckpt['overhead_share']:.2g}% of the time"
        ),
    )
    strategy = plan["strategy"]
    yield "strategy", f"{strategy['recommended']}: {strategy['reason']}"
    yield "", f"next step up: {strategy['next_step']}"
    yield (
        "debug on",
        (
            f"{strategy['smallest_gpu']}, the smallest in the table that trains one sequence of it"
            if strategy["smallest_gpu"]
            else "no single GPU of the table trains this model"
        ),
    )
    yield "framework", strategy["framework"]


def memory_lines(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    memory, n = plan["memory"], plan["gpu"]["count"]
    state = memory["state"]
    stages = ", ".join(
        f"{name} {gigabytes(state[key])}" + (f" ({saving:.1f}x less)" if n > 1 else "")
        for name, key, saving in zip(("ZeRO-1", "ZeRO-2", "ZeRO-3"), ("zero1", "zero2", "zero3"), memory["saving"])
    )
    base = "16 bytes a parameter" if "adapters" not in memory else "2 bytes frozen, 16 bytes trained"
    yield "memory a rank", f"state at {base}: DDP {gigabytes(state['ddp'])}, {stages}"
    if "adapters" in memory:
        adapters = memory["adapters"]
        yield (
            "",
            (
                f"  adapters: {gigabytes(adapters['optimizer_bytes'])} of optimizer state is all "
                "that ZeRO-1 can shard; "
                f"the frozen weights are {gigabytes(adapters['frozen_bytes'])}"
            ),
        )
    else:
        yield (
            "",
            (
                "  this trainer (fp32 weights and gradients, one moment for Muon): "
                f"{gigabytes(memory['own_layout'])}, "
                f"with moments sharded by owner {gigabytes(memory['own_layout_sharded'])}"
            ),
        )
    if (activations := memory["activations"]) is None:
        yield "", "activations need a shape: give --layers, --width and --heads"
        return
    if "trainer" in memory:
        trainer = memory["trainer"]
        yield (
            "",
            f"this trainer's peak at micro-batch {activations['micro_batch']}: {gigabytes(trainer['peak'])}; "
            f"largest micro-batch that fits {trainer['largest_micro_batch']}",
        )
    yield "", f"activations at micro-batch {activations['micro_batch']}, with fused attention (without it):"
    for policy, sizes in activations["by_policy"].items():
        largest = memory["largest_micro_batch"][policy]
        yield (
            "",
            (
                f"  {policy:14s}{gigabytes(sizes['fused']):>9s} ({gigabytes(sizes['with_quadratic'])}); "
                f"largest micro-batch under DDP {largest}"
            ),
        )
    yield (
        "",
        f"logits and their gradient in fp32 {gigabytes(memory['logits'])}, unless the loss is computed in chunks",
    )
