"""PEFT under PyTorch's DistributedDataParallel, a process a GPU, started by `torch.distributed.run`:

    python -m torch.distributed.run --standalone --nproc-per-node 2 benches/peers/distributed.py MODEL ROWS LENGTH STEPS

LoRA of rank 16 on all linears of MODEL, a folder, ROWS x LENGTH random tokens a step of each process. Rank 0 prints the
tokens a second of all processes in the median step after the first quarter.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from side_torch import adamw
from worker import CLIP_NORM


def main() -> None:
    folder = sys.argv[1]
    rows, length, steps = map(int, sys.argv[2:])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = adamw(parameters)
    model = DistributedDataParallel(model, device_ids=[device.index])
    draw = torch.Generator(device).manual_seed(dist.get_rank())
    shape = (rows, length + 1)
    seconds = []
    for _ in range(steps):
        batch = torch.randint(base.config.vocab_size, shape, generator=draw, device=device)
        torch.cuda.synchronize()
        started = time.perf_counter()
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        del logits
        loss.item()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[steps // 4 :])
    if dist.get_rank() == 0:
        print(rows * length * dist.get_world_size() / median)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
