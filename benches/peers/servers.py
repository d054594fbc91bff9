#!/usr/bin/env python3
"""Serves one model by metal-candle, mlx-lm, transformers and llama.cpp in turns, and asks each in the same way.

    target/peers/venv/bin/python benches/peers/servers.py target/release/metal-candle
    target/peers/venv/bin/python benches/peers/servers.py target/release/metal-candle --device cuda --folder FOLDER

So many chats are asked for at once over HTTP, streamed, at /v1/chat/completions: the same conversations of every
side, of words that share nothing, the likeliest tokens, so many of them. It needs no network. On a CPU the model is
the demo's in f32; on an NVIDIA GPU it has Llama-3-8B's shape in bf16 and random weights, which PyTorch makes; FOLDER
then takes 20 GB, or 36 with llama.cpp's file.

The model is copied with another token for its end, which it never writes, so no text ends early on a side that knows
no `ignore_eos`. What counts is what each side says it wrote (`usage`), and how many texts were shorter is told.

Each round every side has its turn, another one first: its server is started, warmed up by as many chats, measured and
stopped, so that no other one is there meanwhile. Python's packages are those of the Python that runs this script; mlx
computes where its package does (mlx[cpu], mlx[cuda13]).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

import serving  # noqa: E402
import tables  # noqa: E402
from driver import ROOT, WORK, cores  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

DEMO = ROOT / "crates/cli/demo/base"
SIDES = ["metal-candle", "mlx", "transformers", "transformers-batching", "llama.cpp"]
TITLES = {
    "metal-candle": "metal-candle",
    "mlx": "mlx_lm.server",
    "transformers": "transformers serve",
    "transformers-batching": "transformers serve --continuous-batching",
    "llama.cpp": "llama-server",
}
# Of Python's packages that a side is.
PACKAGES = {
    "mlx": ["mlx-lm", "mlx"],
    "transformers": ["transformers", "torch"],
    "transformers-batching": ["transformers", "torch"],
}
# Seconds: for a server to start, for an answer, and between two looks at the memory.
START, ANSWER, LOOK = 600, 900, 0.1
# How often a chat is asked for whose connection is reset, and seconds between.
TRIES, AGAIN = 200, 0.02
# 0xFF, as tokenizers of bytes write it.
NEVER = "\u00ff"
# Tokens that a conversation has beside its words, at most.
AROUND = 32

Numbers = dict[str, Any]


class Failed(Exception):
    """Why a side has no figures."""


def endless(model: Path) -> None:
    """Gives the model in this folder a token for its end that it never writes: a byte that no text has. And its
    tokenizer merges bytes to words, as far as it has their parts: llama.cpp knows no words as they are."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    words = tokenizer["model"]
    splits = [(word[:at], word[at:]) for word in sorted(words["vocab"], key=len) for at in range(1, len(word))]
    words["merges"] = [pair for pair in splits if all(part in words["vocab"] for part in pair)]
    words["ignore_merges"] = False
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    end = {"eos_token_id": words["vocab"][NEVER]}
    for name, added in (("config", end), ("tokenizer_config", {"eos_token": NEVER})):
        path = model / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | added))
    settings = end | {"pad_token_id": 0, "do_sample": False}
    (model / "generation_config.json").write_text(json.dumps(settings))


def model_of(options: argparse.Namespace) -> Path:
    """The model's folder, made where it isn't there."""
    name = "demo" if options.device == "cpu" else "8b"
    model = options.folder / f"servers-{name}"
    if (model / "generation_config.json").is_file():
        return model
    if options.device == "cpu":
        shutil.copytree(DEMO, model, dirs_exist_ok=True)
    else:
        serving.make(model)
    endless(model)
    return model


def gguf_of(program: Path, model: Path, dtype: str) -> Path:
    path = model.with_suffix(".gguf")
    if not path.is_file():
        command = [program, "fuse", "--model", model, "--to", f"gguf-{dtype}", "--output", path]
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    return path


