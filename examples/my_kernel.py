"""An attention kernel of your own, compared with torch's attention: torchrun --nproc_per_node 2 my_kernel.py

A kernel gets rows of queries and the packed key blocks that each row attends to. It returns outputs with log-sum-exps,
by which results over several chunks of keys are merged. `kernel: mine` selects it once this module has been imported.
"""

import torch
import torch.distributed as dist

from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, SequenceGroup, SequenceLayout, make_plan
from dbsp_kernels import KERNELS, Kernel, KernelInputs


def attend(inputs: KernelInputs):
    """Gathers each row's blocks. Returns out [rows, block_q, D] and lse [rows, block_q]; without keys 0 and −inf."""
    wide = torch.promote_types(inputs.q.dtype, torch.float32)  # the log-sum-exp's dtype; the output has the queries'
    block = torch.arange(inputs.kv_index.shape[1], device=inputs.q.device)
    token = torch.arange(inputs.k.shape[1], device=inputs.q.device)
    index = inputs.kv_index.long().where(block < inputs.kv_count[:, None], 0)  # entries beyond the count mean nothing
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
    plan = make_plan(mask, f"U1R{world}", layout=layout)  # a ring: two chunks of keys are merged by their log-sum-exp
    prepared = DualBalancedAttention.prepare(plan, mask, layout, SequenceGroup.from_group(), kernel="mine")
    out = prepared(*(x.chunk(world, dim=2)[rank] for x in (q, k, v)))

    each = bits.repeat_interleave(64, 1).repeat_interleave(64, 2)[:, :1000, :1000]
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=each)
    print(f"rank {rank}: largest difference {(out - dense.chunk(world, dim=2)[rank]).abs().max():.1e}")
    dist.destroy_process_group()
