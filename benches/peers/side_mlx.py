"""MLX: operations as its users write them, models with mlx-lm.

MLX is lazy: a call is complete when `mx.eval` has been given every result and the stream has been
waited for. Backward rows time `mx.vjp`, which builds the forward too and computes what the
gradients need of it.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from safetensors.numpy import load_file

from worker import (
    CLIP_NORM,
    EPSILON,
    LEARNING_RATE,
    LORA_SCALE,
    WEIGHT_DECAY,
    Arrays,
    Row,
    Unsupported,
    Work,
    serve,
)

DTYPES = {"f32": mx.float32, "bf16": mx.bfloat16}


class Mlx:
    """The side on MLX's default device or on the CPU."""

    def version(self) -> str:
        return version("mlx")

    def peak(self) -> int | None:
        """The most bytes that arrays took on a GPU."""
        return None if mx.default_device() == mx.Device(mx.cpu) else mx.get_peak_memory()

    def prepare(self, row: Row, inputs: Arrays, model: str | None, adapter: str | None) -> Work:
        kind = row["work"]
        if row.get("file") or row.get("quantization"):
            raise Unsupported("no such quantised model here")
        if kind == "train":
            return train(row, inputs["ids"], model, adapter)
        if kind in ("prefill", "decode"):
            return generation(row, inputs["ids"], model)
        if kind == "serve":
            return serving(row, inputs["ids"], model)
        dtype = DTYPES[row.get("dtype", "f32")]
        tensors = {name: mx.array(array).astype(dtype) for name, array in inputs.items()}
        mx.eval(*tensors.values())
        if kind == "adam_w":
            return adamw_row(tensors["parameters"], tensors["gradients"])
        if kind not in FORWARD:
            raise Unsupported(f"no {kind} here")
        names, forward = FORWARD[kind]
        frozen = {"weight"} if kind == "lora_linear" else set()
        if row["pass"] == "forward":
            arguments = [tensors[name] for name in names]
            return work(lambda: [forward(*arguments)])
        wanted = [name for name in names if name not in frozen]

        def of_wanted(*values: mx.array) -> mx.array:
            given = tensors | dict(zip(wanted, values))
            return forward(*(given[name] for name in names))

        primals, dy = [tensors[name] for name in wanted], tensors["dy"]
        return work(lambda: mx.vjp(of_wanted, primals, [dy])[1])


def work(launch: Any, reset: Any = lambda: None) -> Work:
    return Work(launch, finish, arrays, reset)


def finish(results: list[list[mx.array]]) -> None:
    mx.eval(results)
    mx.synchronize()


def arrays(results: list[mx.array]) -> list[np.ndarray]:
    return [
        np.array(result if result.dtype in (mx.int32, mx.uint32) else result.astype(mx.float32))
        for result in results
    ]


def lora_linear(x: mx.array, weight: mx.array, a: mx.array, b: mx.array) -> mx.array:
    return x @ weight.T + LORA_SCALE * ((x @ a) @ b)


def causal_attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    q, k, v = (array.swapaxes(1, 2) for array in (q, k, v))
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask="causal")
    return out.swapaxes(1, 2)


FORWARD = {
    "lora_linear": (["x", "weight", "a", "b"], lora_linear),
    "softmax": (["x"], partial(mx.softmax, axis=-1)),
    "layer_norm": (["x", "weight", "bias"], lambda x, w, b: mx.fast.layer_norm(x, w, b, EPSILON)),
    "rms_norm": (["x", "weight"], lambda x, w: mx.fast.rms_norm(x, w, EPSILON)),
    "attention": (["q", "k", "v"], causal_attention),
}


def adamw() -> optim.AdamW:
    return optim.AdamW(LEARNING_RATE, weight_decay=WEIGHT_DECAY, bias_correction=True)


def adamw_row(parameters: mx.array, gradients: mx.array) -> Work:
    optimiser = adamw()
    state = {"parameters": parameters}

    def launch() -> list[mx.array]:
        clipped, _ = optim.clip_grad_norm({"parameters": gradients}, CLIP_NORM)
        state.update(optimiser.apply_gradients(clipped, state))
        return [state["parameters"]]

    def finish_with_state(results: list[list[mx.array]]) -> None:
        mx.eval(results, optimiser.state)
        mx.synchronize()

    return Work(launch, finish_with_state, arrays)


def load(row: Row, folder: str | None) -> nn.Module:
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(folder or ""))
    model.set_dtype(DTYPES[row["dtype"]])
    mx.eval(model.parameters())
    return model


