"""One side as a process: requests and answers are JSON objects, one a line, on stdin and stdout.

    describe    -> {version, threads}
    prepare     row, inputs (a safetensors file), model and adapter (folders) -> {}
    outputs     path: one call, its results written there as safetensors -> {}
    time        queue, calls, warm_up (seconds) -> {seconds}: of each call alone, or of a queue
    memory      -> {peak}: the most bytes that tensors took on a GPU, or that were resident
    release     forgets what was prepared -> {}

An answer may be {error} or {unsupported} instead. The Rust sides (src/main.rs) speak the same.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, Callable, Protocol

import numpy as np
from safetensors.numpy import load_file, save_file

Row = dict[str, Any]
Arrays = dict[str, np.ndarray]

LORA_SCALE = 2.0
EPSILON = 1e-5
CLIP_NORM = 1.0
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01


class Unsupported(Exception):
    """This side has nothing for the row, and says why."""


class Work:
    """A row that is ready: `launch` starts a call, `finish` waits until all its results exist."""

    def __init__(
        self,
        launch: Callable[[], list[Any]],
        finish: Callable[[list[list[Any]]], None],
        arrays: Callable[[list[Any]], list[np.ndarray]],
        reset: Callable[[], None] = lambda: None,
    ) -> None:
        self.launch = launch
        self.finish = finish
        self.arrays = arrays
        self.reset = reset

    def call(self) -> list[Any]:
        results = self.launch()
        self.finish([results])
        return results


class Side(Protocol):
    """What a side has to know."""

    def version(self) -> str: ...

    def peak(self) -> int | None: ...

    def prepare(self, row: Row, inputs: Arrays, model: str | None, adapter: str | None) -> Work: ...


def one_by_one(work: Work, calls: int) -> list[float]:
    seconds = []
    for _ in range(calls):
        work.reset()
        started = time.perf_counter()
        results = work.call()
        seconds.append(time.perf_counter() - started)
        del results
    return seconds


def in_a_queue(work: Work, calls: int) -> list[float]:
    """All calls, and the wait for every one of their results."""
    work.reset()
    started = time.perf_counter()
    results = [work.launch() for _ in range(calls)]
    work.finish(results)
    return [time.perf_counter() - started]


def warmed(work: Work, seconds: float) -> None:
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        work.reset()
        work.call()


def peak_memory() -> int:
    """The most resident bytes of this process."""
    status = Path("/proc/self/status")
    if status.exists():
        # ru_maxrss would begin with that of the process that started this one.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Worker:
    """Answers requests with one side's code."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.row: Row = {}
        self.work: Work | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        ask = request.pop("ask")
        return getattr(self, ask)(**request)

    def describe(self) -> dict[str, Any]:
        threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
        return {"version": self.side.version(), "threads": threads}

    def prepare(
        self, row: Row, inputs: str, model: str | None = None, adapter: str | None = None
    ) -> dict[str, Any]:
        self.release()
        self.row = row
        self.work = self.side.prepare(row, load_file(inputs), model, adapter)
        return {}

    def outputs(self, path: str) -> dict[str, Any]:
        work = self.ready()
        work.reset()
        arrays = work.arrays(work.call())
        arrays = [np.ascontiguousarray(array) for array in arrays]
        save_file(dict(zip(self.row["outputs"], arrays)), path)
        return {}

    def time(self, queue: bool, calls: int, warm_up: float) -> dict[str, Any]:
        work = self.ready()
        warmed(work, warm_up)
        gc.collect()
        gc.disable()
        seconds = in_a_queue(work, calls) if queue else one_by_one(work, calls)
        gc.enable()
        return {"seconds": seconds}

    def memory(self) -> dict[str, Any]:
        return {"peak": self.side.peak() or peak_memory()}

    def release(self) -> dict[str, Any]:
        self.work = None
        gc.collect()
        return {}

    def ready(self) -> Work:
        if self.work is None:
            raise RuntimeError("nothing is prepared")
        return self.work


def serve(side: Side) -> None:
    """Answers until stdin ends. Whatever the libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(side)
    for line in sys.stdin:
        try:
            answer = worker.answer(json.loads(line))
        except Unsupported as error:
            answer = {"unsupported": str(error)}
        except Exception as error:  # the driver reports it and goes on with the other sides
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
