"""Trains the demo's model with several processes: `processes.py PROGRAM` over MPI, in a build with the feature `mpi`, and
`processes.py PROGRAM --gpus N` on so many GPUs of this machine, in a build with CUDA.

Several processes follow one with their batches together, and give the same bits every time; a run goes on with another
number of them; and one that is killed, or stands still, ends the run with its name and leaves a checkpoint.
"""

import argparse
import array
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "crates/cli/demo"
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
# Rows of a batch of all processes together; an epoch's shortest batch has fewer.
ROWS = 12


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", type=lambda path: str(Path(path).resolve()))
    parser.add_argument("--gpus", type=int, help="train on so many GPUs instead of over MPI")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEST", help="only these functions, in their order")
    return parser.parse_args()


GIVEN = arguments()
PROGRAM, GPUS = GIVEN.program, GIVEN.gpus
COUNTS = [count for count in (2, 3, 4) if count <= (GPUS or 4)]
# A GPU is faster, and is to be met while it trains.
STEPS = 120 if GPUS else 40
NEAR = 1e-6
# Rewards are differences of larger numbers, and norms are of sums that cancel out in part.
METRICS_NEAR = 1e-5
RANK = b"METAL_CANDLE_RANK" if GPUS else b"OMPI_COMM_WORLD_RANK"


def command(processes, output, *flags, batch=None):
    batch = ["--batch-size", str(batch or ROWS // processes)] if batch != 0 else []
    start = [*MPIRUN, "-n", str(processes)] if processes > 1 and not GPUS else []
    gpus = ["--gpus", str(processes)] if GPUS else []
    return [*start, PROGRAM, "train", "--output", str(output), *gpus, *batch, *flags]


def settings(*flags, steps=STEPS, data="instructions", optimizer="sgd", learning_rate=0.005):
    return [
        *("--model", str(DEMO / "base"), "--data", str(DEMO / data)),
        *("--device", "cuda" if GPUS else "cpu", "--dtype", "f32", "--threads", "1", "--steps", str(steps), "--optimizer", optimizer),
        *("--learning-rate", str(learning_rate)),
        *("--report-every", "1", "--eval-every", "10", "--eval-batches", "3", "--save-every", "4"),
        *("--no-plot", "--no-tensorboard", *flags),
    ]


def run(arguments, expected=0, limit=300):
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=limit)
    assert done.returncode == expected, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stderr


def preferences(folder, of_pair):
    """What a function makes of questions, their answers, and answers that belong to other questions."""
    folder.mkdir()
    for name in ("train.jsonl", "valid.jsonl"):
        lines = [json.loads(line) for line in (DEMO / "instructions" / name).read_text().splitlines()]
        answers = [line["messages"] for line in lines]
        found = [
            line
            for own, other in zip(answers, answers[1:] + answers[:1])
            for line in of_pair(own[:-1], own[-1:], other[-1:])
        ]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in found))
    return folder


def pairs_in(folder):
    return preferences(
        folder, lambda prompt, right, wrong: [{"prompt": prompt, "chosen": right, "rejected": wrong}]
    )


def metrics(output):
    events = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    kept = {
        "train": ("step", "epoch", "loss", "gradient_norm", "tokens", "trained_tokens", "metrics"),
        "evaluation": ("step", "loss", "tokens", "metrics"),
    }
    return [
        {key: event.get(key) for key in kept[event["event"]]} for event in events if event["event"] in kept
    ]


def parameters(output):
    names = ("adapter_model.safetensors", "model.safetensors")
    data = next(output / name for name in names if (output / name).is_file()).read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8 : 8 + length])
    assert all(tensor["dtype"] == "F32" for name, tensor in tensors.items() if name != "__metadata__")
    return data, array.array("f", data[8 + length :])


