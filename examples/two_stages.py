"""Trains Wan in DSV's two stages, profile and predict: torchrun --nproc_per_node 8 two_stages.py

Stage 1 trains with dense attention and records queries and keys, until low-rank projections of them predict attention
well enough. Stage 2 trains under the masks that these predict. (Tan et al., 2025, section 5.2. DSV trains its
projections together with the model; here they are fitted to what was recorded.)
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import WanTransformer3DModel

import dbsp_diffusers
from dbsp_cli.mask_tools.fit import fit_recording

RECORDING, FITTED = Path("moments"), Path("fitted.safetensors")
MASK = f"lowrank:path={FITTED},cdf=0.9"  # each row keeps as many blocks as nine tenths of its attention need
if torch.cuda.is_available():
    MODEL, SIZE, RANK, STEPS = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", (21, 60, 104), 64, 50
else:  # to try it: first `dbsp tiny wan-trained tiny`, then torchrun --nproc_per_node 2
    MODEL, SIZE, RANK, STEPS = "tiny", (3, 12, 20), 16, 2
    MASK += ",block_q=16,block_k=16"
MOST_LOSS, MOST_ROUNDS = 0.01, 10  # DSV's threshold

gpu = torch.cuda.is_available()
if gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if gpu else "gloo")
device = "cuda" if gpu else "cpu"
transformer = WanTransformer3DModel.from_pretrained(MODEL, subfolder="transformer").to(device).train()
transformer.enable_gradient_checkpointing()
optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-5)


def train(stage, mask):
    """Trains for STEPS steps under a mask."""
    dbsp_diffusers.enable(transformer, mask)
    for step in range(STEPS):
        torch.manual_seed(step)  # what a step draws is the same on all ranks
        clean, noise = torch.randn(2, 1, transformer.config.in_channels, *SIZE, device=device)  # yours: encoded clips
        text = torch.randn(1, 512, transformer.config.text_dim, device=device)  # yours: encoded captions
        level = torch.rand(1, device=device)
        predicted = transformer(torch.lerp(clean, noise, level), level * 1000, text, return_dict=False)[0]
        loss = F.mse_loss(predicted, noise - clean)
        optimizer.zero_grad()
        loss.backward()
        dbsp_diffusers.sum_gradients(transformer)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"stage {stage}, step {step}: loss {loss:.4f}")
    dbsp_diffusers.disable(transformer)


def approximation_loss():
    """Fits projections to the last recording. Returns 1 − the cosine of their scores with q·k, mean over layers."""
    dist.barrier()  # all ranks have written their part
    loss = [0.0]
    if dist.get_rank() == 0:
        kept = fit_recording([RECORDING], FITTED, RANK).kept.values()  # by layer, the cosine's square
        loss = [1 - sum(share**0.5 for share in kept) / len(kept)]
        print(f"approximation loss {loss[0]:.4f}")
    dist.broadcast_object_list(loss)
    return loss[0]


for _ in range(MOST_ROUNDS):
    train(1, f"record_qk:path={RECORDING}")
    if approximation_loss() <= MOST_LOSS:
        break
else:
    raise SystemExit(f"the approximation loss stays above {MOST_LOSS}; use a larger RANK")
train(2, MASK)
dist.destroy_process_group()