def command_of(side: str, model: Path, port: int, data: str, options: argparse.Namespace) -> list[str]:
    dtype = "f32" if options.device == "cpu" else "bf16"
    place = ["--host", "127.0.0.1", "--port", str(port)]
    if side == "metal-candle":
        command = [str(options.program), "serve", "--model", str(model), "--data", data, *place]
        command += ["--device", options.device, "--dtype", dtype, "--threads", str(options.threads)]
        command += ["--served-model-name", str(model)]
        return command + ["--max-sequences", str(options.requests)]
    if side == "mlx":
        # It has the dtype of the model's files.
        command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), *place]
        return command + ["--decode-concurrency", str(options.requests), "--log-level", "ERROR"]
    if side == "llama.cpp":
        context = options.requests * (options.words + AROUND + options.tokens)
        command = [str(options.llama_server), "--model", str(gguf_of(options.program, model, dtype)), *place]
        command += ["--parallel", str(options.requests), "--ctx-size", str(context), "--jinja"]
        command += ["--threads", str(options.threads), "--no-webui"]
        return command + ["--n-gpu-layers", "0" if options.device == "cpu" else "999"]
    names = {"f32": "float32", "bf16": "bfloat16"}
    command = [str(Path(sys.executable).parent / "transformers"), "serve", str(model), *place]
    command += ["--device", "cpu" if options.device == "cpu" else "cuda:0", "--dtype", names[dtype]]
    return command + (["--continuous-batching"] if side == "transformers-batching" else [])


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Server:
    """A side's server, in a group of processes of its own, and the most memory that these had at once."""

    def __init__(self, side: str, model: Path, options: argparse.Namespace) -> None:
        self.side, self.options = side, options
        self.port, self.data = free_port(), tempfile.TemporaryDirectory()
        self.log = WORK / "logs" / f"serve-{side}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        names = ["OMP", "OPENBLAS", "MKL", "RAYON"]
        threads = {f"{name}_NUM_THREADS": str(options.threads) for name in names}
        environment = os.environ | threads | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment.pop("METAL_CANDLE_API_KEY", None)
        self.gpu_before = gpu_memory(options)
        command = command_of(side, model, self.port, f"{self.data.name}/data", options)
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.resident = self.gpu = 0
        self.ended = threading.Event()
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()

    def watch(self) -> None:
        while not self.ended.wait(LOOK):
            self.resident = max(self.resident, resident(self.process.pid))
            self.gpu = max(self.gpu, gpu_memory(self.options) - self.gpu_before)

    def wait(self) -> float:
        """Until it answers; the seconds that this took."""
        began = time.monotonic()
        while time.monotonic() < began + START:
            if self.process.poll() is not None:
                raise Failed(f"it ended with {self.process.returncode}; its log is {self.log}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return time.monotonic() - began
            except OSError:
                pass
            time.sleep(0.1)
        raise Failed(f"it did not answer within {START} s; its log is {self.log}")

    def stop(self) -> None:
        self.ended.set()
        self.watcher.join()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.data.cleanup()


def resident(root: int) -> int:
    """Resident bytes of a process and of those that it has started, which are in its session."""
    total = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # Behind the name in brackets: state, parent, group, session.
            session = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[3])
            if session == root:
                pages = int((folder / "statm").read_text().split()[1])
                total += pages * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            # It has ended meanwhile.
            continue
    return total


def gpu_memory(options: argparse.Namespace) -> int:
    """Bytes that are taken on the GPU, by whomever: names of processes mean nothing within a container."""
    if options.device == "cpu":
        return 0
    question = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(question, check=True, capture_output=True, text=True).stdout) << 20


def words_of(tokenizer: Path) -> list[str]:
    """Words that are one token each, in the middle of a text."""
    encode = Tokenizer.from_file(str(tokenizer)).encode
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    words = (word[1:] for word in vocabulary if word.startswith("\u0120") and word[1:].isalpha())
    return [word for word in words if len(encode(f" {word}", add_special_tokens=False).ids) == 1]


