"""Generates a video with db-SP in ParaAttention: torchrun --nproc_per_node 8 paraattention_wan.py"""

import os

import torch
import torch.distributed as dist
from diffusers import WanPipeline
from diffusers.utils import export_to_video
from para_attn.context_parallel import init_context_parallel_mesh
from para_attn.context_parallel.diffusers_adapters import parallelize_pipe

if torch.cuda.is_available():
    MODEL, CONFIG = "Wan-AI/Wan2.1-T2V-14B-Diffusers", None  # the settings shipped for this checkpoint
    SIZE = {"height": 720, "width": 1280, "num_frames": 81, "num_inference_steps": 50}
else:  # without GPUs: `dbsp tiny wan-trained tiny`, then torchrun --nproc_per_node 2
    MODEL, CONFIG = "tiny", "tiny-wan-trained"
    SIZE = {"height": 144, "width": 240, "num_frames": 33, "num_inference_steps": 12}

gpu = torch.cuda.is_available()
if gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if gpu else "gloo")
device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
pipe = WanPipeline.from_pretrained(MODEL, torch_dtype={"default": dtype, "vae": torch.float32}).to(device)

mesh = init_context_parallel_mesh("cuda" if gpu else "cpu", max_ring_dim_size=2)
parallelize_pipe(pipe, mesh=mesh, attn="dbsp", config=CONFIG)  # db-SP adds attn and config
video = pipe("a red ball bounces over a blue checkered floor", **SIZE).frames[0]

if dist.get_rank() == 0:
    export_to_video(video, "video.mp4", fps=16)
dist.destroy_process_group()
