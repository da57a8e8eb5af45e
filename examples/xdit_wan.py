"""Generates a video with db-SP in xDiT, in a script that takes xDiT's arguments:

torchrun --nproc_per_node 8 xdit_wan.py --model Wan-AI/Wan2.1-T2V-14B-Diffusers --ulysses_degree 4 --ring_degree 2 \
    --height 720 --width 1280 --num_frames 81 --prompt "a red ball bounces over a blue checkered floor"

xfuser needs GPUs. For xDiT's own command, see xdit_command.sh.
"""

import torch
from diffusers import WanPipeline
from diffusers.utils import export_to_video
from xfuser import xFuserArgs
from xfuser.config import FlexibleArgumentParser
from xfuser.core.distributed import get_world_group, initialize_runtime_state

import dbsp_xdit

args = xFuserArgs.from_cli_args(xFuserArgs.add_cli_args(FlexibleArgumentParser()).parse_args())
engine_config, wanted = args.create_config()  # creates xfuser's process groups
gpu, rank = torch.cuda.is_available(), get_world_group().rank
device, dtype = (f"cuda:{get_world_group().local_rank}", torch.bfloat16) if gpu else ("cpu", torch.float32)
pipe = WanPipeline.from_pretrained(args.model, torch_dtype={"default": dtype, "vae": torch.float32}).to(device)
initialize_runtime_state(pipe, engine_config)

dbsp_xdit.attach(pipe)  # the settings shipped for the checkpoint; Ulysses × ring from the arguments
video = pipe(
    wanted.prompt,
    height=wanted.height,
    width=wanted.width,
    num_frames=wanted.num_frames,
    num_inference_steps=wanted.num_inference_steps,
    generator=torch.Generator(device).manual_seed(wanted.seed),  # the same noise on all ranks
).frames[0]

if rank == 0:
    export_to_video(video, "video.mp4", fps=16)
torch.distributed.destroy_process_group()
