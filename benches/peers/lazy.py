"""What a benchmark of MLX measures when it evaluates only its last result.

MLX computes a result when somebody asks for it. A loop that builds 100 results and evaluates the
last has done the work of one call and divides its time by 100. Run it with the peers' Python:

    target/peers/venv/bin/python benches/peers/lazy.py
"""

from __future__ import annotations

import time
from statistics import median
from typing import Callable

import mlx.core as mx

CALLS = 100
ROUNDS = 15


def microseconds(operation: Callable[[], mx.array], evaluate_all: bool) -> float:
    """A call's share of a loop of CALLS of them, the median of ROUNDS loops."""
    samples = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        results = [operation() for _ in range(CALLS)]
        mx.eval(results if evaluate_all else results[-1])
        mx.synchronize()
        samples.append((time.perf_counter() - started) / CALLS * 1e6)
    return median(samples)


def main() -> None:
    mx.set_default_device(mx.cpu)
    x = mx.random.normal((4, 16, 1024))
    token, weight = mx.random.normal((1, 1024)), mx.random.normal((1024, 1024))
    a, b = mx.random.normal((1024, 8)), mx.random.normal((8, 1024))
    mx.eval(x, token, weight, a, b)
    operations = {
        "softmax (4, 16, 1024)": lambda: mx.softmax(x, axis=-1),
        "LoRA linear 1024, rank 8": lambda: token @ weight.T + 2.0 * ((token @ a) @ b),
    }
    for name, operation in operations.items():
        microseconds(operation, True)
        last, every = microseconds(operation, False), microseconds(operation, True)
        print(f"{name}: last of {CALLS} evaluated {last:.1f} µs a call, all {every:.1f} µs")


if __name__ == "__main__":
    main()
