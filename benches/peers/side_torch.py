"""PyTorch: operations as its users write them, models with transformers and PEFT, and those in NF4 with bitsandbytes.

Backward rows time `torch.autograd.grad` on a graph that was built before.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
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
    """The side on one device: cpu, mps or cuda; `quantised` is that of bitsandbytes, which has rows in NF4 alone."""

    def __init__(self, device: str, compiled: bool, quantised: bool) -> None:
        self.compiled = compiled
        self.quantised = quantised
        self.device = torch.device(device)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))

    def version(self) -> str:
        return version("bitsandbytes") if self.quantised else torch.__version__

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
        # Others than the reference have to hold the weights as the row says.
        if not row.get("exact") and row.get("file"):
            raise Unsupported("transformers makes a dense model of it")
        if not row.get("exact") and row.get("quantization") == "fp8-compute":
            raise Unsupported("PEFT has no base that multiplies in FP8")
        if not row.get("exact") and self.quantised != (row.get("quantization") == "nf4"):
            raise Unsupported("only rows in NF4 here" if self.quantised else "see bitsandbytes")
        if kind == "train":
            return self.train(row, inputs["ids"], model, adapter)
        if kind in ("prefill", "decode"):
            return self.generation(row, inputs["ids"], model)
        if kind == "serve":
            return self.serving(row, inputs["ids"], model)
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
        from transformers import AutoConfig, AutoModelForCausalLM

        options: dict[str, Any] = {"dtype": DTYPES[row["dtype"]]}
        place = Path(folder or "")
        if row.get("file"):
            place, options["gguf_file"] = place.parent, place.name
            # What it makes of the file's own description lacks Llama 3's rope scaling.
            options["config"] = AutoConfig.from_pretrained(place)
        if self.quantised:
            options |= in_nf4(options["dtype"], self.device)
        model = AutoModelForCausalLM.from_pretrained(place, **options)
        if row.get("exact") and row.get("quantization") == "nf4":
            round_to_nf4(model)
        return model if self.quantised else model.to(self.device)

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

    def serving(self, row: Row, ids: np.ndarray, folder: str | None) -> Work:
        """Greedy texts of transformers' continuous batching; as a reference, of one batch."""
        from transformers import GenerationConfig

        model = self.load(row, folder).eval()
        prompts = ids.astype(np.int64).reshape(row["requests"], row["prompt"])
        settings = GenerationConfig(
            max_new_tokens=row["tokens"], do_sample=False, eos_token_id=-1, pad_token_id=0
        )

        def together() -> list[torch.Tensor]:
            batch = torch.from_numpy(prompts).to(self.device)
            with torch.inference_mode():
                tokens = model.generate(batch, generation_config=settings)
            return [tokens[:, row["prompt"] :].contiguous()]

        def launch() -> list[torch.Tensor]:
            results = model.generate_batch(inputs=prompts.tolist(), generation_config=settings)
            if len(results) != len(prompts):
                raise RuntimeError(f"{len(results)} of {len(prompts)} requests ended")
            return [torch.tensor([result.generated_tokens for result in results.values()])]

        return self.work(together if row.get("exact") else launch)


def in_nf4(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What a model is loaded with to be held in NF4 with double quantisation, its head and embedding not.

    `prepare_model_for_kbit_training` is left out, as it makes everything else f32. On a CPU, bitsandbytes packs weights
    anew for its bf16 kernels (`support_avx512bf16_for_cpu`) outside of training only.
    """
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def round_to_nf4(model: torch.nn.Module) -> None:
    """Gives linear layers the numbers that NF4 has for their weights in bf16, which is what every side quantises.

    They are unpacked here: on the CPU, bitsandbytes 0.50 unpacks rows that are no whole blocks wrongly.
    """
    from bitsandbytes.functional import dequantize_blockwise, quantize_4bit

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = module.weight.data
            packed, state = quantize_4bit(
                weight.bfloat16(), blocksize=64, quant_type="nf4", compress_statistics=True
            )
            codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).flatten()
            scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
            scales = scales.repeat_interleave(64)[: weight.numel()]
            numbers = state.code[codes[: weight.numel()].long()] * scales
            module.weight.data = numbers.reshape(weight.shape).to(weight.device, weight.dtype)


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
    serve(Torch(device, "compiled" in sys.argv[2:], "bitsandbytes" in sys.argv[2:]))
