"""PyTorch: operations as its users write them, models with transformers and PEFT.

Backward rows time `torch.autograd.grad` on a graph that was built before.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

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

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}


class Torch:
    """The side on one device: cpu, mps or cuda."""

    def __init__(self, device: str, compiled: bool) -> None:
        self.compiled = compiled
        self.device = torch.device(device)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))

    def version(self) -> str:
        return torch.__version__

    def peak(self) -> int | None:
        """The most bytes that tensors took on a GPU."""
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def work(self, launch: Any, reset: Any = lambda: None) -> Work:
        return Work(launch, lambda _: self.wait(), arrays, reset)

    def prepare(self, row: Row, inputs: Arrays, model: str | None, adapter: str | None) -> Work:
        kind = row["work"]
        if kind == "train":
            return self.train(row, inputs["ids"], model, adapter)
        if kind in ("prefill", "decode"):
            return self.generation(row, inputs["ids"], model)
        dtype = DTYPES[row.get("dtype", "f32")]
        tensors = {
            name: torch.from_numpy(array).to(self.device, dtype) for name, array in inputs.items()
        }
        if kind == "adam_w":
            return self.adamw(tensors["parameters"], tensors["gradients"])
        forward = FORWARD.get(kind)
        if forward is None:
            raise Unsupported(f"no {kind} here")
        forward = torch.compile(forward) if self.compiled else forward
        if row["pass"] == "forward":

            def launch() -> list[torch.Tensor]:
                with torch.no_grad():
                    return [forward(tensors)]

            return self.work(launch)
        dy = tensors.pop("dy")
        wanted = [tensors[name] for name in WANTED[kind]]
        for tensor in wanted:
            tensor.requires_grad_(True)
        y = forward(tensors)
        return self.work(lambda: list(torch.autograd.grad(y, wanted, dy, retain_graph=True)))

    def adamw(self, parameters: torch.Tensor, gradients: torch.Tensor) -> Work:
        parameters = torch.nn.Parameter(parameters)
        parameters.grad = gradients
        optimiser = adamw([parameters])

        def launch() -> list[torch.Tensor]:
            torch.nn.utils.clip_grad_norm_([parameters], CLIP_NORM)
            optimiser.step()
            return [parameters.detach()]

        return self.work(launch)

    def load(self, row: Row, folder: str | None) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[row["dtype"]])
        return model.to(self.device)

    def train(self, row: Row, ids: np.ndarray, folder: str | None, adapter: str | None) -> Work:
        from peft import PeftModel

        model = PeftModel.from_pretrained(self.load(row, folder), adapter, is_trainable=True)
        if row["dtype"] == "f64":
            model = model.double()
        if row["checkpointing"]:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model.train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimiser = adamw(parameters)
        batch = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].reshape(-1)

        def loss_of() -> torch.Tensor:
            logits = model(input_ids=tokens, use_cache=False).logits
            logits = logits if logits.dtype == torch.float64 else logits.float()
            return F.cross_entropy(logits.flatten(0, 1), targets)

        loss_of = torch.compile(loss_of) if self.compiled else loss_of

        def launch() -> list[torch.Tensor]:
            optimiser.zero_grad(set_to_none=True)
            loss = loss_of()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
            optimiser.step()
            return [loss.detach().reshape(1), norm.detach().reshape(1)]

        return self.work(launch)

    def generation(self, row: Row, ids: np.ndarray, folder: str | None) -> Work:
        model = self.load(row, folder).eval()
        prompt = torch.from_numpy(ids.astype(np.int64)).reshape(1, -1).to(self.device)
        state: dict[str, Any] = {}

        def read(tokens: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
            with torch.inference_mode():
                out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return out.logits[0, -1], out.past_key_values

        if row["work"] == "prefill":
            return self.work(lambda: [read(prompt, None)[0]])

        def reset() -> None:
            logits, state["cache"] = read(prompt, None)
            state["next"] = logits.argmax()
            self.wait()

        def launch() -> list[torch.Tensor]:
            tokens = []
            for _ in range(row["tokens"]):
                logits, state["cache"] = read(state["next"].reshape(1, 1), state["cache"])
                state["next"] = logits.argmax()
                # A program that writes a text needs every token when it is known.
                tokens.append(state["next"].item())
            return [torch.tensor(tokens)]

        return self.work(launch, reset)


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def lora_linear(t: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.linear(t["x"], t["weight"]) + LORA_SCALE * ((t["x"] @ t["a"]) @ t["b"])


FORWARD = {
    "lora_linear": lora_linear,
    "softmax": lambda t: torch.softmax(t["x"], dim=-1),
    "layer_norm": lambda t: F.layer_norm(
        t["x"], t["weight"].shape, t["weight"], t["bias"], EPSILON
    ),
    "rms_norm": lambda t: F.rms_norm(t["x"], t["weight"].shape, t["weight"], EPSILON),
    "attention": lambda t: F.scaled_dot_product_attention(
        *(t[name].transpose(1, 2) for name in "qkv"), is_causal=True, enable_gqa=True
    ).transpose(1, 2),
}

WANTED = {
    "lora_linear": ["x", "a", "b"],
    "softmax": ["x"],
    "layer_norm": ["x", "weight", "bias"],
    "rms_norm": ["x", "weight"],
    "attention": ["q", "k", "v"],
}


def arrays(results: list[torch.Tensor]) -> list[np.ndarray]:
    return [
        (result if result.dtype in (torch.int64, torch.float64) else result.float()).cpu().numpy()
        for result in results
    ]


if __name__ == "__main__":
    device = {"cpu": "cpu", "metal": "mps", "cuda": "cuda"}[sys.argv[1]]
    serve(Torch(device, "compiled" in sys.argv[2:]))