def differences(found, expected):
    """The largest ones between two runs' losses and between their other metrics, relative to those above 1."""
    assert len(found) == len(expected), (len(found), len(expected))
    losses = others = 0.0
    for one, other in zip(found, expected):
        assert one.keys() == other.keys() and one["step"] == other["step"], (one, other)
        losses = max(losses, apart(one["loss"], other["loss"]))
        means = one["metrics"] or {}, other["metrics"] or {}
        assert means[0].keys() == means[1].keys(), (one, other)
        pairs = [(one.get(key), other.get(key)) for key in one if key not in ("loss", "metrics")]
        pairs += [(means[0][name], means[1][name]) for name in means[0]]
        others = max(others, *(apart(a, b) for a, b in pairs if a is not None))
    return losses, others


def apart(a, b):
    return abs(a - b) / max(1.0, abs(b))


def assert_near(output, expected, what):
    losses, others = differences(metrics(output), metrics(expected))
    (_, a), (_, b) = parameters(output), parameters(expected)
    assert len(a) == len(b)
    trained = max(abs(x - y) for x, y in zip(a, b))
    print(f"{what}: losses differ by {losses:.1e}, parameters by {trained:.1e}, metrics by {others:.1e}", flush=True)
    assert losses <= NEAR and trained <= NEAR and others <= METRICS_NEAR


def assert_same(output, expected, what):
    assert metrics(output) == metrics(expected), what
    assert parameters(output)[0] == parameters(expected)[0], what
    print(f"{what}: the same bits", flush=True)


def rank(launcher, number):
    """The process of a rank below what starts all, once it has started."""
    wanted = RANK + f"={number}".encode()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for folder in Path("/proc").iterdir():
            try:
                parent = re.search(r"^PPid:\s*(\d+)", (folder / "status").read_text(), re.M)
                if parent and int(parent[1]) == launcher and wanted in (folder / "environ").read_bytes():
                    return int(folder.name)
            except OSError:
                pass
        time.sleep(0.01)
    raise AssertionError(f"rank {number} has not started")


def until(output, step):
    """Waits for the report of a step."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            if any(event["step"] >= step for event in metrics(output)):
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.005)
    raise AssertionError(f"{output}: step {step} was not reached")


def under_way():
    """A step by which a checkpoint is there: that of step 4, which that of step 8 waits for."""
    return random.randint(9, 20)


def hit(arguments, output, number, with_signal, step, pause=True, limit=40):
    """Starts a run, sends a rank, or what has started all, a signal after a step, and gives how it ended."""
    launcher = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        process = launcher.pid if number is None else rank(launcher.pid, number)
        until(output, step)
        time.sleep(random.random() * 0.05 * pause)
        begun = time.monotonic()
        os.kill(process, with_signal)
        told, _ = launcher.communicate(timeout=limit)
    finally:
        if launcher.poll() is None:
            launcher.terminate()
    return launcher.returncode, told, time.monotonic() - begun


def several_follow_one(folder):
    run(command(1, folder / "one", *settings()))
    for processes in COUNTS:
        output = folder / f"of-{processes}"
        run(command(processes, output, *settings()))
        assert_near(output, folder / "one", f"{processes} processes beside 1")


def the_same_number_gives_the_same_bits(folder):
    run(command(2, folder / "again", *settings()))
    assert_same(folder / "again", folder / "of-2", "2 processes once more")


def all_ways_to_make_a_step(folder):
    pairs = pairs_in(folder / "pairs")
    labelled = preferences(
        folder / "labelled",
        lambda prompt, right, wrong: [
            {"prompt": prompt, "completion": right, "label": True},
            {"prompt": prompt, "completion": wrong, "label": False},
        ],
    )
    for name, wanted in {
        "accumulation": settings("--grad-accumulation", "3", steps=12),
        "packing": settings("--packing", "--max-seq-length", "96", steps=12),
        "adamw": settings(steps=12, optimizer="adamw", learning_rate=3e-4),
        "checkpointing": settings("--grad-checkpoint", steps=12),
        "dpo": settings("--objective", "dpo", "--precompute-ref-log-probs", steps=12, data=pairs),
        "kto": settings("--objective", "kto", steps=12, data=labelled),
        "orpo": settings("--objective", "orpo", "--grad-accumulation", "2", steps=12, data=pairs),
        "full": settings("--fine-tune-type", "full", steps=6, learning_rate=0.001),
    }.items():
        pair = [folder / f"{name}-{processes}" for processes in (1, 2)]
        for processes, output in zip((1, 2), pair):
            run(command(processes, output, *wanted))
        assert_near(pair[1], pair[0], name)


def one_that_is_killed(folder):
    """The run goes on with as many, more or fewer."""
    for processes in (2, *COUNTS[1:], 1):
        output = folder / f"killed-{processes}"
        number = random.randrange(2)
        code, told, seconds = hit(
            command(2, output, *settings()), output, number, signal.SIGKILL, under_way()
        )
        assert code != 0 and f"rank {number}" in told, told
        assert list((output / "checkpoints").glob("step-*")), told
        if GPUS and number > 0:
            assert_saved(output, told)
        print(f"rank {number} killed: told and ended after {seconds:.1f} s", flush=True)
        # A file says the rows that each of two processes had.
        saved = shutil.copy(output / "train_config.yaml", folder / f"killed-{processes}.yaml")
        config = ["--config", str(saved)] if processes != 2 else []
        run(command(processes, output, *config, "--resume", batch=0))
        if processes == 2:
            assert_same(output, folder / "of-2", "gone on with 2 processes")
        else:
            assert_near(output, folder / "one", f"gone on with {processes} processes")


def one_that_is_killed_beyond_a_network(folder):
    """NCCL itself notices over sockets that it is gone, and doesn't say whom it has lost."""
    if not GPUS:
        return
    network = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    os.environ.update(network)
    try:
        for attempt in range(3):
            output = folder / f"killed-beyond-{attempt}"
            code, told, seconds = hit(command(2, output, *settings()), output, 1, signal.SIGKILL, under_way())
            assert code != 0 and "rank 1: is lost" in told, told
            assert_saved(output, told)
            print(f"rank 1 killed beyond a network: told and ended after {seconds:.1f} s", flush=True)
    finally:
        for name in network:
            del os.environ[name]


