"""Trains the demo's model with several processes over MPI: `processes.py PROGRAM`, a build with the feature `mpi`.

Several processes follow one with their batches together, and give the same bits every time; a run goes on with another
number of them; and one that is killed, or stands still, ends the run with its name and leaves a checkpoint.
"""

import array
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "crates/cli/demo"
PROGRAM = str(Path(sys.argv[1]).resolve())
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
STEPS = 40
# Rows of a batch of all processes together; an epoch's shortest batch has fewer.
ROWS = 12
NEAR = 1e-6
# Rewards are differences of larger numbers, and norms are of sums that cancel out in part.
METRICS_NEAR = 1e-5


def command(processes, output, *flags, batch=None):
    batch = ["--batch-size", str(batch or ROWS // processes)] if batch != 0 else []
    start = [*MPIRUN, "-n", str(processes)] if processes > 1 else []
    return [*start, PROGRAM, "train", "--output", str(output), *batch, *flags]


def settings(*flags, steps=STEPS, data="instructions", optimizer="sgd", learning_rate=0.005):
    return [
        *("--model", str(DEMO / "base"), "--data", str(DEMO / data)),
        *("--device", "cpu", "--dtype", "f32", "--threads", "1", "--steps", str(steps), "--optimizer", optimizer),
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
    """The process of a rank below `mpirun`, once it has started."""
    wanted = f"OMPI_COMM_WORLD_RANK={number}".encode()
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


def hit(arguments, output, number, with_signal, step, pause=True, limit=40):
    """Starts a run, sends a rank a signal after a step, and gives how it ended."""
    launcher = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        process = rank(launcher.pid, number)
        until(output, step)
        time.sleep(random.random() * 0.05 * pause)
        begun = time.monotonic()
        os.kill(process, with_signal)
        told, _ = launcher.communicate(timeout=limit)
    finally:
        if launcher.poll() is None:
            launcher.terminate()
    return launcher.returncode, told, time.monotonic() - begun


def main():
    seed = int(os.environ.get("SEED", time.time()))
    random.seed(seed)
    print(f"SEED={seed}")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        one = folder / "one"
        run(command(1, one, *settings()))
        for processes in (2, 3, 4):
            output = folder / f"of-{processes}"
            run(command(processes, output, *settings()))
            assert_near(output, one, f"{processes} processes beside 1")
        again = folder / "again"
        run(command(2, again, *settings()))
        assert_same(again, folder / "of-2", "2 processes once more")

        # Other ways to make a step.
        pairs = preferences(
            folder / "pairs",
            lambda prompt, right, wrong: [{"prompt": prompt, "chosen": right, "rejected": wrong}],
        )
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

        # One rank is killed at some moment; the run goes on with as many, more or fewer.
        for processes in (2, 4, 3, 1):
            output = folder / f"killed-{processes}"
            number = random.randrange(2)
            code, told, seconds = hit(
                command(2, output, *settings()), output, number, signal.SIGKILL, random.randint(5, 20)
            )
            assert code != 0 and f"rank {number}" in told, told
            assert list((output / "checkpoints").glob("step-*")), told
            print(f"rank {number} killed: told and ended after {seconds:.1f} s", flush=True)
            run(command(processes, output, "--resume", batch=0))
            if processes == 2:
                assert_same(output, folder / "of-2", "gone on with 2 processes")
            else:
                assert_near(output, one, f"gone on with {processes} processes")

        # One that stands still, of which mpirun doesn't know, in a step, and in an evaluation or about it.
        for step in (random.randint(12, 17), 10):
            output = folder / f"stopped-{step}"
            arguments = command(3, output, *settings("--collective-timeout", "2"))
            code, told, seconds = hit(arguments, output, 1, signal.SIGSTOP, step, pause=step != 10)
            assert code != 0 and "rank 1: didn't take part in" in told, told
            trained = max(event["step"] for event in metrics(output))
            assert (output / f"checkpoints/step-{trained:08}").is_dir(), (trained, told)
            print(f"rank 1 stopped: told, saved and ended after {seconds:.1f} s", flush=True)
            run(command(3, output, "--resume", batch=0))
            assert_same(output, folder / "of-3", "gone on with 3 processes")

        # One that is asked to end: all do, after the same step, with a checkpoint.
        output = folder / "ended"
        code, told, _ = hit(command(2, output, *settings()), output, 1, signal.SIGTERM, 8)
        assert code == 130, (code, told)
        run(command(2, output, "--resume", batch=0))
        assert_same(output, folder / "of-2", "asked to end, and gone on")

        # What cannot be.
        told = run(command(5, output, "--resume", batch=0), expected=2)
        assert "12 rows, which 5 processes can't share equally; start 1 or 2 or 3 or 4 or 6 or 12" in told, told
        told = run(command(2, output, "--resume", batch=12), expected=1)
        assert "batch_size was 12 and is now 24" in told, told
        torchrun = {**os.environ, "WORLD_SIZE": "2", "RANK": "0"}
        done = subprocess.run(command(1, one, *settings()), capture_output=True, text=True, env=torchrun)
        assert done.returncode == 2 and "start them with mpirun or srun" in done.stderr, done.stderr


if __name__ == "__main__":
    main()
