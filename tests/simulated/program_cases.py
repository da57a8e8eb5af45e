"""What processes with simulated GPUs run: programs and frameworks that make groups of torch.distributed."""

from __future__ import annotations

import importlib
import os
import types
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import dbsp_diffusers
from dbsp_diffusers.rank_program import process_group, use_local_device
from tests.gpu_node.faults import recorded
from tests.simulated.model_cases import (
    MASKS,
    apart,
    brief,
    brief_inputs,
    gradients_on_one_process,
    loss_of,
    moved,
    on_one_process,
)
from tests.support.models.tiny_pipelines import load
from tests.support.single_process import attach_single_process

VIDEO = {"height": 64, "width": 96, "num_frames": 5, "guidance_scale": 2.0}


def said_of_transfer(rank: int, world: int, what: str) -> str:
    """Returns what is said of a transfer that NCCL or gloo would not make; "" where it is made."""
    device = use_local_device()
    with process_group(device):
        gloo, mine = dist.new_group(backend="gloo"), torch.full((2,), float(rank), device=device)
        calls = {
            "right": lambda: dist.all_to_all_single(mine, mine.clone()),
            "host tensor to NCCL": lambda: dist.all_reduce(torch.ones(2)),
            "device tensor to gloo": lambda: dist.all_reduce(mine, group=gloo),
            "another rank's device": lambda: torch.ones(2, device=torch.device("cuda", 1 - rank)),
        }
        try:
            calls[what]()
        except RuntimeError as error:
            return str(error)
        recorded.clear()
        assert dist.get_backend() == "nccl"
        assert mine.cpu().tolist() == [0.0, 1.0], "each rank sends its number"
    return ""


def summed_gradients(rank: int, world: int, model: str, mask: str) -> float:
    """Returns how far `sum_gradients` leaves gradients from one process's, as a share of the largest."""
    expected = gradients_on_one_process(model, mask)
    device = use_local_device()
    with process_group(device):
        transformer = brief(model).train().to(device)
        dbsp_diffusers.enable(transformer, {"mask": MASKS[mask]})
        loss_of(transformer, moved(brief_inputs(model), device)).backward()
        dbsp_diffusers.sum_gradients(transformer)
        dbsp_diffusers.disable(transformer)
    found = {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return apart([found[name] for name in expected], list(expected.values())) / largest


def through_para_attn(rank: int, world: int, mask: str, ring: int) -> float:
    """Returns how far para-attn's own function and mesh, with attn="dbsp", are from one process."""
    from para_attn.context_parallel import init_context_parallel_mesh
    from para_attn.context_parallel.diffusers_adapters import parallelize_transformer

    import dbsp_para

    expected, _ = on_one_process("wan", mask)
    device = use_local_device()
    with process_group(device), torch.no_grad():
        transformer, inputs = brief("wan").to(device), moved(brief_inputs("wan"), device)
        mesh = init_context_parallel_mesh("cuda", max_ring_dim_size=ring)
        parallelize_transformer(transformer, mesh=mesh, attn="dbsp", config={"mask": MASKS[mask]})
        found = transformer(**inputs)[0]
        dbsp_para.unparallelize(transformer)
    return apart([found], expected)


def parallelized_pipe(rank: int, world: int, folder: str, module: str) -> float:
    """Returns how far latents are from one process's after a module's `parallelize_pipe(pipe, attn="dbsp")`."""
    import dbsp_para

    config, call = {"mask": MASKS["static"]}, VIDEO | {"num_inference_steps": 1, "max_sequence_length": 16}
    call |= {"prompt": "a red ball", "output_type": "latent"}

    def made(pipe: Any) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        latents: torch.Tensor = pipe(**call, generator=torch.Generator().manual_seed(3)).frames
        return latents

    alone = load("wan", folder)
    attach_single_process(alone.transformer, config)
    expected, device = made(alone), use_local_device()
    with process_group(device):
        parallelize_pipe = importlib.import_module(module).parallelize_pipe
        pipe = parallelize_pipe(load("wan", folder).to(device), attn="dbsp", config=config)
        found = made(pipe)
        dbsp_para.unparallelize(pipe)
    return apart([found], [expected])


def generated(rank: int, world: int, folder: str, config_file: str, video: str) -> tuple[float, int]:
    """Runs what `dbsp generate` runs in each rank.

    Returns how far its frames are from one process's, and the bytes of the video; of other ranks than the first 0.
    """
    import diffusers.utils

    from dbsp_cli.generate.ranks import RankInfo
    from dbsp_cli.generate.request import GenerationRequest, resolve
    from dbsp_cli.generate.videos import make_videos

    frames: list[Any] = []
    write = diffusers.utils.export_to_video

    def written(made: Any, *args: Any, **options: Any) -> Any:
        frames.append(made)
        return write(made, *args, **options)

    generation = resolve(GenerationRequest(config=config_file, out=video), RankInfo(rank, world, rank, world))
    with mock.patch.object(diffusers.utils, "export_to_video", written):
        make_videos(generation)
    assert not dist.is_initialized()
    if rank:
        return 0.0, 0
    pipe, wanted = load("wan", folder), generation.config.generate
    attach_single_process(pipe.transformer, {"mask": MASKS["static"]})
    noise = torch.Generator().manual_seed(wanted.seed or 0)
    size = VIDEO | {"negative_prompt": wanted.negative_prompt}
    expected = pipe(prompt=wanted.prompt, num_inference_steps=wanted.steps, generator=noise, **size).frames[0]
    return float(abs(frames[0] - expected).max()), os.path.getsize(video)


def attached_to_xfuser(rank: int, world: int, mask: str) -> float:
    """Returns how far xfuser's own Wan transformer with db-SP is from one process."""
    from dbsp_xdit import attach, detach
    from tests.xdit.xdit_cases import start_xfuser

    expected, _ = on_one_process("wan", mask)
    device = use_local_device()
    start_xfuser(rank, world)
    from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper

    stock = brief("wan")
    sizes = {name: value for name, value in stock.config.items() if not name.startswith("_")}
    wrapped = xFuserWanTransformer3DWrapper(**sizes, attention_kwargs={"thw": None}).eval()
    wrapped.load_state_dict(stock.state_dict())
    wrapped.to(device)
    pipe = types.SimpleNamespace(transformer=wrapped)
    attach(pipe, {"mask": MASKS[mask]})
    with torch.no_grad():
        found = wrapped(**moved(brief_inputs("wan"), device))[0]
    detach(pipe)
    return apart([found], expected)
