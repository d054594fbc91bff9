#!/usr/bin/env python3
"""How much of its speed training keeps over MPI: two processes of a thread each beside one of two threads.

    python3 benches/processes.py target/release/metal-candle FOLDER [ROUNDS]

trains a model of SmolLM2-135M's width with 10 layers on random weights, LoRA of rank 16 on all linears, 4 x 512
tokens a step of all processes together. The two take turns; the figure of a round is the median step of its log after
the first ones. The program is a build with the feature `mpi`. FOLDER takes 100 MB.
"""
import array
import json
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "crates/cli/demo"
ROWS, LENGTH, STEPS, FIRST = 4, 512, 16, 4
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
SIDES = {
    "1 process of 2 threads": ([], ROWS, 2),
    "2 processes of 1 thread": ([*MPIRUN, "-n", "2"], ROWS // 2, 1),
}


def model(folder):
    folder.mkdir(parents=True)
    hidden, inner, layers, heads, keys, head = 576, 1536, 10, 9, 3, 64
    vocabulary = json.loads((DEMO / "base/config.json").read_text())["vocab_size"]
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", rms_norm_eps=1e-5,
        max_position_embeddings=2048, rope_theta=10000.0, torch_dtype="float32", vocab_size=vocabulary,
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=keys, head_dim=head, attention_bias=False, mlp_bias=False, tie_word_embeddings=True,
    )
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "base" / name, folder)
    shapes = {"model.norm.weight": [hidden], "model.embed_tokens.weight": [vocabulary, hidden]}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = [hidden]
        for name, out, into in (
            ("self_attn.q_proj", heads * head, hidden), ("self_attn.k_proj", keys * head, hidden),
            ("self_attn.v_proj", keys * head, hidden), ("self_attn.o_proj", hidden, heads * head),
            ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner),
        ):
            shapes[f"{prefix}{name}.weight"] = [out, into]
    draw = random.Random(1)
    numbers = [draw.gauss(0, 0.02) for _ in range(1 << 16)]
    header, data = {}, []
    for name, shape in shapes.items():
        values = [1.0] * shape[0] if len(shape) == 1 else draw.choices(numbers, k=shape[0] * shape[1])
        begin = sum(map(len, data))
        data.append(array.array("f", values).tobytes())
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + len(data[-1])]}
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    (folder / "model.safetensors").write_bytes(b"".join([len(header).to_bytes(8, "little"), header, *data]))


def examples(folder):
    """Records longer than the rows."""
    draw = random.Random(1)
    lines = (DEMO / "instructions/train.jsonl").read_text().splitlines()
    texts = [" ".join(turn["content"] for turn in json.loads(line)["messages"]) for line in lines]
    folder.mkdir()
    records = (json.dumps({"text": " ".join(draw.choices(texts, k=100))}) + "\n" for _ in range(100))
    (folder / "train.jsonl").write_text("".join(records))


def tokens_per_second(program, folder, start, rows, threads):
    output = folder / "run"
    subprocess.run(
        [
            *start, program, "train", "--model", folder / "model", "--data", folder / "data", "--output", output,
            *("--overwrite", "--device", "cpu", "--rank", "16", "--target-modules", "all-linear"),
            *("--batch-size", str(rows), "--max-seq-length", str(LENGTH), "--threads", str(threads)),
            *("--steps", str(STEPS), "--report-every", "1", "--no-plot", "--no-tensorboard", "--quiet"),
        ],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    events = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    found = [event["processed_tokens_per_second"] for event in events if event["event"] == "train"]
    return statistics.median(found[FIRST:])


def main():
    program, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    if not (folder / "model").is_dir():
        model(folder / "model")
        examples(folder / "data")
    found = {name: [] for name in SIDES}
    for number in range(rounds + 1):
        for name, side in SIDES.items():
            speed = tokens_per_second(program, folder, *side)
            # The first round warms up.
            if number > 0:
                found[name].append(speed)
                print(f"round {number}, {name}: {speed:.0f} tokens/s", flush=True)
    one, two = (statistics.median(speeds) for speeds in found.values())
    print(f"medians: {one:.0f} and {two:.0f} tokens/s; efficiency {two / one:.1%}")


if __name__ == "__main__":
    main()
