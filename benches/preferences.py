#!/usr/bin/env python3
"""A step of DPO beside TRL's with PEFT: `python3 benches/preferences.py target/release/metal-candle FOLDER [135m] [8b]`.

Random weights of the shapes of SmolLM2-135M (on the CPU; 4 pairs of a prompt of 128 and two answers of 64 tokens) and
Llama-3-8B (on an NVIDIA GPU; 8 pairs of 512 and 2 x 256), in bf16, LoRA of rank 16 on all linears, the reference computed
in every step. Both sides read the same conversations through the same template and take their steps in turns, in
processes of their own: two runs each, of which the first steps don't count. Needs PyTorch, transformers, PEFT and TRL;
without TRL only ours is timed. TRL keeps activations, too; where they don't fit, it computes them again.
"""
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "crates/cli/demo"
STEPS, WARM = 8, 3

ROWS = {
    "135m": dict(
        device="cpu", pairs=4, prompt=128, answer=64, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, vocab_size=49152, tie_word_embeddings=True,
    ),
    "8b": dict(
        device="cuda", pairs=8, prompt=512, answer=256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=128256, tie_word_embeddings=False,
    ),
}


def make(root, row):
    """A model with the demo's tokenizer, and pairs of words that are a token each."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {key: value for key, value in row.items() if key not in ("device", "pairs", "prompt", "answer")}
    config = LlamaConfig(max_position_embeddings=8192, rope_theta=500000.0, rms_norm_eps=1e-5, **shape)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(row["device"]):
        LlamaForCausalLM(config).save_pretrained(root / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "base" / name, root / "model")
    vocabulary = json.loads((DEMO / "base/tokenizer.json").read_text())["model"]["vocab"]
    words = [word[1:] for word in vocabulary if word.startswith("\u0120") and word[1:].isalpha()]
    draw = random.Random(1)

    def message(role, count):
        # The first word of a text has no space before it, and is more tokens than one.
        return [{"role": role, "content": " " + " ".join(draw.choices(words, k=count))}]

    with open(root / "pairs.jsonl", "w") as file:
        for _ in range(row["pairs"] * STEPS):
            pair = {"prompt": message("user", row["prompt"])}
            pair |= {key: message("assistant", row["answer"]) for key in ("chosen", "rejected")}
            file.write(json.dumps(pair) + "\n")


def ours(program, root, row):
    output = root / "ours"
    shutil.rmtree(output, ignore_errors=True)
    command = [
        program, "train", "--model", root / "model", "--data", root / "pairs.jsonl", "--objective", "dpo", "--output",
        output, "--device", row["device"], "--dtype", "bf16", "--rank", 16, "--batch-size", row["pairs"], "--steps",
        STEPS, "--report-every", 1, "--save-every", 0, "--max-seq-length", 4096, "--no-plot", "--no-tensorboard",
    ]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    events = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "train"]
    seconds = [event["tokens"] / event["tokens_per_second"] for event in steps]
    return seconds, steps[-1]["peak_memory"], [event["loss"] for event in steps]


def theirs(root, row):
    command = [sys.executable, __file__, "--trl", str(root), json.dumps(row)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0 and not row.get("checkpointing"):
        print("TRL failed; again with gradient checkpointing, its default", flush=True)
        row["checkpointing"] = True
        return theirs(root, row)
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


def trl(root, row):
    """TRL's side, in a process of its own."""
    import resource
    import time

    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Steps(TrainerCallback):
        def __init__(self):
            self.seconds, self.losses = [], []

        def on_step_begin(self, *_, **__):
            self.begun = time.perf_counter()

        def on_step_end(self, *_, **__):
            if row["device"] == "cuda":
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self.begun)

        def on_log(self, _, __, ___, logs=None, **____):
            if logs and "loss" in logs:
                self.losses.append(logs["loss"])

    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(root / "model", pad_token="<|endoftext|>")
    config = DPOConfig(
        output_dir=str(root / "theirs"), per_device_train_batch_size=row["pairs"], max_steps=STEPS, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=row["device"] == "cpu", bf16=True,
        gradient_checkpointing=row.get("checkpointing", False),
        max_length=None, learning_rate=1e-5, disable_tqdm=True,
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    steps = Steps()
    data = load_dataset("json", data_files=str(root / "pairs.jsonl"), split="train")
    trainer = DPOTrainer(
        model, args=config, train_dataset=data, processing_class=tokenizer, peft_config=lora, callbacks=[steps]
    )
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if row["device"] == "cuda":
        peak = torch.cuda.max_memory_allocated()
    print(json.dumps([steps.seconds, peak, steps.losses]))


def main():
    if sys.argv[1] == "--trl":
        return trl(Path(sys.argv[2]), json.loads(sys.argv[3]))
    program, root, *rows = sys.argv[1:]
    for name in rows or ["135m"]:
        row, folder = ROWS[name], Path(root) / name
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "pairs.jsonl").exists():
            make(folder, row)
        found = {"metal-candle": []}
        if find_spec("trl"):
            found["TRL"] = []
        for _ in range(2):
            for side, runs in found.items():
                runs.append(theirs(folder, row) if side == "TRL" else ours(program, folder, row))
        medians = {}
        for side, runs in found.items():
            seconds = [second for run in runs for second in run[0][WARM:]]
            medians[side] = statistics.median(seconds)
            peak = max(run[1] for run in runs) / 2**30
            print(f"{name} {side}: {1e3 * medians[side]:.0f} ms a step ({1e3 * min(seconds):.0f} to "
                  f"{1e3 * max(seconds):.0f}), peak {peak:.2f} GiB, loss {runs[0][2][0]:.4f} to {runs[0][2][-1]:.4f}")
        if "TRL" in medians:
            print(f"{name}: {medians['TRL'] / medians['metal-candle']:.2f} times as fast as TRL", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