class Chat(threading.Thread):
    """One chat: when each event came and what it was, and how often it had to be asked for."""

    def __init__(self, server: Server, body: Numbers) -> None:
        super().__init__()
        self.port, self.body = server.port, json.dumps(body)
        self.events: list[tuple[float, bytes]] = []
        self.tries = 0
        self.failure: str | None = None

    def run(self) -> None:
        try:
            answer = self.answer()
            if answer.status != 200:
                self.failure = f"a chat was refused: {answer.status} {answer.read()[:500]!r}"
                return
            # Parsed later: it would take the time of those that compute.
            self.events += ((time.monotonic(), line) for line in answer if line.startswith(b"data: {"))
        except (OSError, http.client.HTTPException) as error:
            self.failure = f"a chat failed: {error!r}"

    def answer(self) -> http.client.HTTPResponse:
        """The beginning of an answer. A server whose queue of connections is full may reset one, which then comes
        again."""
        while True:
            self.tries += 1
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER)
                kind = {"content-type": "application/json"}
                connection.request("POST", "/v1/chat/completions", self.body, kind)
                return connection.getresponse()
            except ConnectionError:
                if self.tries == TRIES:
                    raise
                time.sleep(AGAIN)


def load(server: Server, model: Path, seed: int) -> Numbers:
    """All chats at once."""
    options = server.options
    words, draw = words_of(model / "tokenizer.json"), random.Random(seed)
    chats = []
    for _ in range(options.requests):
        content = " ".join(draw.choices(words, k=options.words))
        body: Numbers = {
            "model": str(model),
            "messages": [{"role": "user", "content": content}],
            "max_tokens": options.tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if server.side in ("metal-candle", "llama.cpp"):
            body["ignore_eos"] = True
        chats.append(Chat(server, body))
    began = time.monotonic()
    for chat in chats:
        chat.start()
    for chat in chats:
        chat.join()
    return figures(began, chats, options.tokens)


def figures(began: float, chats: list[Chat], tokens: int) -> Numbers:
    """Of all chats: what was written, and when."""
    written, prompts, first, between, pieces, end = [], 0, [], [], 0, began
    for chat in chats:
        if chat.failure:
            raise Failed(chat.failure)
        times, usage = [], None
        for moment, line in chat.events:
            event = json.loads(line[6:])
            if "error" in event:
                raise Failed(f"a chat failed: {event['error']}")
            usage = event.get("usage") or usage
            if any(has_text(choice.get("delta") or {}) for choice in event.get("choices") or []):
                times.append(moment)
        if not usage or not times:
            raise Failed("a chat has no text, or does not say how many tokens it has")
        written.append(usage["completion_tokens"])
        prompts += usage["prompt_tokens"]
        first.append(times[0] - began)
        between += (b - a for a, b in zip(times, times[1:]))
        pieces += len(times)
        end = max(end, chat.events[-1][0])
    return {
        "tokens_per_second": sum(written) / (end - began),
        "seconds": end - began,
        "tokens": sum(written),
        "prompt_tokens": prompts,
        "shorter": sum(count < tokens for count in written),
        "pieces": pieces,
        "asked_again": sum(chat.tries - 1 for chat in chats),
        "first_p50": quantile(first, 0.5),
        "first_p95": quantile(first, 0.95),
        "between_p50": quantile(between, 0.5),
        "between_p95": quantile(between, 0.95),
    }


def has_text(delta: Numbers) -> bool:
    return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning"))


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))] if values else 0.0


def measure(side: str, model: Path, seed: int, options: argparse.Namespace) -> Numbers:
    """One turn of one side."""
    server = Server(side, model, options)
    try:
        start = server.wait()
        load(server, model, -seed - 1)
        found = load(server, model, seed) | {"start": start}
    finally:
        server.stop()
    found["resident"] = server.resident
    if options.device != "cpu":
        found["gpu"] = server.gpu
    return found


def version_of(side: str, options: argparse.Namespace) -> str:
    if side == "metal-candle":
        answer = subprocess.run([str(options.program), "--version"], check=True, capture_output=True, text=True)
        return answer.stdout.strip().split()[-1]
    if side == "llama.cpp":
        answer = subprocess.run([str(options.llama_server), "--version"], capture_output=True, text=True)
        lines = (answer.stderr + answer.stdout).splitlines()
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("version")), "unknown")
    try:
        return ", ".join(f"{name} {version(name)}" for name in PACKAGES[side])
    except PackageNotFoundError as missing:
        return f"{missing.name} is not installed"


def machine(options: argparse.Namespace) -> str:
    names = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in names if line.startswith("model name")), "")
    text = f"{name or platform.machine()}, {cores()} cores"
    if options.device != "cpu":
        question = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
        gpu = subprocess.run(question, check=True, capture_output=True, text=True).stdout.strip()
        text = f"{gpu} ({text})"
    return text


