"""The results as Markdown: for every machine the seeds' eleven rows, then the others."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
TITLES = {
    "metal-candle": "metal-candle",
    "candle": "Candle",
    "mlx": "MLX",
    "torch": "PyTorch",
    "torch-compiled": "PyTorch, compiled",
    "bitsandbytes": "PEFT, bitsandbytes",
    "llama.cpp": "llama.cpp",
}

Report = dict[str, Any]

# The rows that the project began with: their titles, and the names they have here.
SEEDS = [
    ("LoRA linear 512, rank 8", "lora-1x512-r8"),
    ("LoRA linear 1024, rank 8", "lora-1x1024-r8"),
    ("LoRA linear 2048, rank 8", "lora-1x2048-r8"),
    ("LoRA linear 1024, rank 4", "lora-1x1024-r4"),
    ("LoRA linear 1024, rank 8 (as above)", "lora-1x1024-r8"),
    ("LoRA linear 1024, rank 16", "lora-1x1024-r16"),
    ("LoRA linear 1024, rank 32", "lora-1x1024-r32"),
    ("LoRA linear 1024, rank 64", "lora-1x1024-r64"),
    ("softmax (4, 16, 1024)", "softmax-4x16x1024"),
    ("layer norm (4, 16, 1024)", "layer-norm-4x16x1024"),
    ("RMS norm (4, 16, 1024)", "rms-norm-4x16x1024"),
]


def unit_of(value: float) -> tuple[float, str]:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= unit:
            return unit, name
    return 1e-6, "µs"


def digits(value: float, unit: float) -> str:
    scaled = value / unit
    return f"{scaled:.{max(0, 2 - int(math.log10(max(scaled, 1))))}f}"


def seconds(value: float) -> str:
    unit, name = unit_of(value)
    return f"{digits(value, unit)} {name}"


def gibibytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB"


def floor(report: Report, row: dict[str, Any]) -> float:
    """The seconds that the row has to take on this machine, as Peaks::floor in crates/bench."""
    peaks, cost = report["peaks"], row["cost"]
    calls = row["tokens"] if row["work"] in ("decode", "serve") else 1
    working_set = cost["bytes"] / calls
    rate = min(peaks["read"], key=lambda pair: abs(math.log(working_set / pair[0])))[1]
    linear = peaks["linear_bf16"] if row.get("dtype") == "bf16" else peaks["linear_f32"]
    if row.get("dtype") == "bf16" and (row.get("file") or row.get("quantization")):
        linear = max(linear, peaks.get("linear_packed", 0.0))
    arithmetic = cost["operations"] / max(peaks["fma"], linear)
    return max(cost["bytes"] / rate, arithmetic, peaks.get("launch") or 0.0)


def cell(result: dict[str, Any] | None, kind: str) -> str:
    if result is None:
        return "–"
    if "not_timed" in result:
        return shortened(result["not_timed"])
    if kind not in result:
        return "–"
    found = result[kind]
    unit, _ = unit_of(found["median"])
    spread = f"{digits(found['p10'], unit)}–{digits(found['p90'], unit)}"
    text = f"{seconds(found['median'])} ({spread})"
    return text + (f", {gibibytes(result['peak'])}" if result.get("peak") else "")


def shortened(text: str) -> str:
    text = text.replace("|", "/").replace("\n", " ")
    return text if len(text) <= 60 else text[:57] + "..."


def ratio(sides: dict[str, Any], kind: str) -> str:
    """The best peer's time over ours: more than 1 is faster."""
    ours = sides.get("metal-candle", {}).get(kind)
    peers = {
        side: result[kind]["median"]
        for side, result in sides.items()
        if side != "metal-candle" and kind in result
    }
    if not ours or not peers:
        return "–"
    best = min(peers, key=peers.__getitem__)
    return f"{peers[best] / ours['median']:.2f} ({TITLES[best]})"


def table(report: Report, rows: list[tuple[str, str]], kind: str) -> list[str]:
    sides = list(report["versions"])
    head = ["", *(TITLES[side] for side in sides), "best peer ÷ ours", "floor", "ours at the floor"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for title, name in rows:
        entry = report["results"].get(name)
        if entry is None or not any(kind in side for side in entry["sides"].values()):
            continue
        least = floor(report, entry["row"])
        ours = entry["sides"].get("metal-candle", {}).get(kind)
        share = f"{100 * least / ours['median']:.0f} %" if ours else "–"
        cells = [cell(entry["sides"].get(side), kind) for side in sides]
        words = [title, *cells, ratio(entry["sides"], kind), seconds(least), share]
        lines.append("| " + " | ".join(words) + " |")
    return lines if len(lines) > 2 else []


def render(report: Report) -> str:
    machine, peaks = report["machine"], report["peaks"]
    reads = ", ".join(f"{rate / 1e9:.0f} GB/s from {size >> 20} MiB" for size, rate in peaks["read"])
    launch = f"; an operation that does nothing {seconds(peaks['launch'])}" if peaks.get("launch") else ""
    versions = ", ".join(f"{TITLES[side]} {text}" for side, text in report["versions"].items())
    packed = f", {peaks['linear_packed'] / 1e9:.0f} by packed weights" if "linear_packed" in peaks else ""
    lines = [
        f"## {name_of(report)}, {machine['cores']} cores, {gibibytes(machine['memory'])}",
        "",
        f"{machine['system']}, {report['device']}, {report['threads']} threads, {report['date']}.",
        f"{versions}.",
        *(f"`{command.strip()}`  " for command in report["commands"]),
        "",
        f"Measured peaks: {peaks['fma'] / 1e9:.0f} GFLOP/s of f32 multiply-adds; our linear"
        f" {peaks['linear_f32'] / 1e9:.0f} GFLOP/s in f32 and {peaks['linear_bf16'] / 1e9:.0f} in"
        f" bf16{packed}; reading {reads}; copying {peaks['copy'] / 1e9:.0f} GB/s{launch}.",
    ]
    seeds = {name for _, name in SEEDS}
    others = [(name, name) for name in report["results"] if name not in seeds]
    for title, rows, kind in [
        ("The first eleven rows, one call", SEEDS, "call"),
        ("The first eleven rows, a call in a queue", SEEDS, "queue"),
        ("Other rows, one call or step", others, "call"),
        ("Other rows, a call in a queue", others, "queue"),
    ]:
        found = table(report, rows, kind)
        if found:
            lines += ["", f"### {title}", "", *found]
    return "\n".join(lines) + "\n"


def name_of(report: Report) -> str:
    """The GPU if it did the work, else the processor."""
    processor = report["machine"]["processor"]
    return f"{report['gpu']} ({processor})" if report.get("gpu") else processor


def slug(report: Report) -> str:
    machine = report["machine"]
    text = f"{name_of(report)} {machine['cores']} cores {report['device']}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def write(report: Report, folder: Path, document: Path) -> None:
    """Keeps the report of this machine and renders those of all machines into the document. Rows that
    were not measured now stay as they were."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{slug(report)}.json"
    if path.is_file():
        kept = json.loads(path.read_text())
        commands = [line for line in kept["commands"] if line not in report["commands"]]
        report = report | {
            "results": kept["results"] | report["results"],
            "versions": kept["versions"] | report["versions"],
            "commands": commands + report["commands"],
        }
    path.write_text(json.dumps(report, indent=1) + "\n")
    reports = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    text = document.read_text()
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    tables = "\n".join(render(report) for report in reports)
    document.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{after}")
