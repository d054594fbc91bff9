#!/usr/bin/env python3
"""Tokens a second of `generate --prompts` by several GPUs of a machine that have a part of every layer each, beside one GPU,
in turns; greedy, some 200 tokens in and 256 out for each request, or 1024 out for one alone, with the prompts' time and
that of the first recordings in it.

    python3 benches/tensor_parallel.py target/release/metal-candle FOLDER --gpus 2 [--rounds N]

a model of Llama-3-8B's shape in bf16 with random weights. FOLDER takes 16 GB.

    python3 benches/tensor_parallel.py target/release/metal-candle FOLDER --gpus 4 --large

one of Llama-3-70B's shape, by all the GPUs alone. FOLDER takes 141 GB.
"""
import argparse
import json
import random
import statistics
import subprocess
import time
from pathlib import Path

from processes import DEMO, LARGE, LARGEST, model

WORDS, TOKENS, ALONE = 170, 256, 1024


def prompts(path, count):
    """Different texts of the demo's words."""
    lines = (DEMO / "instructions/train.jsonl").read_text().splitlines()
    words = " ".join(turn["content"] for line in lines for turn in json.loads(line)["messages"]).split()
    draw = random.Random(1)
    texts = (" ".join(draw.choices(words, k=WORDS)) for _ in range(count))
    path.write_text("".join(json.dumps({"prompt": text, "ignore_eos": True}) + "\n" for text in texts))


def measured(program, folder, count, ranks):
    """Tokens a second, of a prompt, and seconds beside the writing."""
    asked, answers = folder / "prompts.jsonl", folder / "answers.jsonl"
    prompts(asked, count)
    answers.unlink(missing_ok=True)
    command = [
        *(program, "generate", "--model", folder / "model", "--prompts", asked, "--output", answers, "--raw", "--json"),
        *("--temperature", "0", "--max-tokens", str(ALONE if count == 1 else TOKENS), "--device", "cuda", "--dtype", "bf16"),
        *("--max-sequences", str(count), "--tensor-parallel", str(ranks)),
    ]
    begun = time.time()
    run = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    report = json.loads(run.stdout)
    length = statistics.mean(json.loads(line)["prompt_tokens"] for line in answers.read_text().splitlines())
    speed = report["tokens_per_second"]
    return speed, length, time.time() - begun - report["tokens"] / speed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", type=lambda path: Path(path).resolve())
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256])
    given = parser.parse_args()
    if not (given.folder / "model/config.json").is_file():
        model(given.folder / "model", None, **(LARGEST if given.large else LARGE))
    sides = [given.gpus] if given.large else [1, given.gpus]
    for count in given.requests:
        found = {ranks: [] for ranks in sides}
        for _ in range(given.rounds):
            for ranks in sides:
                speed, length, rest = measured(given.program, given.folder, count, ranks)
                found[ranks].append(speed)
                print(
                    f"{count} requests of {length:.0f} tokens by {ranks}: {speed:.0f} tokens/s, {rest:.0f} s to start and end",
                    flush=True,
                )
        medians = [statistics.median(speeds) for speeds in found.values()]
        if len(medians) > 1:
            print(f"{count} requests by {given.gpus}: {medians[1] / medians[0]:.2f} x one")


if __name__ == "__main__":
    main()
