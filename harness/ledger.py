"""The ledger of promotions: one JSON line per decision, appended and never edited, and a table for people.

Each line carries a sha256 of itself and that of the line before it, so that an edit, or the removal of any but the last, is
found on the next reading.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.common import SCHEMA, UserError, human_count

ROOT = Path(__file__).resolve().parent
LEDGER = ROOT / "ledger.jsonl"
TABLE = ROOT.parent / "docs" / "ledger.md"
START = "0" * 16  # what the first line names as its predecessor


def _digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:16]


def _seal(record: dict[str, Any]) -> str:
    return _digest(json.dumps({k: v for k, v in record.items() if k != "seal"}))


def read(path: Path = LEDGER) -> list[dict[str, Any]]:
    """Every record, oldest first. Raises UserError for a line that is broken, edited, or does not follow the one before."""
    records: list[dict[str, Any]] = []
    before = START
    try:
        lines = path.read_text().splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{path}:{number} is not JSON of a record; restore the file from version control")
        if record.get("schema") != SCHEMA:
            raise UserError(f"{path}:{number} has schema {record.get('schema')!r}; this version reads {SCHEMA}")
        if record.get("before") != before or record.get("seal") != _seal(record):
            raise UserError(
                f"{path}:{number} was edited or does not follow the line before it: the ledger is append-only; restore it from "
                "version control"
            )
        before = _digest(line)
        records.append(record)
    return records


def append(record: dict[str, Any], path: Path = LEDGER) -> dict[str, Any]:
    """Adds a record under the next id, durably, and returns it. Raises UserError where the ledger is damaged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        records = read(path)
        last = path.read_text().splitlines()[-1] if records else None
        sealed = {
            "schema": SCHEMA,
            "id": f"p{len(records) + 1:03d}",
            "before": _digest(last) if last is not None else START,
            **record,
        }
        sealed["seal"] = _seal(sealed)
        torn = records and not path.read_text().endswith("\n")
        file.write(("\n" if torn else "") + json.dumps(sealed) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return sealed


def find(records: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """The record of that id. Raises UserError with the ids there are."""
    for record in records:
        if record["id"] == name:
            return record
    known = ", ".join(r["id"] for r in records) or "none"
    raise UserError(f"no record {name!r} in the ledger (there are: {known})")


def control_of(records: Sequence[dict[str, Any]], recipe: str) -> dict[str, Any] | None:
    """The record that last made a candidate the control of a recipe; None: the bare recipe is the control."""
    chosen = [r for r in records if r["kind"] == "control" and r["recipe"] == recipe]
    return chosen[-1] if chosen else None


def origin_loss(records: Sequence[dict[str, Any]], workload_key: str) -> float | None:
    """The val loss of the first control that ran on this workload: small losses must not add up over promotions."""
    for record in records:
        if record["kind"] == "decision" and record["workload"]["key"] == workload_key:
            loss = record["measured"]["control"]["val_loss"]
            if loss is not None:  # one that was only profiled, or had no room, has none
                return float(loss)
    return None


# --- the table ---------------------------------------------------------------------------------------------


def _cell(text: Any) -> str:
    return str(text).replace("|", "/").replace("\n", " ")


def table(records: Sequence[dict[str, Any]]) -> str:
    """docs/ledger.md: a row per decision, and each one's gates below."""
    decisions = [r for r in records if r["kind"] == "decision"]
    promoted = {r["of"]: r for r in records if r["kind"] == "control"}
    lines = [
        "# Ledger of promotions",
        "",
        "Written by `python -m harness promote` from `harness/ledger.jsonl`; edits here are lost. A rejected candidate",
        "stays: it is as good to know as an accepted one. What the gates ask is in [promote.md](promote.md).",
        "",
        "| id | date | candidate | against | hardware | tokens/s, ratio | val loss | peak memory | verdict | why |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in decisions:
        new, old = r["measured"]["candidate"], r["measured"]["control"]
        now = f", now the control ({promoted[r['id']]['id']})" if r["id"] in promoted else ""
        lines.append(
            "| "
            + " | ".join(
                map(
                    _cell,
                    (
                        f"[{r['id']}](#{r['id']})",
                        r["date"][:10],
                        f"`{r['candidate']}`",
                        difference_text(r),
                        r["hardware"]["text"],
                        _speed(r),
                        _change(new.get("val_loss"), old.get("val_loss"), "{:.4f}", "{:+.4f}"),
                        _memory(new),
                        f"**{r['verdict']}**{now}",
                        r["reason"],
                    ),
                )
            )
            + " |"
        )
    for r in decisions:
        lines += ["", detail(r)]
    return "\n".join(lines) + "\n"


def difference_text(record: dict[str, Any]) -> str:
    pairs = (f"{name} {before} -> {after}" for name, (before, after) in sorted(record["difference"].items()))
    return "; ".join(pairs) or "nothing"


def _speed(record: dict[str, Any]) -> str:
    new, ratio = record["measured"]["candidate"], record["measured"].get("ratio")
    if new.get("tokens_per_s") is None:
        return "-"
    text = human_count(new["tokens_per_s"])
    if ratio:
        text += f", {ratio[0]:.3f} ({ratio[1]:.3f} to {ratio[2]:.3f})"
    return text


def _change(new: float | None, old: float | None, value: str, change: str) -> str:
    if new is None:
        return "-"
    return value.format(new) + (f" ({change.format(new - old)})" if old is not None else "")


def _gigabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.3f} GB"


def _memory(arm: dict[str, Any]) -> str:
    return f"{arm['peak_bytes'] / 1e9:.1f} GB" if arm.get("peak_bytes") else "-"


def detail(record: dict[str, Any]) -> str:
    """One decision in Markdown: what was compared, on what, and each gate with its evidence."""
    w, hardware, software = record["workload"], record["hardware"], record["software"]
    lines = [
        f'## <a id="{record["id"]}"></a>{record["id"]}: {record["candidate"]}, {record["verdict"]}',
        "",
        f"{record['reason']}.",
        "",
        f"- difference: {difference_text(record)}; objective: {record['objective']}; tolerance {record['tolerance']} nats "
        f"({record['rationale']})",
        f"- workload: {w['recipe']}, {w['steps']} steps of {w['batch_tokens']:,} tokens in rows of {w['seq_len']}, "
        f"seeds {', '.join(map(str, w['seeds']))}, data {w['dataset'] or w['data_fingerprint'][:12]}",
        f"- hardware: {hardware['text']}; software: " + ", ".join(f"{k} {v}" for k, v in software.items() if v is not None),
    ]
    for gate in record["gates"]:
        lines.append(f"- gate {gate['number']}, {gate['name']}: **{gate['status']}**. {gate['evidence']}")
    lines += [
        "",
        "| | tokens/s | step ms | MFU | peak memory | state | checkpoint | stall | start s | device h / 10^9 tokens | val loss |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in ("control", "candidate"):
        m = record["measured"][name]
        cells = (
            _or_dash(m.get("tokens_per_s"), "{:,.0f}"),
            _or_dash(m.get("step_ms"), "{:.1f}"),
            _or_dash(m.get("mfu"), "{:.1%}"),
            _memory(m),
            _gigabytes(m.get("state_bytes")),
            _gigabytes(m.get("checkpoint_bytes")),
            _or_dash(m.get("checkpoint_stall_ms"), "{:.1f} ms"),
            _or_dash(m.get("startup_s"), "{:.1f}"),
            _or_dash(m.get("device_hours_per_billion"), "{:.3f}")
            + (f" (${m['cost_per_billion']:.2f})" if m.get("cost_per_billion") is not None else ""),
            _or_dash(m.get("val_loss"), "{:.4f}"),
        )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", *(f"- {text}" for text in record.get("notes", []))]
    return "\n".join(lines).rstrip()


def _or_dash(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def write_table(records: Sequence[dict[str, Any]], path: Path = TABLE) -> None:
    """Replaces the table in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(table(records))
    temporary.replace(path)
