"""Rounds in which every side does the same work in turn, and the table of what it took.

Every side is a process of its own (worker.py, src/main.rs) that reads the same inputs from a file.
Its results are compared with a reference in f64 before anything is timed; a side that is wrong is
reported and not timed. Then the sides take turns, round after round, each round beginning with
another, with a pause before each so that the threads of the one before are asleep.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shlex
import subprocess
import sys
import threading
import time
import zlib
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, Callable

import numpy as np
from safetensors.numpy import load_file, save_file

import reference
import tables
from worker import Arrays, Row

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ROOT / "target" / "peers"
SIDES = ["metal-candle", "candle", "mlx", "torch", "torch-compiled", "bitsandbytes", "llama.cpp"]
# Compiling takes minutes, and pays on a GPU; the last two have only rows in fewer bits.
USUAL = SIDES[:4]
# Modes of the script for PyTorch.
MODES = {"torch-compiled": ["compiled"], "bitsandbytes": ["bitsandbytes"]}
SEED = 0

# Seconds: of warm-up (on a GPU, which runs slowly at first) and of single calls in each round of an
# operation, and of the longest queue.
ROUND_WARM_UP, GPU_WARM_UP = 0.02, 0.1
ROUND_CALLS = 0.05
ROUND_QUEUE = 0.25


class NotTimed(Exception):
    """Why a side has no time for a row."""


class Process:
    """A side that runs."""

    def __init__(self, side: str, command: list[str], threads: int) -> None:
        self.side = side
        log = WORK / "logs" / f"{side}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = ["OMP", "OPENBLAS", "MKL", "RAYON", "VECLIB_MAXIMUM"]
        threads_of = {f"{name}_NUM_THREADS": str(threads) for name in variables[:4]}
        threads_of["VECLIB_MAXIMUM_THREADS"] = str(threads)
        environment = os.environ | threads_of | {"HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("a"),
            env=environment,
            text=True,
        )
        self.answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in self.process.stdout or []:
            self.answers.put(line)
        self.answers.put(None)

    def ask(self, limit: float, **request: Any) -> dict[str, Any]:
        """The answer, within `limit` seconds."""
        try:
            stdin = self.process.stdin
            print(json.dumps(request), file=stdin, flush=True)
            line = self.answers.get(timeout=limit)
        except queue.Empty:
            self.end()
            raise NotTimed(f"did not finish in {limit:.0f} s") from None
        except (BrokenPipeError, OSError):
            line = None
        if line is None:
            self.end()
            raise NotTimed("the process ended; its log is in target/peers/logs")
        answer = json.loads(line)
        for key in ("unsupported", "error"):
            if key in answer:
                raise NotTimed(answer[key])
        return answer

    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Sides:
    """How sides are started, and those that run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.running: dict[str, Process] = {}

    def command(self, side: str) -> list[str]:
        if side in ("metal-candle", "candle"):
            return [str(self.options.worker), side, self.options.device]
        name = "torch" if side in MODES else side.removesuffix(".cpp")
        command = [sys.executable, str(HERE / f"side_{name}.py"), self.options.device]
        return command + MODES.get(side, [])

    def start(self, side: str) -> Process:
        return Process(side, self.command(side), self.options.threads)

    def get(self, side: str) -> Process:
        """The process for single operations, started anew when the last one has ended."""
        process = self.running.get(side)
        if process is None or not process.alive():
            process = self.running[side] = self.start(side)
        return process

    def end(self) -> None:
        for process in self.running.values():
            process.end()


def summary(samples: list[float]) -> dict[str, float]:
    """Of the rounds of `interleave`, the first of which is the warm-up."""
    samples = samples[1:]
    p10, p50, p90 = np.percentile(samples, [10, 50, 90])
    return {"median": float(p50), "p10": float(p10), "p90": float(p90), "rounds": len(samples)}


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


def operation_inputs(row: Row) -> Arrays:
    generator = np.random.default_rng(seed_of(row["name"]))
    return {
        spec["name"]: (
            spec["offset"] + spec["scale"] * generator.uniform(-1, 1, spec["shape"])
        ).astype(np.float32)
        for spec in row["inputs"]
    }


