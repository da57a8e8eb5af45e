"""An attention kernel of your own, compared with torch's attention: torchrun --nproc_per_node 2 my_kernel.py

A kernel gets rows of queries, and for each row the key blocks that it attends to. It returns outputs and log-sum-exps,
with which db-SP merges several chunks of keys. Import this module, then select it with `kernel: mine`.
"""

import torch
import torch.distributed as dist

from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, SequenceGroup, SequenceLayout, make_plan
from dbsp_kernels import KERNELS, Kernel, KernelInputs


def attend(inputs: KernelInputs):
    """Returns out [rows, block_q, D] and lse [rows, block_q]; 0 and −inf for a row without keys."""
    wide = torch.promote_types(inputs.q.dtype, torch.float32)  # dtype of lse; out has that of q
    block = torch.arange(inputs.kv_index.shape[1], device=inputs.q.device)
    token = torch.arange(inputs.k.shape[1], device=inputs.q.device)
    index = inputs.kv_index.long().where(block < inputs.kv_count[:, None], 0)  # ignore entries beyond the count
    real = (block < inputs.kv_count[:, None])[..., None] & (token < inputs.kv_len[index][..., None])
    keys, values = (side[index].flatten(1, 2).to(wide) for side in (inputs.k, inputs.v))  # [rows, tokens, D]
    scores = (inputs.q.to(wide) @ keys.mT * inputs.scale).masked_fill(~real.flatten(1)[:, None], -torch.inf)
    out = scores.softmax(dim=-1).nan_to_num() @ values
    return out.to(inputs.q.dtype), scores.logsumexp(dim=-1)


KERNELS["mine"] = Kernel(name="mine", run=attend, devices=frozenset({"cpu", "cuda"}))

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same on all ranks
    q, k, v = torch.randn(3, 1, 3, 1000, 64)  # [batch, heads, tokens, D]
    bits = (torch.rand(3, 16, 16) < 0.3) | torch.eye(16, dtype=torch.bool)  # [heads, query blocks, key blocks]
    mask = BlockMask(bits, BlockGrid.uniform(tokens=1000, block=64))
    layout = SequenceLayout.contiguous(tokens=1000, world=world)
    plan = make_plan(mask, f"U1R{world}", layout=layout)  # ring: merges two chunks of keys
    prepared = DualBalancedAttention.prepare(plan, mask, layout, SequenceGroup.from_group(), kernel="mine")
    out = prepared(*(x.chunk(world, dim=2)[rank] for x in (q, k, v)))

    each = bits.repeat_interleave(64, 1).repeat_interleave(64, 2)[:, :1000, :1000]
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=each)
    print(f"rank {rank}: largest difference {(out - dense.chunk(world, dim=2)[rank]).abs().max():.1e}")
    dist.destroy_process_group()
