"""Compares db-SP's attention with torch's: torchrun --nproc_per_node 2 attention.py"""

import torch
import torch.distributed as dist

from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, SequenceGroup, SequenceLayout, make_plan

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same on all ranks
q, k, v = torch.randn(3, 1, 3, 1000, 64)  # [batch, heads, tokens, D]
bits = (torch.rand(3, 16, 16) < 0.3) | torch.eye(16, dtype=torch.bool)  # [heads, query blocks, key blocks]

mask = BlockMask(bits, BlockGrid.uniform(tokens=1000, block=64))
layout = SequenceLayout.contiguous(tokens=1000, world=world)
plan = make_plan(mask, f"U1R{world}", layout=layout)
attend = DualBalancedAttention.prepare(plan, mask, layout, SequenceGroup.from_group())  # reusable
out = attend(*(x.chunk(world, dim=2)[rank] for x in (q, k, v)))  # this rank's tokens

each = bits.repeat_interleave(64, 1).repeat_interleave(64, 2)[:, :1000, :1000]
dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=each)
difference = (out - dense.chunk(world, dim=2)[rank]).abs().max()
print(f"rank {rank}: ρ_s {plan.rho_before:.3f} → {plan.rho:.3f}, largest difference {difference:.1e}")
dist.destroy_process_group()