def one_that_stands_still(folder):
    """In a step, and in an evaluation or about it. What has started it doesn't know."""
    count = COUNTS[min(1, len(COUNTS) - 1)]
    for step in (random.randint(12, 17), 10):
        output = folder / f"stopped-{step}"
        wanted = command(count, output, *settings("--collective-timeout", "2"))
        code, told, seconds = hit(wanted, output, 1, signal.SIGSTOP, step, pause=step != 10)
        assert code != 0 and "rank 1: didn't take part in" in told, told
        assert_saved(output, told)
        print(f"rank 1 stopped: told, saved and ended after {seconds:.1f} s", flush=True)
        run(command(count, output, "--resume", batch=0))
        assert_same(output, folder / f"of-{count}", f"gone on with {count} processes")


def one_that_is_lost_while_rank_0_saves(folder):
    """A checkpoint takes longer than others, and what started them, wait for a rank 0 that says nothing."""
    library, output = folder / "slow.so", folder / "slow"
    source = """
        #define _GNU_SOURCE
        #include <stdlib.h>
        #include <sys/syscall.h>
        #include <unistd.h>
        int fsync(int file) {
            static int slept;
            if (!slept && access(getenv("SLOW_AFTER"), F_OK) == 0) {
                slept = 1;
                sleep(90);
            }
            return syscall(SYS_fsync, file);
        }
    """
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), "-x", "c", "-"], input=source, text=True, check=True)
    slow = {"LD_PRELOAD": str(library), "SLOW_AFTER": str(output / "checkpoints/step-00000008")}
    # mpirun ends all when one is killed. Of three, one waits for rank 0.
    count, with_signal = (2, signal.SIGKILL) if GPUS else (3, signal.SIGSTOP)
    wanted = command(count, output, *settings("--collective-timeout", "12"))
    os.environ.update(slow)
    try:
        code, told, seconds = hit(wanted, output, 1, with_signal, 10, limit=240)
    finally:
        for name in slow:
            del os.environ[name]
    assert code != 0 and seconds > 80 and "rank 1" in told, (seconds, told)
    assert_saved(output, told)
    print(f"rank 1 lost while rank 0 saves: saved and ended after {seconds:.1f} s", flush=True)


