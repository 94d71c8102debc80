"""`python -m data`: token shards for training, fetched or built, and checked."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from data.errors import is_user_error, user_error

# What a folder that cannot be written looks like; any other OSError is a bug and keeps its traceback.
_FOLDER_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """argparse's own errors as one line, like all others."""
        print(f"error: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def quantity(text: str) -> int:
    """A count with an optional suffix: 500000, 100M, 1.5B."""
    factor = {"K": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:].upper(), 1)
    try:
        value = float(text if factor == 1 else text[:-1]) * factor
        if value != int(value) or value < 1:
            raise ValueError
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count of tokens such as 500000, 100M or 1B") from None
    return int(value)


def natural(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if natural(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def cpu_count() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_sample(args: argparse.Namespace) -> int:
    from data.sample import make_sample

    made = make_sample(args.out)
    print(f"{args.out}: sample shards {'written' if made else 'verified'}")
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    from data.fetch import Wanted, fetch

    folder = args.out or Path("data") / args.dataset.rsplit("/", 1)[-1]
    wanted = Wanted(args.tokens, args.shards)
    manifest = fetch(args.dataset, folder, wanted, args.revision, args.connections, args.retries)
    tokens = sum(shard.tokens for shard in manifest.shards)
    print(f"{folder}: {len(manifest.shards)} shards, {tokens:,} tokens, verified; revision {manifest.revision}")
    print(f"fingerprint {manifest.fingerprint}")
    return 0


def run_build(args: argparse.Namespace) -> int:
    from data.build import build, recorded_revision
    from data.sources import CheckedHubFiles, HubDataset, LocalFiles, Source

    if bool(args.dataset) == bool(args.files):
        raise user_error("say where the text is: either --dataset NAME or --files FILE ...")
    source: Source
    if args.files:
        if args.name or args.revision or args.check_source:
            raise user_error("--name, --revision and --check-source belong to --dataset, not to --files")
        source = LocalFiles(args.files, args.text_column)
    else:
        # A build goes on with the commit it began with, even if the data set has moved on since.
        revision = args.revision or recorded_revision(args.out, args.dataset)
        source = hub = HubDataset(args.dataset, args.name, args.split, revision, args.text_column)
        if args.check_source:
            source = CheckedHubFiles(hub, args.out)
    manifest, built = build(source, args.out, args.workers, args.shard_tokens, args.tokens)
    documents = sum(shard.documents for shard in manifest.shards)
    tokens = sum(shard.tokens for shard in manifest.shards)
    state = "built" if built else "already built"
    print(f"{args.out}: {state}: {len(manifest.shards)} shards, {documents:,} documents, {tokens:,} tokens")
    print(f"fingerprint {manifest.fingerprint}")
    if manifest.replaced:
        print(f"note: {manifest.replaced:,} characters that UTF-8 cannot hold became U+FFFD", file=sys.stderr)
    if len(manifest.shards) == 1:
        print(
            f"note: all of it is the val shard and nothing is left to train on; build again with --shard-tokens below {tokens}",
            file=sys.stderr,
        )
    return 0


def run_verify(args: argparse.Namespace) -> int:
    from data.checks import verify
    from data.format import list_shards
    from data.manifest import read_manifest

    problems = verify(args.folder, args.full)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        return 2
    manifest = read_manifest(args.folder)
    against = f"fingerprint {manifest.fingerprint}" if manifest else "no manifest: nothing to compare hashes with"
    how = "every byte" if args.full else "headers and sizes; --full for every byte"
    print(f"{args.folder}: {len(list_shards(args.folder))} shards are right ({how}); {against}")
    return 0


def run_stats(args: argparse.Namespace) -> int:
    from data.checks import Lengths, document_lengths, draw_lengths
    from data.format import list_shards, read_header

    paths = list_shards(args.folder)
    lengths_D = document_lengths(paths)
    summary = Lengths.of(lengths_D)
    for split in ("val", "train"):
        tokens = [read_header(path) for path in paths if f"_{split}_" in path.name]
        print(f"{split:>10}  {len(tokens):6,} shards  {sum(tokens):15,} tokens")
    print(f"{'documents':>10}  {summary.documents:,}, {summary.mean:,.0f} tokens each on average")
    print(f"{'tokens':>10}  " + "  ".join(f"{percent}%: {value:,}" for percent, value in summary.percentiles.items()))
    picture = args.picture or args.folder / "lengths.png"
    if picture.suffix not in (".png", ".svg", ".pdf"):
        raise user_error(f"{picture}: a picture must end with .png, .svg or .pdf")
    if not summary.documents:
        return 0  # nothing to draw
    title = f"{args.folder.name}: {summary.documents:,} documents, {summary.tokens:,} tokens"
    draw_lengths(lengths_D, title, picture)
    print(f"{'picture':>10}  {picture}")
    return 0


def run_peek(args: argparse.Namespace) -> int:
    from data.checks import find_document
    from data.format import EOT, list_shards
    from data.tokenizer import gpt2_encoding

    tokens_T = find_document(list_shards(args.folder), args.doc)
    body = tokens_T[1:] if tokens_T[0] == EOT else tokens_T
    print(f"document {args.doc}: {len(body):,} tokens", file=sys.stderr)
    text = gpt2_encoding().decode_bytes(body.tolist())
    sys.stdout.buffer.write(text + b"\n")
    sys.stdout.flush()
    return 0


def run_leak(args: argparse.Namespace) -> int:
    from data.format import list_shards
    from data.leak import find_leaks

    train, val = (
        list_shards(place, split) if place.is_dir() else [place] for place, split in ((args.train, "train"), (args.val, "val"))
    )
    leak = find_leaks(train, val, args.ngram, args.near)
    print(f"val: {leak.documents:,} documents, {leak.tokens:,} tokens")
    for exact, name in ((True, "exact"), (False, f"near (>= {args.near:.0%} of {args.ngram}-grams)")):
        count, tokens, share = leak.summary(exact)
        print(f"{name}: {count:,} documents in train, {tokens:,} tokens, {share:.3%} of val")
    for match in sorted(leak.matches, key=lambda m: -m.tokens)[: args.show]:
        kind = "equals" if match.exact else f"shares {match.share:.1%} with"
        found = f"val document {match.document} ({match.tokens:,} tokens)"
        print(f"  {found} {kind} train document {match.train_document}")
    return 0


def run_bench(args: argparse.Namespace) -> int:
    from data.bench import bench

    return bench(args.tokens, args.workers, args.json)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: object, help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help)
        made.set_defaults(run=run)
        return made

    p = command("sample", run_sample, "make the embedded sample: 249 presidential addresses, 2.4M tokens")
    p.add_argument("--out", type=Path, default=Path("data/sample"), help="folder (default: %(default)s)")

    p = command("fetch", run_fetch, "fetch shards that are tokenized already from the Hugging Face hub")
    p.add_argument("dataset", help="fineweb10B, fineweb100B, finewebedu10B, or OWNER/NAME")
    size = p.add_mutually_exclusive_group()
    size.add_argument("--tokens", type=quantity, default=0, help="train tokens needed, such as 1B (default: all)")
    size.add_argument("--shards", type=positive, default=0, help="train shards to fetch (default: all)")
    p.add_argument("--out", type=Path, help="folder (default: data/DATASET)")
    p.add_argument("--revision", default="", help="commit, tag or branch (default: the recorded, else the newest)")
    p.add_argument("--connections", type=positive, default=8, help="files at a time (default: %(default)s)")
    p.add_argument("--retries", type=natural, default=6, help="tries after the first for each file (default: %(default)s)")

    p = command("build", run_build, "tokenize a text data set or local files into shards; shard 0 is val")
    p.add_argument("--out", type=Path, required=True, help="folder for the shards")
    p.add_argument("--dataset", default="", help="data set on the hub such as HuggingFaceFW/fineweb, or a local folder")
    p.add_argument("--name", default="", help="its configuration, such as sample-10BT")
    p.add_argument("--split", default="train", help="its split (default: %(default)s)")
    p.add_argument("--revision", default="", help="commit, tag or branch (default: the newest, recorded)")
    p.add_argument(
        "--check-source",
        action="store_true",
        help="download each source file and compare its sha256 before reading it, instead of streaming",
    )
    p.add_argument("--files", nargs="+", default=[], metavar="FILE", help="local .parquet, .jsonl or .txt files")
    p.add_argument("--text-column", default="text", help="column or field with the text (default: %(default)s)")
    p.add_argument("--workers", type=positive, default=cpu_count(), help="tokenizer processes (default: all cores)")
    p.add_argument("--shard-tokens", type=quantity, default=10**8, help="tokens per shard (default: 100M)")
    p.add_argument("--tokens", type=quantity, default=0, help="stop after the document reaching this many (default: all)")

    p = command("verify", run_verify, "check shards against their headers, sizes and manifest")
    p.add_argument("folder", type=Path)
    p.add_argument("--full", action="store_true", help="read every byte: hashes, token range, document counts")

    p = command("stats", run_stats, "count tokens and documents, and draw the distribution of document lengths")
    p.add_argument("folder", type=Path)
    p.add_argument("--picture", type=Path, help="PNG or SVG file (default: lengths.png in the folder)")

    p = command("peek", run_peek, "print one document as text")
    p.add_argument("folder", type=Path)
    p.add_argument("--doc", type=int, default=0, help="number of the document, from 0, val first")

    p = command("leak", run_leak, "find validation documents that the train shards hold too")
    p.add_argument("train", type=Path, help="folder (its train shards) or one shard")
    p.add_argument("val", type=Path, help="folder (its val shards) or one shard")
    p.add_argument("--ngram", type=positive, default=13, help="tokens per n-gram (default: %(default)s)")
    p.add_argument("--near", type=float, default=0.8, help="share of n-grams that makes a match (default: %(default)s)")
    p.add_argument("--show", type=natural, default=10, help="matches to list (default: %(default)s)")

    p = command("bench", run_bench, "measure `build` against a plain loop over the same documents, and its memory")
    p.add_argument("--tokens", type=quantity, default=20_000_000, help="size of the text (default: 20M)")
    p.add_argument("--workers", type=positive, default=cpu_count(), help="tokenizer processes (default: all cores)")
    p.add_argument("--json", type=Path, help="write the numbers to this file too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 2 for a person's mistake, 7 for a full disk, 130 for Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except ValueError as error:
        if not is_user_error(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads on, as under `| head`
        return 0
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and error.errno not in _FOLDER_ERRORS:
            raise
        advice = "free some space and run the same command again" if full else "choose another folder"
        where = getattr(args, "out", None) or error.filename or "disk"
        print(f"error: {where}: {error.strerror}; {advice}", file=sys.stderr)
        return 7 if full else 2
    except KeyboardInterrupt:
        print("error: stopped; run the same command again to go on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
