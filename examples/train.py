"""Fine-tunes Wan under the mask it will run with: torchrun --nproc_per_node 8 train.py

Each rank has a part of one clip's tokens. docs/training.md adds data parallelism.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import WanTransformer3DModel

import dbsp_diffusers

if torch.cuda.is_available():
    MODEL, MASK, SIZE, STEPS = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "sparge:cdf=0.92", (21, 60, 104), 100
else:  # without GPUs: `dbsp tiny wan-trained tiny`, then torchrun --nproc_per_node 2
    MODEL, MASK, SIZE, STEPS = "tiny", "sparge:cdf=0.85,block_q=16,block_k=16", (3, 12, 20), 3

gpu = torch.cuda.is_available()
if gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if gpu else "gloo")
device = "cuda" if gpu else "cpu"
transformer = WanTransformer3DModel.from_pretrained(MODEL, subfolder="transformer").to(device).train()
transformer.enable_gradient_checkpointing()
dbsp_diffusers.enable(transformer, MASK)
optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-5)

for step in range(STEPS):
    torch.manual_seed(step)  # the same random numbers on all ranks
    clean, noise = torch.randn(2, 1, transformer.config.in_channels, *SIZE, device=device)  # yours: encoded clips
    text = torch.randn(1, 512, transformer.config.text_dim, device=device)  # yours: encoded captions
    level = torch.rand(1, device=device)
    predicted = transformer(torch.lerp(clean, noise, level), level * 1000, text, return_dict=False)[0]
    loss = F.mse_loss(predicted, noise - clean)
    optimizer.zero_grad()
    loss.backward()
    dbsp_diffusers.sum_gradients(transformer)  # each rank has the gradients of its own tokens
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss:.4f}")
dist.destroy_process_group()