def table(report: Numbers) -> str:
    gpu = report["device"] != "cpu"
    head = ["", "tokens/s", "first token, p50", "p95", "between tokens, p50", "p95", "memory"]
    head += ["GPU's memory"] if gpu else []
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for side, result in report["sides"].items():
        title, rounds = TITLES[side], result["rounds"]
        if not rounds:
            reason = tables.shortened(result["failed"])
            lines.append(f"| {title} | {reason} |" + " |" * (len(head) - 2))
            continue
        middle = {key: median(found[key] for found in rounds) for key in rounds[0]}
        rates = [found["tokens_per_second"] for found in rounds]
        cells = [title, f"{median(rates):,.0f} ({min(rates):,.0f}–{max(rates):,.0f})".replace(",", " ")]
        cells += [
            tables.seconds(middle[key]) for key in ("first_p50", "first_p95", "between_p50", "between_p95")
        ]
        cells.append(tables.gibibytes(max(found["resident"] for found in rounds)))
        if gpu:
            cells.append(tables.gibibytes(max(found["gpu"] for found in rounds)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def notes(report: Numbers) -> str:
    """What the table does not say of how sides did the work."""
    lines = []
    for side, result in report["sides"].items():
        for found in result["rounds"][-1:]:
            start = tables.seconds(median(one["start"] for one in result["rounds"]))
            lines.append(
                f"{TITLES[side]} ({report['versions'][side]}): started in {start}; in the last round"
                f" {found['prompt_tokens']} tokens read and {found['tokens']} written in {found['pieces']} pieces,"
                f" {found['shorter']} texts shorter than asked for, {found['asked_again']} connections made again"
            )
        if result["failed"] and result["rounds"]:
            lines.append(f"{TITLES[side]}: {result['failed']}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="servers.py", description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path, help="the built metal-candle")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--folder", type=Path, default=WORK, help="for the model [target/peers]")
    parser.add_argument("--sides", default=",".join(SIDES[:4]), help=f"of {', '.join(SIDES)}")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server, which is a side then")
    parser.add_argument("--requests", type=int, default=16, help="chats at once")
    parser.add_argument("--words", type=int, default=64, help="of each question, a token each")
    parser.add_argument("--tokens", type=int, default=128, help="to write to each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=cores(), help="of every side")
    parser.add_argument("--json", type=Path, default=WORK / "servers.json", help="for the results")
    options = parser.parse_args()
    options.sides = [side for side in options.sides.split(",") if side]
    if options.llama_server and "llama.cpp" not in options.sides:
        options.sides.append("llama.cpp")
    for side in options.sides:
        if side not in SIDES:
            parser.error(f"--sides: {side} is not one of {', '.join(SIDES)}")
    if "llama.cpp" in options.sides and not options.llama_server:
        parser.error("--sides: llama.cpp needs --llama-server")
    for name in ("requests", "words", "tokens", "rounds", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1")
    return options


def main() -> None:
    options = parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    model = model_of(options)
    report: Numbers = {
        "machine": machine(options),
        "device": options.device,
        "threads": options.threads,
        "date": date.today().isoformat(),
        "command": "python3 benches/peers/servers.py " + shlex.join(sys.argv[1:]),
        "work": {key: getattr(options, key) for key in ("requests", "words", "tokens")},
        "versions": {side: version_of(side, options) for side in options.sides},
        "sides": {side: {"rounds": [], "failed": None} for side in options.sides},
    }
    for number in range(options.rounds):
        first = number % len(options.sides)
        for side in options.sides[first:] + options.sides[:first]:
            result = report["sides"][side]
            if result["failed"]:
                continue
            try:
                found = measure(side, model, number, options)
                result["rounds"].append(found)
                said = f"{found['tokens_per_second']:.0f} tokens/s"
            except (Failed, OSError, subprocess.SubprocessError, http.client.HTTPException, ValueError) as error:
                said = result["failed"] = str(error) or type(error).__name__
            print(f"round {number + 1}, {side}: {said}", file=sys.stderr, flush=True)
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['machine']}, {report['date']}\n\n{table(report)}\n\n{notes(report)}")


if __name__ == "__main__":
    main()