def check(row: Row, process: Process, expected: Arrays, limit: float) -> dict[str, float]:
    """The errors of a side's outputs; NotTimed when one is too large."""
    path = WORK / "outputs" / f"{process.side}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    process.ask(limit, ask="outputs", path=str(path))
    found = load_file(path)
    errors = {}
    for name, values in expected.items():
        if name == "tokens":
            errors[name] = float(np.mean(found[name].reshape(-1) != values.reshape(-1)))
            # A token that follows from other logits by a hair changes all after it.
            wrong = row["dtype"] == "f32" and errors[name] > 0
        else:
            errors[name] = reference.error(found[name].reshape(-1), values.reshape(-1))
            wrong = errors[name] > reference.tolerance(row, name)
        if wrong:
            limit_of = 0 if name == "tokens" else reference.tolerance(row, name)
            raise NotTimed(f"wrong: {name} is off by {errors[name]:.1e}, allowed {limit_of:.0e}")
    return errors


def interleave(
    processes: list[Process], rounds: int, pause: float, one: Callable[[Process], None]
) -> None:
    """Every process once a round, each round beginning with the next one, after a round of warm-up."""
    for number in range(1 + rounds):
        first = number % len(processes) if processes else 0
        for process in processes[first:] + processes[:first]:
            if process.alive():
                time.sleep(pause)
                one(process)


Results = dict[str, dict[str, Any]]

# Tokens of a row beyond which PyTorch's attention in f32 needs more than a GPU has.
LONGEST_IN_F32 = 8192


def measure_operation(row: Row, sides: Sides, options: argparse.Namespace) -> Results:
    path = WORK / "inputs.safetensors"
    inputs = operation_inputs(row)
    save_file(inputs, path)
    expected = reference.operation(row, inputs)
    results: Results = {}
    ready: list[Process] = []
    plans: dict[str, tuple[int, int]] = {}
    calls: dict[str, list[float]] = {}
    queues: dict[str, list[float]] = {}
    for side in options.sides:
        try:
            process = sides.get(side)
            process.ask(options.limit, ask="prepare", row=row, inputs=str(path))
            errors = check(row, process, expected, options.limit)
            tried = process.ask(options.limit, ask="time", queue=False, calls=5, warm_up=0.1)
            seconds = median(tried["seconds"])
            length = row["queue"] or 0
            plans[side] = (
                max(3, min(2000, int(ROUND_CALLS / seconds))),
                min(length, max(5, int(ROUND_QUEUE / seconds))),
            )
            results[side] = {"errors": errors}
            ready.append(process)
            calls[side], queues[side] = [], []
        except NotTimed as reason:
            results[side] = {"not_timed": str(reason)}

    warm_up = ROUND_WARM_UP if options.device == "cpu" else GPU_WARM_UP

    def one(process: Process) -> None:
        number, length = plans[process.side]
        try:
            answer = process.ask(
                options.limit, ask="time", queue=False, calls=number, warm_up=warm_up
            )
            calls[process.side].append(median(answer["seconds"]))
            if length:
                answer = process.ask(
                    options.limit, ask="time", queue=True, calls=length, warm_up=0.0
                )
                queues[process.side].append(answer["seconds"][0] / length)
        except NotTimed as reason:
            results[process.side] = {"not_timed": str(reason)}

    interleave(ready, options.rounds, options.pause, one)
    for process in ready:
        side = process.side
        if "not_timed" not in results[side]:
            results[side]["call"] = summary(calls[side])
            if queues[side]:
                results[side]["queue"] = summary(queues[side])
                results[side]["queue_calls"] = plans[side][1]
        if process.alive():
            process.ask(options.limit, ask="release")
    return results


def checkpoint(shape: str, sides: Sides, options: argparse.Namespace) -> Path:
    """A model of random weights that every side loads."""
    folder = WORK / "models" / f"{shape}-{SEED}"
    if not (folder / "config.json").is_file():
        process = sides.get("metal-candle")
        process.ask(3600, ask="checkpoint", shape=shape, seed=SEED, folder=str(folder))
    return folder


def gguf_file(row: Row, model: Path, sides: Sides) -> Path:
    """The model as a GGUF file, which every side reads that can. A pass reads all of it once."""
    path = model / f"{row['file']}.gguf"
    if not path.is_file():
        process = sides.get("metal-candle")
        process.ask(3600, ask="convert", model=str(model), format=row["file"], path=str(path))
    passes = row["tokens"] if row["work"] == "decode" else 1
    row["cost"]["bytes"] = passes * path.stat().st_size
    return path


