"""lm-evaluation-harness gives the same figures through the server (`local-completions`) as by its own backend.

    python3 -m venv target/harness && target/harness/bin/pip install --requirement .ci/clients/requirements-harness.txt
    target/harness/bin/python .ci/clients/harness.py

Tasks of all four kinds, on data of this folder: multiple choice, likelihood, likelihood of whole texts, and generation.
Every sample's log-likelihoods, texts and figures have to agree to 4 digits.
"""

import math
import os
import pathlib
import shutil
import sys
import tempfile

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["HF_HOME"] = tempfile.mkdtemp()

import lm_eval
import torch
import transformers
from lm_eval.tasks import TaskManager

from server import DEMO, ROOT, Server

TASKS = ["facts", "facts_perplexity", "facts_written", "statements"]
DIGITS = 4


def qwen3(folder):
    """A model of another family, of random weights, with the demo's tokenizer."""
    shutil.copytree(DEMO / "base", folder, ignore=shutil.ignore_patterns("model.safetensors", "config.json"))
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=1008,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.1,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
        dtype="float32",
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def evaluate(kind, **arguments):
    tasks = TaskManager(include_path=str(ROOT / ".ci/clients/tasks"), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=kind, model_args=arguments, tasks=TASKS, task_manager=tasks, log_samples=True, bootstrap_iters=0, verbosity="ERROR"
    )
    samples = {
        (task, sample["doc_id"]): [numbers(answer) for answer in sample["filtered_resps"]]
        for task in TASKS
        for sample in found["samples"][task]
    }
    figures = {
        (task, name.removesuffix(",none")): value
        for task, of_task in found["results"].items()
        for name, value in of_task.items()
        if isinstance(value, float) and "stderr" not in name
    }
    return figures, samples


def numbers(answer):
    return list(answer) if isinstance(answer, (list, tuple)) else [answer]


def same(a, b):
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return math.isclose(a, b, rel_tol=10**-DIGITS, abs_tol=10**-DIGITS)
    return a == b


def main():
    os.chdir(ROOT)
    scratch = tempfile.TemporaryDirectory()
    models = {"the demo's base": DEMO / "base", "a Qwen3": qwen3(pathlib.Path(scratch.name) / "qwen3")}
    for name, model in models.items():
        expected, samples = evaluate("hf", pretrained=str(model), dtype="float32", device="cpu", batch_size=8)
        with Server(model=model) as server:
            # Its tokenizer as files here, and as the server tells of it.
            for backend in ("huggingface", "remote"):
                found, answers = evaluate(
                    "local-completions",
                    model="demo",
                    base_url=f"{server.url}/v1/completions",
                    tokenizer_backend=backend,
                    tokenizer=str(model) if backend == "huggingface" else None,
                    num_concurrent=4,
                    batch_size=8,
                    max_length=256,
                )
                print(f"{name}, tokenizer: {backend}")
                for key, value in expected.items():
                    print(f"  {key[0]:18}{key[1]:18}{value:<14.7g}{found[key]:<14.7g}")
                differ = [key for key, value in samples.items() if not same(value, answers[key])]
                for key in differ[:5]:
                    print(f"  {key}: {samples[key]} by its backend, {answers[key]} by the server")
                assert not differ, f"{len(differ)} of {len(samples)} samples differ"
                assert same(list(expected.values()), [found[key] for key in expected])
    print(f"the same figures and {len(samples)} samples each")


if __name__ == "__main__":
    sys.exit(main())
