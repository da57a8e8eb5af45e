"""ParaAttention's own function with db-SP in it: torchrun --nproc_per_node 8 paraattention_wan.py"""

import os

import torch
import torch.distributed as dist
from diffusers import WanPipeline
from diffusers.utils import export_to_video
from para_attn.context_parallel import init_context_parallel_mesh
from para_attn.context_parallel.diffusers_adapters import parallelize_pipe

if torch.cuda.is_available():
    MODEL, MASK = "Wan-AI/Wan2.1-T2V-14B-Diffusers", "sparge:cdf=0.92"
    SIZE = {"height": 720, "width": 1280, "num_frames": 81, "num_inference_steps": 50}
else:  # to try it: first `dbsp tiny wan-trained tiny`, then torchrun --nproc_per_node 2
    MODEL, MASK = "tiny", "sparge:cdf=0.85,similarity=-1,block_q=16,block_k=16"
    SIZE = {"height": 144, "width": 240, "num_frames": 33, "num_inference_steps": 12}

gpu = torch.cuda.is_available()
if gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if gpu else "gloo")
device = "cuda" if gpu else "cpu"
pipe = WanPipeline.from_pretrained(MODEL, torch_dtype=torch.bfloat16 if gpu else torch.float32).to(device)

mesh = init_context_parallel_mesh("cuda" if gpu else "cpu", max_ring_dim_size=2)
parallelize_pipe(pipe, mesh=mesh, attn="dbsp", config=MASK)  # both arguments are db-SP's
video = pipe("a red ball bounces over a blue checkered floor", **SIZE).frames[0]

if dist.get_rank() == 0:
    export_to_video(video, "video.mp4", fps=16)
dist.destroy_process_group()