def adapter(model: Path, rank: int, dora: bool) -> Path:
    """A PEFT adapter on every linear layer, with A and B random, and DoRA's lengths near those of the rows."""
    folder = model / f"adapter-r{rank}{'-dora' if dora else ''}"
    if (folder / "adapter_config.json").is_file():
        return folder
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layers = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator = np.random.default_rng(SEED)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (width, out) in layers.items():
            place = f"base_model.model.model.layers.{layer}.{name}"
            a = generator.uniform(-1, 1, (rank, width)) / np.sqrt(width)
            b = generator.normal(0, 0.01, (out, rank))
            weights[f"{place}.lora_A.weight"] = a.astype(np.float32)
            weights[f"{place}.lora_B.weight"] = b.astype(np.float32)
            if dora:
                # Weights are normal with a deviation of 0.02.
                lengths = 0.02 * np.sqrt(width) * generator.uniform(0.9, 1.1, out)
                weights[f"{place}.lora_magnitude_vector"] = lengths.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": dora,
        "target_modules": sorted({name.split(".")[1] for name in layers}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))
    return folder


def model_inputs(row: Row, model: Path) -> Path:
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    generator = np.random.default_rng(SEED)
    ids = generator.integers(0, vocabulary, row["ids"], dtype=np.uint32)
    if row["work"] == "train":
        ids = ids.reshape(row["batch"], row["seq"] + 1)
    path = WORK / "inputs.safetensors"
    save_file({"ids": ids}, path)
    return path


def model_reference(row: Row, request: dict[str, Any], sides: Sides) -> Arrays:
    """What transformers and PEFT compute in f64, on a GPU in f32 or, of long rows and many requests, in their own dtype,
    kept for the next time."""
    name = re.sub(r"-(bf16|f32)(-checkpointing)?(?=-|$)", "", row["name"])
    # What a GPU's models need in f64 is more than it has.
    large = sides.options.device != "cpu"
    exact = row | ({"dtype": "f32", "checkpointing": True} if large else {"dtype": "f64"})
    if large and (row.get("seq", 0) > LONGEST_IN_F32 or row["work"] == "serve"):
        exact["dtype"] = row["dtype"]
    exact["exact"] = True
    path = WORK / "references" / f"{name}-{exact['dtype']}.safetensors"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        process = Process("torch", sides.command("torch"), sides.options.threads)
        try:
            process.ask(3600, **request | {"row": exact})
            process.ask(3600, ask="outputs", path=str(path))
        finally:
            process.end()
    return load_file(path)


def measure_model(row: Row, sides: Sides, options: argparse.Namespace) -> Results:
    model = checkpoint(row["shape"], sides, options)
    request = {
        "ask": "prepare",
        "row": row,
        "inputs": str(model_inputs(row, model)),
        "model": str(gguf_file(row, model, sides) if row.get("file") else model),
        "adapter": str(adapter(model, row["rank"], row["dora"])) if row["work"] == "train" else None,
    }
    expected = model_reference(row, request, sides)
    results: Results = {}
    rounds = min(options.rounds, options.model_rounds)
    # Each in a process of its own, so that its peak memory is that of this row.
    samples: dict[str, list[float]] = {}

    def ready(side: str) -> Process | None:
        process = sides.start(side)
        try:
            process.ask(options.limit, **request)
            results[side] = {"errors": check(row, process, expected, options.limit)}
        except NotTimed as reason:
            results[side] = {"not_timed": str(reason)}
            process.end()
            return None
        samples[side] = []
        return process

    def one(process: Process) -> None:
        try:
            answer = process.ask(options.limit, ask="time", queue=False, calls=1, warm_up=0.0)
            samples[process.side] += answer["seconds"]
        except NotTimed as reason:
            results[process.side] = {"not_timed": str(reason)}

    def run(together: list[Process]) -> None:
        interleave(together, rounds, options.pause, one)
        for process in together:
            result = results[process.side]
            if "not_timed" not in result:
                result["call"] = summary(samples[process.side])
                result["peak"] = process.ask(options.limit, ask="memory")["peak"]
            process.end()

    for sides_at_once in [[side] for side in options.sides] if options.apart else [options.sides]:
        run([process for process in map(ready, sides_at_once) if process])
    return results