def assert_saved(output, told):
    """Nothing that all ranks did is lost."""
    trained = max(event["step"] for event in metrics(output))
    assert (output / f"checkpoints/step-{trained:08}").is_dir(), (trained, told)


def one_that_diverges(folder):
    """All find it after the same step. What rank 0 writes then is finished, and nobody waits for long."""
    base, output = folder / "broken", folder / "diverged"
    shutil.copytree(DEMO / "base", base)
    weights = base / "model.safetensors"
    data = bytearray(weights.read_bytes())
    length = int.from_bytes(data[:8], "little")
    tensor = json.loads(data[8 : 8 + length])["model.layers.0.input_layernorm.weight"]
    assert tensor["dtype"] == "F32"
    start, end = (8 + length + offset for offset in tensor["data_offsets"])
    data[start:end] = array.array("f", [3e38]).tobytes() * ((end - start) // 4)  # queries times keys are infinite
    weights.write_bytes(data)
    wanted = [str(base) if word == str(DEMO / "base") else word for word in settings()]
    begun = time.monotonic()
    told = run(command(2, output, *wanted), expected=1)
    assert time.monotonic() - begun < 60 and "steps in a row were skipped" in told, told
    saved = [path.name for path in (output / "checkpoints").iterdir()]
    assert saved == ["step-00000004"], (saved, told)
    print("diverged: all end, after the checkpoint", flush=True)


def one_that_is_asked_to_end(folder):
    """All do, after the same step, with a checkpoint."""
    output = folder / "ended"
    code, told, _ = hit(command(2, output, *settings()), output, 1, signal.SIGTERM, 8)
    assert code == 130, (code, told)
    run(command(2, output, "--resume", batch=0))
    assert_same(output, folder / "of-2", "asked to end, and gone on")


def the_one_that_started_all_is_asked_to_end(folder):
    if not GPUS:
        return
    for with_signal in (signal.SIGINT, signal.SIGKILL):
        output = folder / f"started-{with_signal.name}"
        code, told, _ = hit(command(2, output, *settings()), output, None, with_signal, 8)
        if with_signal == signal.SIGINT:
            assert code == 130, (code, told)
        end = time.monotonic() + 60
        while left() and time.monotonic() < end:
            time.sleep(0.05)
        assert not left()
        run(command(2, output, "--resume", batch=0))
        assert_same(output, folder / "of-2", f"{with_signal.name}, and gone on")


def parts_of_the_base(folder):
    """Each GPU has a part of the base, or the host has it: the same bits. One that is lost is told here, too."""
    if not GPUS:
        print("NOT RUN: a base in parts, or with the host: it needs --gpus", flush=True)
        return
    pairs = pairs_in(folder / "pairs-of-the-base")
    # The last batch has a row for the first rank alone.
    odd = folder / "odd"
    odd.mkdir()
    lines = (DEMO / "instructions/train.jsonl").read_text().splitlines(keepends=True)
    (odd / "train.jsonl").write_text("".join(lines[: 4 * ROWS + 1]))
    (odd / "valid.jsonl").write_text("".join(lines[-ROWS - 1 :]))
    for name, wanted in {
        "lora": settings("--lora-dropout", "0.1", steps=14, data=odd),
        "dora": settings("--fine-tune-type", "dora", "--grad-accumulation", "2", steps=6),
        "nf4": settings("--quantize", "nf4", steps=6),
        "dpo": settings("--objective", "dpo", steps=6, data=pairs),
    }.items():
        for processes, places in ((1, ("device", "host")), (2, ("device", "host", "sharded"))):
            outputs = [folder / f"{name}-{processes}-{place}" for place in places]
            for place, output in zip(places, outputs):
                run(command(processes, output, *wanted, "--grad-checkpoint", "--base-placement", place))
                assert_same(output, outputs[0], f"{name}, {processes} processes, the base: {place}")
    sharded = settings("--grad-checkpoint", "--base-placement", "sharded", "--collective-timeout", "3")
    run(command(2, folder / "sharded", *sharded))
    for number, with_signal in ((0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)):
        output = folder / f"sharded-{number}-{with_signal.name}"
        code, told, seconds = hit(command(2, output, *sharded), output, number, with_signal, under_way())
        assert code != 0 and f"rank {number}" in told, told
        print(f"rank {number} of a sharded base, {with_signal.name}: told and ended after {seconds:.1f} s", flush=True)
        run(command(2, output, "--resume", batch=0))
        assert_same(output, folder / "sharded", "gone on")
    told = run(command(1, folder / "none", *sharded), expected=2)
    assert "base_placement: is sharded, which needs several processes" in told, told


def parts_of_every_weight(folder):
    """Each GPU has a part of every weight that is trained, of its gradient and of its moments."""
    if not GPUS:
        return
    full = ("--fine-tune-type", "full", "--base-placement", "sharded", "--collective-timeout", "3")
    for name, flags in {"plain": (), "checkpointing": ("--grad-checkpoint", "--grad-accumulation", "2")}.items():
        pair = [folder / f"whole-{name}-{processes}" for processes in (1, 2)]
        wanted = dict(steps=6, learning_rate=0.001)
        run(command(1, pair[0], *settings("--fine-tune-type", "full", *flags, **wanted)))
        run(command(2, pair[1], *settings(*full, *flags, **wanted)))
        assert_near(pair[1], pair[0], f"a part of every weight each, {name}")
    wanted = settings(*full, optimizer="adamw", learning_rate=1e-4)
    run(command(2, folder / "whole", *wanted))
    for place in ("device", "host"):
        output = folder / f"whole-{place}"
        run(command(2, output, *wanted, "--optimizer-placement", place))
        assert_same(output, folder / "whole", f"a part of every weight each, once more, the optimiser: {place}")
    for number, with_signal in ((0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)):
        output = folder / f"whole-{number}-{with_signal.name}"
        code, told, seconds = hit(command(2, output, *wanted), output, number, with_signal, under_way())
        assert code != 0 and f"rank {number}" in told, told
        assert number == 0 or "had a part of the parameters" in told, told
        print(f"rank {number} of every weight in parts, {with_signal.name}: told and ended after {seconds:.1f} s", flush=True)
        run(command(2, output, "--resume", batch=0))
        assert_same(output, folder / "whole", "gone on")
    output = folder / "whole-ended"
    code, told, _ = hit(command(2, output, *wanted), output, 1, signal.SIGTERM, 8)
    assert code == 130, (code, told)
    run(command(1, output, "--resume", "--base-placement", "device", batch=0))
    print("gone on by one with all weights", flush=True)
    told = run(command(1, folder / "none", *wanted), expected=2)
    assert "base_placement: is sharded, which needs several processes" in told, told


def parts_of_the_optimiser(folder):
    """Each process has a part of what the optimiser keeps, on its device or with the host: the same bits, also where a run
    goes on with it elsewhere. One that is lost takes its part along, so the run goes on from its last checkpoint."""
    for name, wanted in {
        "lora": settings("--loraplus-lr-ratio", "16", "--lora-dropout", "0.1", steps=9, optimizer="adamw", learning_rate=1e-3),
        "full": settings("--fine-tune-type", "full", steps=6, optimizer="adamw", learning_rate=1e-4),
        "lion": settings(steps=6, optimizer="lion", learning_rate=1e-4),
    }.items():
        for processes in (1, *COUNTS):
            places = ["device", *(["host"] if GPUS else []), *(["sharded"] if processes > 1 else [])]
            outputs = [folder / f"optimiser-{name}-{processes}-{place}" for place in places]
            for place, output in zip(places, outputs):
                run(command(processes, output, *wanted, "--optimizer-placement", place))
                assert_same(output, outputs[0], f"{name}, {processes} processes, the optimiser: {place}")
    wanted = settings("--collective-timeout", "3", optimizer="adamw", learning_rate=1e-3)
    run(command(2, folder / "optimiser", *wanted))
    for number, place in ((0, "device"), (1, "sharded")):
        output = folder / f"optimiser-{number}"
        lost = command(2, output, *wanted, "--optimizer-placement", "sharded")
        code, told, _ = hit(lost, output, number, signal.SIGKILL, under_way())
        assert code != 0, (code, told)
        assert number == 0 or not GPUS or "had a part of what the optimiser keeps" in told, told
        run(command(2, output, "--resume", "--optimizer-placement", place, batch=0))
        assert_same(output, folder / "optimiser", f"a sharded optimiser lost rank {number}, and gone on: {place}")
    told = run(command(1, folder / "none", *settings("--optimizer-placement", "sharded", optimizer="adamw")), expected=2)
    assert "optimizer_placement: is sharded, which needs several processes" in told, told
    told = run(command(2, folder / "none", *settings("--optimizer-placement", "sharded", optimizer="muon")), expected=2)
    assert "muon can't be in parts with several processes" in told, told


def left():
    """Ranks that are still there."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if RANK + b"=" in (folder / "environ").read_bytes():
                found.append(folder.name)
        except OSError:
            pass
    return found


def by_torchrun(folder):
    torchrun = shutil.which("torchrun")
    if not GPUS or not torchrun:
        return
    output = folder / "by-torchrun"
    start = [torchrun, "--standalone", "--nproc-per-node", "2", "--no-python"]
    own = [word for word in command(2, output, *settings()) if word not in ("--gpus", "2")]
    run([*start, *own])
    assert_same(output, folder / "of-2", "started by torchrun")


def what_cannot_be(folder):
    output = folder / "of-2"
    if GPUS:
        told = run(command(1000, folder / "none", *settings()), expected=2)
        assert f"1000 are asked for, and this machine has {GPUS}" in told, told
        torchrun = {**os.environ, "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
        own = [word for word in command(2, output, *settings()) if word not in ("--gpus", "2")]
        done = subprocess.run(own, capture_output=True, text=True, env=torchrun)
        assert done.returncode == 2 and "MASTER_ADDR and MASTER_PORT" in done.stderr, done.stderr
        return
    told = run(command(5, output, "--resume", batch=0), expected=2)
    assert "12 rows, which 5 processes can't share equally; start 1 or 2 or 3 or 4 or 6 or 12" in told, told
    told = run(command(2, output, "--resume", batch=12), expected=2)
    assert "batch_size: is 12, but a batch of this run has 12 rows, divided over 2 processes" in told, told
    torchrun = {**os.environ, "WORLD_SIZE": "2", "RANK": "0"}
    done = subprocess.run(command(1, output, *settings()), capture_output=True, text=True, env=torchrun)
    assert done.returncode == 2 and "start them with mpirun or srun" in done.stderr, done.stderr


def main():
    seed = int(os.environ.get("SEED", time.time()))
    random.seed(seed)
    print(f"SEED={seed}")
    failed = []
    # It waits for 90 seconds, and needs nothing of the others.
    waits = one_that_is_lost_while_rank_0_saves
    beside = None
    if not GIVEN.only and not GPUS:
        only = [sys.executable, __file__, PROGRAM, "--only", waits.__name__]
        beside = subprocess.Popen(only, env={**os.environ, "SEED": str(seed)})
    with tempfile.TemporaryDirectory() as folder:
        for test in (
            several_follow_one,
            the_same_number_gives_the_same_bits,
            by_torchrun,
            all_ways_to_make_a_step,
            parts_of_the_base,
            parts_of_every_weight,
            parts_of_the_optimiser,
            one_that_is_killed,
            one_that_is_killed_beyond_a_network,
            one_that_stands_still,
            one_that_is_lost_while_rank_0_saves,
            one_that_diverges,
            one_that_is_asked_to_end,
            the_one_that_started_all_is_asked_to_end,
            what_cannot_be,
        ):
            if GIVEN.only and test.__name__ not in GIVEN.only or beside and test is waits:
                continue
            try:
                test(Path(folder))
            except (AssertionError, OSError, subprocess.SubprocessError) as error:
                failed.append(test.__name__)
                print(f"{test.__name__}: FAILED: {error}", flush=True)
    if beside and beside.wait() != 0:
        failed.append(waits.__name__)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
