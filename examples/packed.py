"""Generates requests of several sizes together: torchrun --nproc_per_node 8 packed.py"""

import os

import torch
import torch.distributed as dist
from denoise_packed import Request, denoise_packed
from diffusers import WanPipeline
from diffusers.utils import export_to_video

import dbsp_diffusers

if torch.cuda.is_available():
    MODEL, MASK, STEPS = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "sparge:cdf=0.92", 50
    LARGE, SMALL = {"height": 480, "width": 832, "num_frames": 81}, {"height": 480, "width": 832, "num_frames": 1}
else:  # without GPUs: `dbsp tiny wan-trained tiny`, then torchrun --nproc_per_node 2
    MODEL, MASK, STEPS = "tiny", "sparge:cdf=0.85,similarity=-1,block_q=16,block_k=16", 12
    LARGE, SMALL = {"height": 144, "width": 240, "num_frames": 33}, {"height": 144, "width": 240, "num_frames": 1}

gpu = torch.cuda.is_available()
if gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if gpu else "gloo")
device = "cuda" if gpu else "cpu"
pipe = WanPipeline.from_pretrained(MODEL, torch_dtype=torch.bfloat16 if gpu else torch.float32).to(device)
dbsp_diffusers.enable(pipe, MASK)

requests = [
    Request(prompt="a red ball bounces over a blue checkered floor", seed=0, num_inference_steps=STEPS, **LARGE),
    Request(prompt="a green square slides over a white floor", seed=1, num_inference_steps=STEPS, **SMALL),
]
for number, video in enumerate(denoise_packed(pipe, requests)):
    if dist.get_rank() == 0:
        export_to_video(video, f"video{number}.mp4", fps=16)
dist.destroy_process_group()