def describe(sides: Sides, options: argparse.Namespace) -> dict[str, Any]:
    """The machine, versions and settings of a run."""
    about: dict[str, Any] = {"device": options.device, "threads": options.threads, "versions": {}}
    for side in options.sides:
        try:
            answer = sides.get(side).ask(120, ask="describe")
            about["versions"][side] = answer["version"]
        except NotTimed as reason:
            about["versions"][side] = str(reason)
    process = Process("about", [str(options.worker), "metal-candle", "cpu"], options.threads)
    about["machine"] = process.ask(60, ask="describe")["machine"]
    gpu = options.device != "cpu"
    about["rows"] = process.ask(60, ask="rows", shape=options.shape, gpu=gpu)["rows"]
    if not options.list:
        if gpu:
            process.end()
            process = sides.start("metal-candle")
        about["peaks"] = process.ask(600, ask="peaks")
    process.end()
    if options.device == "cuda":
        question = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(question, capture_output=True, text=True)
        about["gpu"] = answer.stdout.strip().split("\n")[0]
    about["date"] = date.today().isoformat()
    about["commands"] = ["python3 benches/peers/run.py " + shlex.join(options.given)]
    return about


def say(row: Row, results: Results) -> None:
    parts = []
    for side, result in results.items():
        if "not_timed" in result:
            parts.append(f"{side}: {result['not_timed'][:60]}")
        else:
            queued = f" / {tables.seconds(result['queue']['median'])}" if "queue" in result else ""
            parts.append(f"{side} {tables.seconds(result['call']['median'])}{queued}")
    print(f"{row['name']}: " + ", ".join(parts), file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__.splitlines()[0])
    parser.add_argument("--venv", help="the peers' virtual environment [target/peers/venv]")
    parser.add_argument("--worker", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--rows", default="", help="only rows that match this regular expression")
    parser.add_argument("--sides", default=",".join(USUAL), help=f"of {', '.join(SIDES)}")
    parser.add_argument("--device", choices=["cpu", "metal", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=cores(), help="of every side")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model-rounds", type=int, default=5, help="rounds of rows on models")
    parser.add_argument(
        "--apart",
        action="store_true",
        help="one side of a row on a model after the other, where memory holds no two of them",
    )
    parser.add_argument("--shape", default="smollm2-135m", help="of the rows on models")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds before each turn")
    parser.add_argument("--limit", type=float, default=300, help="seconds that an answer may take")
    parser.add_argument("--list", action="store_true", help="list the rows and stop")
    parser.add_argument("--write", action="store_true", help="write the tables into BENCHMARKS.md")
    options = parser.parse_args()
    options.given = [word for word in given_words() if word != "--write"]
    options.sides = [side for side in options.sides.split(",") if side]
    for side in options.sides:
        if side not in SIDES:
            parser.error(f"--sides: {side} is not one of {', '.join(SIDES)}")
    for name in ("threads", "rounds", "model_rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1")
    return options


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def given_words() -> list[str]:
    """The arguments as they were given to run.py."""
    words = sys.argv[1:]
    if "--worker" in words:
        place = words.index("--worker")
        words = words[:place] + words[place + 2 :]
    return words


def main() -> None:
    options = parse()
    WORK.mkdir(parents=True, exist_ok=True)
    sides = Sides(options)
    try:
        about = describe(sides, options)
        rows = [row for row in about.pop("rows") if re.search(options.rows, row["name"])]
        if options.list:
            print("\n".join(row["name"] for row in rows))
            return
        report = about | {"results": {}}
        for row in rows:
            on_model = row["work"] in ("train", "prefill", "decode", "serve")
            measure = measure_model if on_model else measure_operation
            results = measure(row, sides, options)
            report["results"][row["name"]] = {"row": row, "sides": results}
            say(row, results)
            (WORK / "results.json").write_text(json.dumps(report, indent=1))
    finally:
        sides.end()
    if options.write:
        tables.write(report, HERE / "results", ROOT / "BENCHMARKS.md")
    else:
        print(tables.render(report))


if __name__ == "__main__":
    main()
