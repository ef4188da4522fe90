"""Trains a small Gemma 4 on packed text, sharded over the ranks, and compares with one process.

torchrun --nproc-per-node 2 examples/train_gemma4_tiny.py

Every rank holds the whole model and half of every row. The loss curve over 2 ranks is that of a
single process with the model's own attention, up to rounding. The steps are short because training
itself amplifies rounding: after long ones, two runs that differ by 1e-7 at the start part as well.
"""

import torch
import torch.distributed as dist
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

import ringattn

STEPS, ROWS, SEQ, VOCABULARY = 8, 2, 96, 128


def small_model(implementation: str) -> Gemma4ForCausalLM:
    """Sliding and global layers, grouped-query heads, K = V on global layers."""
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=64,
        hidden_size_per_layer_input=16,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
        attention_k_eq_v=True,
        attn_implementation=implementation,
    )
    return Gemma4ForCausalLM(config)


def batches() -> list[dict[str, torch.Tensor]]:
    """Counting "texts" of different lengths, packed into rows; positions restart with each."""
    random = torch.Generator().manual_seed(1)
    result = []
    for _ in range(STEPS):
        ids, positions = [], []
        while len(ids) < ROWS * SEQ:
            room = SEQ - len(ids) % SEQ
            length = min(int(torch.randint(8, 48, (), generator=random)), room)
            first = int(torch.randint(3, VOCABULARY, (), generator=random))
            ids += [3 + (first + i) % (VOCABULARY - 3) for i in range(length)]
            positions += range(length)
        batch = torch.tensor(ids).view(ROWS, SEQ)
        result.append({"input_ids": batch, "position_ids": torch.tensor(positions).view(ROWS, SEQ)})
    return result


def train_over_ranks(group: dist.ProcessGroup) -> list[float]:
    ringattn.register()
    model = small_model("ringattn")
    ring = ringattn.Ring(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for batch in batches():
        loss = model(**ring.prepare(**batch, labels=batch["input_ids"])).loss
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole, group=group)
        losses.append(float(whole))
    return losses


def train_alone() -> list[float]:
    model = small_model("eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for batch in batches():
        documents = ringattn.documents_of_positions(batch["position_ids"])
        target = ringattn.shift_labels(batch["input_ids"], documents)
        loss = model(**batch, labels=target, shift_labels=target, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    ours = train_over_ranks(dist.group.WORLD)
    if dist.get_rank() == 0:
        alone = train_alone()
        for step, (a, b) in enumerate(zip(ours, alone)):
            print(f"step {step}  {dist.get_world_size()} ranks {a:.5f}  one process {b:.5f}")
        worst = max(abs(a - b) for a, b in zip(ours, alone))
        print(f"largest difference {worst:.1e}")
        assert worst < 5e-4 and ours[-1] < ours[0]
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
