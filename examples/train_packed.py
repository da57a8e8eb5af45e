"""Trains Wan on images and videos together, from pixels and captions: torchrun --nproc_per_node 8 train_packed.py

Ranks may load different numbers of clips. The work of text encoder and autoencoder (encode_balanced.py) and of the
transformer (docs/training.md) is balanced over all ranks.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import WanPipeline
from encode_balanced import encode_balanced

import dbsp_diffusers
from dbsp_diffusers import PackedSample, packed_forward_local

if torch.cuda.is_available():
    MODEL, MASK, STEPS = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "radial", 100
    LOADERS = [[(81, 480, 832)], [(1, 480, 832)] * 8, []]  # frames, rows, columns from each rank's loader
else:  # without GPUs: `dbsp tiny wan-trained tiny`, then torchrun --nproc_per_node 2
    MODEL, MASK, STEPS = "tiny", "radial:block_q=16,block_k=16", 2
    LOADERS = [[(9, 96, 96), (1, 96, 96)], [(1, 96, 96)] * 5]
CAPTION = "a red ball bounces over a blue checkered floor"  # yours: one for each clip

gpu = torch.cuda.is_available()
if gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if gpu else "gloo")
rank, device = dist.get_rank(), "cuda" if gpu else "cpu"
pipe = WanPipeline.from_pretrained(MODEL, torch_dtype=torch.float32).to(device)
transformer, vae = pipe.transformer.train(), pipe.vae.eval()
dbsp_diffusers.enable(transformer, MASK)
optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-5)
mean, std = (
    torch.tensor(one, device=device).view(-1, 1, 1, 1) for one in (vae.config.latents_mean, vae.config.latents_std)
)


def encode_text(ids):
    real = ids != pipe.tokenizer.pad_token_id
    return pipe.text_encoder(ids[None], attention_mask=real.long()[None]).last_hidden_state[0, real]


def encode_clip(pixels):
    return (vae.encode(pixels[None]).latent_dist.mode()[0] - mean) / std


for step in range(STEPS):
    clips = [torch.rand(3, *size, device=device) * 2 - 1 for size in LOADERS[rank % len(LOADERS)]]  # yours
    padded = {"padding": "max_length", "max_length": 512, "truncation": True, "return_tensors": "pt"}
    prompts = [pipe.tokenizer(CAPTION, **padded).input_ids[0].to(device) for _ in clips]
    texts, own_texts = encode_balanced(prompts, [1] * len(prompts), encode_text, device)
    latents, own_clips = encode_balanced(clips, [clip.numel() for clip in clips], encode_clip, device)
    print(f"rank {rank}: loaded {len(clips)}, encoded {own_texts} prompts and {own_clips} clips\n", end="", flush=True)
    noises = [torch.randn_like(clean) for clean in latents]
    levels = [torch.rand((), device=device) for _ in latents]
    samples = [
        PackedSample(torch.lerp(clean, noise, level), level * 1000, text)
        for clean, noise, level, text in zip(latents, noises, levels, texts, strict=True)
    ]
    found = packed_forward_local(transformer, samples)
    loss = found.zero  # lets a rank without samples take part in backward
    for prediction, noise, clean in zip(found.samples, noises, latents, strict=True):
        loss = loss + F.mse_loss(prediction, noise - clean)
    optimizer.zero_grad()
    loss.backward()
    dbsp_diffusers.sum_gradients(transformer)
    optimizer.step()
    dist.all_reduce(total := loss.detach())
    if rank == 0:
        print(f"step {step}: loss of all samples {total:.4f}")
dist.destroy_process_group()