def add_adapter(model: nn.Module, row: Row, folder: str) -> None:
    """LoRA or DoRA layers as mlx-lm makes them, with the numbers of a PEFT folder."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model.freeze()
    settings = {"rank": row["rank"], "scale": LORA_SCALE, "dropout": 0.0}
    linear_to_lora_layers(model, len(model.layers), settings, use_dora=row["dora"])
    weights = []
    for name, array in load_file(Path(folder) / "adapter_model.safetensors").items():
        path, part = re.fullmatch(r"base_model\.model\.(.*)\.lora_(A|B|magnitude_vector)(?:\.weight)?", name).groups()
        key = "m" if part == "magnitude_vector" else f"lora_{part.lower()}"
        weights.append((f"{path}.{key}", mx.array(np.ascontiguousarray(array.T))))
    model.load_weights(weights, strict=False)


def train(row: Row, ids: np.ndarray, folder: str | None, adapter: str | None) -> Work:
    """The step of mlx_lm.tuner.trainer, compiled as it is there, with clipping."""
    from mlx_lm.tuner.trainer import default_loss, grad_checkpoint

    model = load(row, folder)
    add_adapter(model, row, adapter or "")
    if row["checkpointing"]:
        grad_checkpoint(model.layers[0])
    model.train()
    optimiser = adamw()
    batch = mx.array(ids.astype(np.int32))
    lengths = mx.array([[0, ids.shape[1]]] * ids.shape[0])
    loss_and_gradients = nn.value_and_grad(model, default_loss)
    state = [model.state, optimiser.state, mx.random.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(batch: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
        (loss, _), gradients = loss_and_gradients(model, batch, lengths)
        gradients, norm = optim.clip_grad_norm(gradients, CLIP_NORM)
        optimiser.update(model, gradients)
        return loss, norm

    def launch() -> list[mx.array]:
        return [result.reshape(1) for result in step(batch, lengths)]

    def finish_with_state(results: list[list[mx.array]]) -> None:
        mx.eval(results, state)
        mx.synchronize()

    return Work(launch, finish_with_state, arrays)


def generation(row: Row, ids: np.ndarray, folder: str | None) -> Work:
    """A prefill, or the loop of mlx_lm.generate, which computes a token while the one before is
    read."""
    from mlx_lm.models.cache import make_prompt_cache

    model = load(row, folder)
    model.eval()
    prompt = mx.array(ids.astype(np.int32).reshape(1, -1))
    state: dict[str, Any] = {}

    if row["work"] == "prefill":
        return work(lambda: [model(prompt, cache=make_prompt_cache(model))[0, -1]])

    def following(tokens: mx.array) -> mx.array:
        return mx.argmax(model(tokens, cache=state["cache"])[:, -1, :], axis=-1)

    def reset() -> None:
        state["cache"] = make_prompt_cache(model)
        state["next"] = following(prompt)
        mx.eval(state["next"])

    def launch() -> list[mx.array]:
        tokens = []
        current = following(state["next"][None])
        mx.async_eval(current)
        for index in range(row["tokens"]):
            last = index + 1 == row["tokens"]
            upcoming = None if last else following(current[None])
            if upcoming is not None:
                mx.async_eval(upcoming)
            tokens.append(current.item())
            current = upcoming
        return [mx.array(tokens)]

    return work(launch, reset)


def serving(row: Row, ids: np.ndarray, folder: str | None) -> Work:
    """Greedy texts of mlx_lm's BatchGenerator, all requests at once."""
    from mlx_lm.generate import BatchGenerator

    model = load(row, folder)
    model.eval()
    prompts = ids.reshape(row["requests"], row["prompt"]).tolist()

    def launch() -> list[mx.array]:
        generator = BatchGenerator(
            model, max_tokens=row["tokens"], completion_batch_size=row["requests"]
        )
        uids = generator.insert(prompts)
        texts: dict[int, list[int]] = {uid: [] for uid in uids}
        while responses := generator.next_generated():
            for response in responses:
                texts[response.uid].append(response.token)
        generator.close()
        return [mx.array([texts[uid] for uid in uids])]

    return work(launch)


if __name__ == "__main__":
    if sys.argv[1] == "cpu":
        mx.set_default_device(mx.cpu)
    elif mx.default_device() == mx.Device(mx.cpu):
        sys.exit(f"this MLX has no {sys.argv[1]}")
    serve(Mlx())
