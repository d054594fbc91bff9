#!/usr/bin/env python3
"""What checkpoints cost a run on a GPU: how long training waits for one, and how long it takes to be complete.

    python3 benches/saving.py target/release/metal-candle FOLDER [1b-full] [8b-lora]

trains models of the shapes of Llama-3.2-1B (every weight, 8 x 1024 tokens) and Llama-3-8B (LoRA of rank 16 on
all linears, 4 x 2048) on random weights, with a checkpoint now and then, and reads the run's log: the median
step, the slowest step that follows the beginning of a checkpoint, and for each checkpoint how long training
waited for it. FOLDER takes 60 GB. The row 8b-lora makes its weights with PyTorch.
"""
import json
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "crates/cli/demo"


def shape(folder, **sizes):
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", rms_norm_eps=1e-5,
        max_position_embeddings=8192, rope_theta=500000.0, torch_dtype="bfloat16", vocab_size=128256,
        num_attention_heads=32, num_key_value_heads=8, attention_bias=False, mlp_bias=False, **sizes,
    )
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "base" / name, folder)
    return config


def random_weights(folder, config):
    import torch
    from safetensors.torch import save_file

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    tensors = {"model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}

    def add(name, *sizes):
        tensors[name] = (torch.randn(*sizes, device="cuda") * 0.02).bfloat16().cpu()

    add("model.embed_tokens.weight", config["vocab_size"], hidden)
    add("lm_head.weight", config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name, out, into in (
            ("self_attn.q_proj", queries, hidden), ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden), ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner),
        ):
            add(f"{prefix}{name}.weight", out, into)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def data(folder):
    """Records longer than any context here."""
    draw = random.Random(1)
    lines = (DEMO / "instructions/train.jsonl").read_text().splitlines()
    texts = [" ".join(turn["content"] for turn in json.loads(line)["messages"]) for line in lines]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "train.jsonl", "w") as file:
        for _ in range(400):
            file.write(json.dumps({"text": " ".join(draw.choices(texts, k=260))}) + "\n")


def run(program, root, name, steps, every, options):
    output = root / name
    shutil.rmtree(output, ignore_errors=True)
    command = [
        program, "train", "--data", root / "data", "--output", output, "--device", "cuda", "--no-plot",
        "--report-every", 1, "--steps", steps, "--save-every", every, "--keep", 1, *options,
    ]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    events = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    # In the order of the steps, since a checkpoint is complete some steps after it was begun.
    seconds = {e["step"]: e["tokens"] / e["tokens_per_second"] for e in events if e["event"] == "train"}
    saved = [e for e in events if e["event"] == "checkpoint"]
    after = [seconds[s["step"] + 1] for s in saved if s["step"] + 1 in seconds]
    print(f"{name}: {len(seconds)} steps, median {1e3 * statistics.median(seconds.values()):.1f} ms, "
          f"slowest after a checkpoint was begun {1e3 * max(after):.1f} ms")
    for event in saved:
        last = "  (the run's end, which waits for it)" if event["step"] == steps else ""
        print(f"  step {event['step']}: training waited {1e3 * event['waited']:.1f} ms, "
              f"complete after {event['seconds']:.2f} s{last}", flush=True)
    shutil.rmtree(output)


def main():
    program, root, *rows = sys.argv[1:]
    root = Path(root)
    rows = rows or ["1b-full", "8b-lora"]
    data(root / "data")
    if "1b-full" in rows:
        shape(root / "1b", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64,
              tie_word_embeddings=True)
        run(program, root, "1b-full", 600, 300, [
            "--from-config", root / "1b", "--fine-tune-type", "full", "--learning-rate", "2e-5",
            "--batch-size", 8, "--max-seq-length", 1024])
    if "8b-lora" in rows:
        config = shape(root / "8b", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128,
                       tie_word_embeddings=False)
        random_weights(root / "8b", config)
        run(program, root, "8b-lora", 20, 5, [
            "--model", root / "8b", "--rank", 16, "--batch-size", 4, "--max-seq-length", 2048])


if __name__ == "__main__":
    main()
