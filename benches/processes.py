#!/usr/bin/env python3
"""How much of its speed training keeps by several processes. All that is compared takes turns; the figure of a round is
the median step of its log after the first ones.

    python3 benches/processes.py target/release/metal-candle FOLDER [--rounds N]

over MPI on CPUs, in a build with the feature `mpi`: two processes of a thread each beside one of two threads. A model of
SmolLM2-135M's width with 10 layers, 4 x 512 tokens a step of all processes together. FOLDER takes 100 MB.

    python3 benches/processes.py target/release/metal-candle FOLDER --gpus 2 [--rounds N]

over NCCL on the first two GPUs of a machine beside the first alone, in a build with CUDA: a model of Llama-3-8B's shape in
bf16, 4 x 2048 tokens a step of each GPU. FOLDER takes 16 GB. --peer adds PEFT under PyTorch's DistributedDataParallel,
by this Python.

    python3 benches/processes.py target/release/metal-candle FOLDER --gpus 2 --full [--rounds N]

every weight of a model of Llama-3.2-1B's shape in bf16, 8 x 1024 tokens a step of each GPU, all on each of them, and in
parts (sharded). FOLDER takes 2.5 GB.

    python3 benches/processes.py target/release/metal-candle FOLDER --gpus 2 --full --placements [--rounds N]

the same on all these GPUs with what AdamW keeps on each device, in parts (sharded), and with the host; --gpus 1 leaves out
the parts.

    python3 benches/processes.py target/release/metal-candle FOLDER --gpus 1 --full --large [--rounds N]

every weight of the model of 8B, 4 x 2048 tokens a step of each GPU, with checkpointing; by one with what AdamW keeps with the
host, by several in parts (sharded).

    python3 benches/processes.py target/release/metal-candle FOLDER --gpus 2 --placements [--rounds N]

the model of 8B on all these GPUs with gradient checkpointing, with the base on each device, in parts (sharded), and with the host.

    python3 benches/processes.py target/release/metal-candle FOLDER --gpus 2 --large [--overflow FOLDER]

a model of Llama-3-70B's shape in parts, 4 x 2048 tokens a step of each GPU, with checkpointing. FOLDER takes 141 GB, or what
fits there, and the other folder the rest.

All have random weights, and all but --full LoRA of rank 16 on all linears.
"""
import argparse
import array
import concurrent.futures
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "crates/cli/demo"
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
SMALL = dict(hidden=576, inner=1536, layers=10, heads=9, keys=3, head=64, vocabulary=None, tied=True)
LARGE = dict(hidden=4096, inner=14336, layers=32, heads=32, keys=8, head=128, vocabulary=128256, tied=False)

ONE_B = dict(hidden=2048, inner=8192, layers=16, heads=32, keys=8, head=64, vocabulary=128256, tied=True)
LARGEST = dict(hidden=8192, inner=28672, layers=80, heads=64, keys=8, head=128, vocabulary=128256, tied=False)


def model(folder, overflow, hidden, inner, layers, heads, keys, head, vocabulary, tied):
    folder.mkdir(parents=True)
    vocabulary = vocabulary or json.loads((DEMO / "base/config.json").read_text())["vocab_size"]
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", rms_norm_eps=1e-5,
        max_position_embeddings=8192, rope_theta=10000.0, torch_dtype="bfloat16", vocab_size=vocabulary,
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=keys, head_dim=head, attention_bias=False, mlp_bias=False, tie_word_embeddings=tied,
    )
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "base" / name, folder)
    shapes = {"model.norm.weight": [hidden], "model.embed_tokens.weight": [vocabulary, hidden]}
    if not tied:
        shapes["lm_head.weight"] = [vocabulary, hidden]
    files = {"model-tables.safetensors": shapes}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes = {f"{prefix}{norm}.weight": [hidden] for norm in ("input_layernorm", "post_attention_layernorm")}
        for name, out, into in (
            ("self_attn.q_proj", heads * head, hidden), ("self_attn.k_proj", keys * head, hidden),
            ("self_attn.v_proj", keys * head, hidden), ("self_attn.o_proj", hidden, heads * head),
            ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner),
        ):
            shapes[f"{prefix}{name}.weight"] = [out, into]
        files[f"model-{layer:03}.safetensors"] = shapes
    index = {name: file for file, shapes in files.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    # A few million numbers, begun at another one for each matrix.
    draw = random.Random(1)
    numbers = bfloat16(draw.gauss(0, 0.02) for _ in range(1 << 16))
    block = b"".join(numbers[2 * start :] + numbers[: 2 * start] for start in draw.choices(range(1 << 16), k=64))
    places, room = [], shutil.disk_usage(folder).free - (4 << 30)
    for file, shapes in files.items():
        room -= 2 * sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())
        places.append(folder / file if room > 0 or not overflow else overflow / file)
        if places[-1].parent != folder:
            (folder / file).symlink_to(places[-1])
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(write, places, files.values(), [block] * len(files), range(len(files))))


