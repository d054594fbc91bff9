"""What every side has to compute: the formulas in f64, and how far off a side may be.

Work on a model is compared with transformers and PEFT in f64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from worker import CLIP_NORM, EPSILON, LEARNING_RATE, LORA_SCALE, WEIGHT_DECAY, Arrays, Row

# The largest |found - expected| over the largest |expected|, for each output.
OPERATION_TOLERANCE = 1e-5
BF16_TOLERANCE = 2e-2
# A step is a tenth of the largest parameter, so this is a hundredth of a step. Where a gradient is
# as small as AdamW's epsilon, the step follows from the norm, and f32 sums of ten million squares
# differ in the third digit.
ADAMW_TOLERANCE = 1e-3
MODEL_TOLERANCE = {
    ("loss", "f32"): 1e-4,
    ("loss", "bf16"): 5e-3,
    ("gradient_norm", "f32"): 1e-3,
    ("gradient_norm", "bf16"): 5e-2,
    ("logits", "f32"): 1e-3,
    ("logits", "bf16"): 5e-2,
}


# Of layers that multiply in 8-bit floats, against dense ones.
FP8_TOLERANCE = {"loss": 2e-2, "gradient_norm": 0.2}


def tolerance(row: Row, output: str) -> float:
    if row.get("quantization") == "fp8-compute" and output in FP8_TOLERANCE:
        return FP8_TOLERANCE[output]
    usual = ADAMW_TOLERANCE if row["work"] == "adam_w" else OPERATION_TOLERANCE
    if row.get("dtype") == "bf16":
        usual = BF16_TOLERANCE
    return MODEL_TOLERANCE.get((output, row.get("dtype", "")), usual)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative to the largest expected number; infinite for another shape or a NaN."""
    if found.shape != expected.shape:
        return float("inf")
    difference = np.abs(found.astype(np.float64) - expected).max()
    relative = float(difference / max(float(np.abs(expected).max()), 1e-30))
    return relative if np.isfinite(relative) else float("inf")


def operation(row: Row, inputs: Arrays) -> Arrays:
    """The outputs of a single operation in f64."""
    numbers = {name: rounded(array, row).astype(np.float64) for name, array in inputs.items()}
    kind: Any = {
        "lora_linear": lora_linear,
        "softmax": softmax,
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "attention": attention,
        "adam_w": adamw,
    }[row["work"]]
    return kind(numbers, row.get("pass") == "backward")


def rounded(array: np.ndarray, row: Row) -> np.ndarray:
    """As the row's dtype holds the numbers."""
    if row.get("dtype") != "bf16":
        return array
    bits = array.astype(np.float32).view(np.uint32)
    even = (bits >> 16) & 1
    return ((bits + 0x7FFF + even) & 0xFFFF0000).view(np.float32)


def lora_linear(t: Arrays, backward: bool) -> Arrays:
    x, w, a, b = t["x"], t["weight"], t["a"], t["b"]
    if not backward:
        return {"y": x @ w.T + LORA_SCALE * (x @ a) @ b}
    dy = t["dy"]
    g = LORA_SCALE * dy @ b.T
    return {"dx": dy @ w + g @ a.T, "da": x.T @ g, "db": LORA_SCALE * (x @ a).T @ dy}


def softmax(t: Arrays, backward: bool) -> Arrays:
    exponentials = np.exp(t["x"] - t["x"].max(-1, keepdims=True))
    y = exponentials / exponentials.sum(-1, keepdims=True)
    if not backward:
        return {"y": y}
    return {"dx": y * (t["dy"] - (t["dy"] * y).sum(-1, keepdims=True))}


def layer_norm(t: Arrays, backward: bool) -> Arrays:
    x, w = t["x"], t["weight"]
    centred = x - x.mean(-1, keepdims=True)
    inverse = 1.0 / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
    normed = centred * inverse
    if not backward:
        return {"y": normed * w + t["bias"]}
    dy = t["dy"]
    u = dy * w
    mean, product = u.mean(-1, keepdims=True), (u * normed).mean(-1, keepdims=True)
    return {
        "dx": inverse * (u - mean - normed * product),
        "dweight": over_rows(dy * normed),
        "dbias": over_rows(dy),
    }


def rms_norm(t: Arrays, backward: bool) -> Arrays:
    x, w = t["x"], t["weight"]
    inverse = 1.0 / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    normed = x * inverse
    if not backward:
        return {"y": normed * w}
    u = t["dy"] * w
    dx = inverse * (u - normed * (u * normed).mean(-1, keepdims=True))
    return {"dx": dx, "dweight": over_rows(t["dy"] * normed)}


def attention(t: Arrays, backward: bool) -> Arrays:
    """A head at a time: the scores of one fit into memory."""
    q, k, v = t["q"], t["k"], t["v"]
    batch, seq, heads, width = q.shape
    group = heads // k.shape[2]
    scale = width**-0.5
    y, dq, dk, dv = (np.zeros_like(array) for array in (q, q, k, v))
    future = np.triu(np.ones((seq, seq), dtype=bool), 1)
    for row in range(batch):
        for head in range(heads):
            own = (row, slice(None), head)
            shared = (row, slice(None), head // group)
            p = scale * q[own] @ k[shared].T
            p[future] = -np.inf
            p = np.exp(p - p.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            y[own] = p @ v[shared]
            if backward:
                dy = t["dy"][own]
                dv[shared] += p.T @ dy
                dz = scale * p * (dy @ v[shared].T - (dy * y[own]).sum(-1, keepdims=True))
                dq[own] = dz @ k[shared]
                dk[shared] += dz.T @ q[own]
    return {"dq": dq, "dk": dk, "dv": dv} if backward else {"y": y}


def over_rows(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, values.shape[-1]).sum(0)


def adamw(t: Arrays, _: bool) -> Arrays:
    """The first step, in which the corrected moments are the gradient and its square."""
    p, g = t["parameters"], t["gradients"]
    g = g * min(1.0, CLIP_NORM / (np.sqrt((g**2).sum()) + 1e-6))
    p = p * (1.0 - LEARNING_RATE * WEIGHT_DECAY)
    return {"parameters": p - LEARNING_RATE * g / (np.abs(g) + 1e-8)}
