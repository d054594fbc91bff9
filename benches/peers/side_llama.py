"""llama.cpp, through its own C interface (llama-cpp-python): prefill and decode of the same GGUF file.

Its matrices are multiplied as llama.cpp does it, with activations in 8 bits.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Any

import llama_cpp as llama
import numpy as np

from worker import Arrays, Row, Unsupported, Work, serve


class Llama:
    """The side on the CPU, or with all layers on a GPU that this build of it knows."""

    def __init__(self, device: str) -> None:
        self.layers = 0 if device == "cpu" else -1
        if self.layers and not llama.llama_supports_gpu_offload():
            sys.exit(f"this llama.cpp has no {device}")
        self.threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
        # What it logs on the way goes to the side's log.
        llama.llama_backend_init()

    def version(self) -> str:
        return f"by llama-cpp-python {version('llama-cpp-python')}"

    def peak(self) -> int | None:
        return None

    def prepare(self, row: Row, inputs: Arrays, model: str | None, adapter: str | None) -> Work:
        if row["work"] not in ("prefill", "decode") or not row.get("file"):
            raise Unsupported("only prefill and decode of a GGUF file here")
        prompt = inputs["ids"].reshape(-1).astype(np.int32)
        loaded = Loaded(model or "", len(prompt) + row["tokens"] + 1, self.layers, self.threads)
        if row["work"] == "prefill":

            def prefill() -> list[np.ndarray]:
                loaded.clear()
                return [loaded.read(prompt).copy()]

            return Work(prefill, lambda _: None, lambda results: results)
        state: dict[str, int] = {}

        def reset() -> None:
            loaded.clear()
            state["next"] = int(loaded.read(prompt).argmax())

        def decode() -> list[np.ndarray]:
            tokens = []
            for _ in range(row["tokens"]):
                state["next"] = int(loaded.read(np.array([state["next"]], np.int32)).argmax())
                tokens.append(state["next"])
            return [np.array(tokens)]

        return Work(decode, lambda _: None, lambda results: results, reset)


class Loaded:
    """A model and a context for so many tokens."""

    def __init__(self, path: str, tokens: int, layers: int, threads: int) -> None:
        options = llama.llama_model_default_params()
        options.n_gpu_layers = layers
        self.model = llama.llama_model_load_from_file(path.encode(), options)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        options = llama.llama_context_default_params()
        options.n_ctx = tokens
        options.n_batch = options.n_ubatch = tokens
        options.n_threads = options.n_threads_batch = threads
        self.context = llama.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no room for {tokens} tokens")
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))

    def __del__(self) -> None:
        if getattr(self, "context", None):
            llama.llama_free(self.context)
        if getattr(self, "model", None):
            llama.llama_model_free(self.model)

    def clear(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def read(self, ids: np.ndarray) -> np.ndarray:
        """The logits behind the last of these tokens, which follow those before; valid until the next call."""
        tokens = (llama.llama_token * len(ids))(*ids)
        batch = llama.llama_batch_get_one(tokens, len(ids))
        if llama.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        logits: Any = llama.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(logits, shape=(self.vocabulary,))


if __name__ == "__main__":
    serve(Llama(sys.argv[1]))
