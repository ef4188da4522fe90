"""One sliding and one global layer over a long row on several ranks, and what each rank exchanges.

torchrun --nproc-per-node 2 examples/long_context_2gpu.py [SEQ]     default 4096 on CPU

With a GPU for every rank it runs over NCCL (SEQ 262144); ranks that share GPUs exchange through
host memory, and without any it all runs on the CPU.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

import ringattn


def choose_device() -> tuple[torch.device, str]:
    """This rank's device, and the backend of the process group."""
    gpus, ranks = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus == 0:
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    torch.cuda.set_device(device)
    return device, "nccl" if gpus >= ranks else "gloo"


def main() -> None:
    device, backend = choose_device()
    dist.init_process_group(backend)
    group = dist.group.WORLD
    kinds = [
        ringattn.Layer(
            q_heads=4, kv_heads=2, head_dim=128, scale=1.0, dtype=torch.bfloat16, window=w
        )
        for w in (512, 0)
    ]
    seq = int(sys.argv[1]) if len(sys.argv) > 1 else 262_144 if device.type == "cuda" else 4096

    with ringattn.Context(group, layers=kinds, device=device) as context:
        local = len(ringattn.position_ids(context.rank, context.size, seq, "zigzag"))
        step = context.step((1, local), layout="zigzag")
        torch.manual_seed(context.rank)
        q = torch.randn(1, 4, local, 128, dtype=torch.bfloat16, device=device) / 11
        k = torch.randn(1, 2, local, 128, dtype=torch.bfloat16, device=device) / 11
        leaves = [t.requires_grad_() for t in (q, k, torch.randn_like(k))]
        for layer, name in zip(kinds, ("sliding", "global")):
            start = time.perf_counter()
            ringattn.attention(*leaves, step, layer).float().square().sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            info = step.plan_info(kinds.index(layer))
            line = (
                f"rank {context.rank}  {context.transport}  {name:8} {seq} positions  "
                f"{seconds * 1e3:9.1f} ms  "
                f"{info['rows_received']} key rows received  imbalance {info['imbalance']:.2f}\n"
            )
            sys.stdout.write(line)
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
