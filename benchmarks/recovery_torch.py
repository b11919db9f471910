"""The training that recovery.py kills under torchrun: two workers with gloo and a state of so many bytes.

Goes on from a checkpoint of its own in memory, which rank 0 writes every so many steps. Each rank adds a line to its
file after each step: pid, step, second of CLOCK_MONOTONIC. Runs in an environment of its own, without keepstep.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

TENSORS = 144


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--step", type=float, default=0.0, help="seconds that a step takes at the least")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    count = max(1, options.bytes // (4 * TENSORS))
    state = {f"tensor_{n}": torch.zeros(count) for n in range(TENSORS)}
    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    saved, step = options.folder / "checkpoint.pt", 0
    if saved.exists():
        found = torch.load(saved, weights_only=True)
        step = found.pop("step")
        for name, tensor in found.items():
            state[name].copy_(tensor)
    with (options.folder / f"steps-{rank}").open("a", buffering=1) as told:
        while True:
            step, began = step + 1, time.monotonic()
            product = matrix
            for _ in range(4):
                product = product @ matrix * 1e-3
            gradient = product.mean()
            dist.all_reduce(gradient)
            for n in range(6):
                state[f"tensor_{n}"].mul_(0.9).add_(0.1 * gradient)
            time.sleep(max(0.0, began + options.step - time.monotonic()))
            told.write(f"{os.getpid()} {step} {time.monotonic()}\n")
            if step % options.every == 0:
                if rank == 0:
                    unfinished = saved.with_suffix(".new")
                    torch.save({**state, "step": step}, unfinished)
                    unfinished.replace(saved)
                dist.barrier()


if __name__ == "__main__":
    main()