def write(path, shapes, block, seed):
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    draw = random.Random(seed)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for shape in shapes.values():
            if len(shape) == 1:
                file.write(bfloat16([1.0]) * shape[0])
                continue
            left, start = 2 * shape[0] * shape[1], 2 * draw.randrange(len(block) // 2)
            while left > 0:
                left -= file.write(block[start : start + left])
                start = 0


def bfloat16(numbers):
    """The upper halves of f32 numbers."""
    return b"".join(array.array("f", [number]).tobytes()[2:] for number in numbers)


def examples(folder, words):
    """Records longer than the rows."""
    draw = random.Random(1)
    lines = (DEMO / "instructions/train.jsonl").read_text().splitlines()
    texts = [" ".join(turn["content"] for turn in json.loads(line)["messages"]) for line in lines]
    folder.mkdir()
    records = (json.dumps({"text": " ".join(draw.choices(texts, k=words))}) + "\n" for _ in range(100))
    (folder / "train.jsonl").write_text("".join(records))


def measured(program, folder, length, steps, start, *flags):
    """Tokens a second, and the first process's peak of the GPU's memory in GiB."""
    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    run = subprocess.Popen(
        [
            *start, program, "train", "--model", folder / "model", "--data", folder / "data", "--output", output,
            # What a run writes at its end may be many gigabytes: it doesn't come to that.
            *("--save-every", "0", "--max-seq-length", str(length), "--steps", str(2 * steps), "--report-every", "1"),
            *("--no-plot", "--no-tensorboard", "--quiet", *flags),
        ],
        stdout=subprocess.DEVNULL, start_new_session=True,
    )
    reports = []
    while len(reports) < steps:
        if run.poll() is not None:
            sys.exit(f"{program} has ended with status {run.returncode}")
        time.sleep(0.1)
        log = output / "metrics.jsonl"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        reports = [event for event in events if event["event"] == "train"]
    # With those that it has started, which would save a checkpoint beside the next measurement.
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    while left := [process for process in map(int, filter(str.isdecimal, os.listdir("/proc"))) if is_of(process, output)]:
        for process in left:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.5)
    time.sleep(2)
    reports = reports[steps // 4 : steps]
    speed = statistics.median(event["processed_tokens_per_second"] for event in reports)
    return speed, max(event["peak_memory"] or 0 for event in reports) / 2**30


def is_of(process, output):
    """Whether it is one that trains into this folder."""
    try:
        return os.fsencode(output) in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def peer(folder, length, steps, gpus):
    """Tokens a second of PEFT under DistributedDataParallel."""
    program = Path(__file__).resolve().parent / "peers/distributed.py"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), program]
    run = subprocess.run(
        [*start, folder / "model", "4", str(length), str(steps)], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(run.stdout.split()[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", type=lambda path: Path(path).resolve())
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--placements", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--overflow", type=lambda path: Path(path).resolve())
    given = parser.parse_args()
    rounds, steps, length = given.rounds, 16, 2048
    lora = ("--rank", "16", "--target-modules", "all-linear")
    on_gpus = ("--device", "cuda", "--dtype", "bf16", "--batch-size", "4")
    if given.full and given.large:
        shape, lora = LARGE, ("--fine-tune-type", "full")
        flags = (*on_gpus, "--grad-checkpoint", "--gpus", str(given.gpus))
        sides = {"every weight, the optimiser with the host": ([], *flags, "--optimizer-placement", "host")}
        if given.gpus > 1:
            sides = {f"every weight in parts on {given.gpus} GPUs": ([], *flags, "--base-placement", "sharded")}
    elif given.large:
        shape, rounds, steps = LARGEST, 0, 8
        flags = (*on_gpus, "--grad-checkpoint", "--base-placement", "sharded", "--gpus", str(given.gpus))
        sides = {f"in parts on {given.gpus} GPUs": ([], *flags)}
    elif given.placements and not given.full:
        shape = LARGE
        flags = (*on_gpus, "--grad-checkpoint", "--gpus", str(given.gpus))
        places = ("device", "sharded", "host")
        sides = {f"the base on {place}": ([], *flags, "--base-placement", place) for place in places}
    elif given.full:
        shape, length, lora = ONE_B, 1024, ("--fine-tune-type", "full")
        flags = ("--device", "cuda", "--dtype", "bf16", "--batch-size", "8")
        sides = {f"{count} of the GPUs": ([], *flags, "--gpus", str(count)) for count in (1, given.gpus)}
        if given.gpus > 1:
            in_parts = ("--gpus", str(given.gpus), "--base-placement", "sharded")
            sides[f"{given.gpus} of the GPUs, in parts"] = ([], *flags, *in_parts)
        if given.placements:
            flags, places = (*flags, "--gpus", str(given.gpus)), ("device", "host", "sharded")[: 1 + given.gpus]
            sides = {f"the optimiser on {place}": ([], *flags, "--optimizer-placement", place) for place in places}
    elif given.gpus:
        shape = LARGE
        sides = {f"{count} of the GPUs": ([], *on_gpus, "--gpus", str(count)) for count in (1, given.gpus)}
        if given.peer:
            sides |= {f"PEFT on {count}": count for count in (1, given.gpus)}
    else:
        shape, length = SMALL, 512
        sides = {
            "1 process of 2 threads": ([], "--device", "cpu", "--batch-size", "4", "--threads", "2"),
            "2 processes of 1 thread": (
                [*MPIRUN, "-n", "2"], "--device", "cpu", "--batch-size", "2", "--threads", "1"
            ),
        }
    config = given.folder / "model/config.json"
    if config.is_file() and json.loads(config.read_text())["hidden_size"] != shape["hidden"]:
        sys.exit(f"{given.folder} has a model of another shape; give another folder")
    if not (given.folder / "data").is_dir():
        model(given.folder / "model", given.overflow, **shape)
        examples(given.folder / "data", length // 5)
    found = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            if isinstance(side, int):
                speed, taken = peer(given.folder, length, steps, side), ""
            else:
                speed, memory = measured(given.program, given.folder, length, steps, *side, *lora)
                taken = f", at most {memory:.1f} GiB"
            # The first round of several warms up.
            if number > 0 or rounds == 0:
                found[name].append(speed)
            print(f"round {number}, {name}: {speed:.0f} tokens/s{taken}", flush=True)
    medians = {name: statistics.median(speeds) for name, speeds in found.items()}
    print(f"medians: {', '.join(f'{speed:.0f}' for speed in medians.values())} tokens/s")
    times = given.gpus if given.gpus and not given.placements else 1
    names = list(found)
    # One and several of the same program, or all beside the first.
    pairs = zip(names[::2], names[1::2]) if given.peer else ((names[0], name) for name in names[1:])
    for one, other in pairs:
        print(f"{other}: {medians[other] / medians[one] / times:.1%} of {times} x {one}")


if __name__ == "__main__":
    main()
