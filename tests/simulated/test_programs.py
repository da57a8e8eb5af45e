"""Programs of several processes on simulated GPUs: training, the ranks of `dbsp generate`, and xDiT."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml

import dbsp_diffusers
from dbsp_diffusers.rank_program import process_group, use_local_device
from tests.gpu_node.processes import GpuProcesses
from tests.gpu_node.runtime import why_unavailable
from tests.simulated.model_cases import MASKS, backward, brief_inputs, gradients_on_one_process, moved, on_one_process
from tests.support.gradients import gradients_of
from tests.support.models.tiny_pipelines import load, small_wan
from tests.support.models.tiny_transformers import make_brief_transformer
from tests.support.outcomes import assert_near, outputs, said, share_apart
from tests.support.single_process import attach_single_process
from tests.xdit.xdit_cases import in_xfusers_class, start_xfuser

VIDEO = {"height": 64, "width": 96, "num_frames": 5, "guidance_scale": 2.0}


def transfers(rank: int, world: int) -> None:
    """Makes a transfer, and those that NCCL or gloo would not make."""
    device = use_local_device()
    with process_group(device):
        gloo, mine = dist.new_group(backend="gloo"), torch.full((2,), float(rank), device=device)
        dist.all_to_all_single(mine, mine.clone())
        assert dist.get_backend() == "nccl"
        assert mine.cpu().tolist() == [0.0, 1.0], "each rank sends its number"
        assert "CPU tensor given to NCCL" in said(lambda: dist.all_reduce(torch.ones(2)))
        assert "given to gloo" in said(lambda: dist.all_reduce(mine, group=gloo))
        other = torch.device("cuda", 1 - rank)
        assert "in a thread of the rank on" in said(lambda: torch.ones(2, device=other))


def summed_gradients(rank: int, world: int) -> None:
    expected = gradients_on_one_process("wan", "static")
    device = use_local_device()
    with process_group(device):
        transformer = make_brief_transformer("wan").train().to(device)
        dbsp_diffusers.enable(transformer, {"mask": MASKS["static"]})
        backward(transformer, moved(brief_inputs("wan"), device))
        dbsp_diffusers.sum_gradients(transformer)
        dbsp_diffusers.disable(transformer)
    found = gradients_of(transformer)
    assert share_apart([found[name] for name in expected], expected.values()) <= 1e-5


def generated(rank: int, world: int, folder: str, config_file: str, video: str) -> None:
    """Runs what `dbsp generate` runs in each rank, and compares its frames with one process's."""
    import diffusers.utils

    from dbsp_cli.generate.ranks import RankInfo
    from dbsp_cli.generate.request import GenerationRequest, resolve
    from dbsp_cli.generate.videos import make_videos

    generation = resolve(GenerationRequest(config=config_file, out=video), RankInfo(rank, world, rank, world))
    write = diffusers.utils.export_to_video
    with mock.patch.object(diffusers.utils, "export_to_video", side_effect=write) as written:
        make_videos(generation)
    assert not dist.is_initialized()
    if rank == 0:
        pipe, wanted = load("wan", folder), generation.config.generate
        attach_single_process(pipe.transformer, {"mask": MASKS["static"]})
        noise = torch.Generator().manual_seed(wanted.seed or 0)
        size = VIDEO | {"negative_prompt": wanted.negative_prompt}
        expected = pipe(prompt=wanted.prompt, num_inference_steps=wanted.steps, generator=noise, **size).frames[0]
        assert float(abs(written.call_args.args[0] - expected).max()) <= 1e-5
        assert os.path.getsize(video) > 1000


def attached_to_xfuser(rank: int, world: int) -> None:
    """Compares xfuser's own Wan transformer with one process."""
    from dbsp_xdit import attach, detach

    expected, dense = on_one_process("wan", "predicted")
    device = use_local_device()
    start_xfuser(rank, world)
    wrapped = in_xfusers_class("wan", make_brief_transformer("wan")).to(device)
    pipe = SimpleNamespace(transformer=wrapped)
    attach(pipe, {"mask": MASKS["predicted"]})
    with torch.no_grad():
        assert_near(outputs(wrapped, moved(brief_inputs("wan"), device)), expected, dense)
    detach(pipe)


@pytest.fixture(scope="module")
def ranks() -> Iterator[GpuProcesses]:
    """Starts two processes, each with a simulated GPU of its own."""
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    processes = GpuProcesses(2)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_wan(tmp_path_factory.mktemp("tiny") / "wan", num_layers=1, num_attention_heads=3)


def test_processes_reject_what_nccl_and_gloo_reject(ranks: GpuProcesses) -> None:
    ranks.run(transfers)


def test_gradients_are_summed_over_nccl(ranks: GpuProcesses) -> None:
    ranks.run(summed_gradients)


def test_ranks_of_dbsp_generate_make_the_video_of_one_process(
    ranks: GpuProcesses, folder: str, tmp_path: Path
) -> None:
    video = VIDEO | {"dtype": "float32", "prompt": "a red ball", "steps": 2, "seed": 3}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"model": folder, "generate": video, "mask": MASKS["static"]}))
    ranks.run(generated, folder, str(file), str(tmp_path / "ball.mp4"))


@pytest.mark.skipif(find_spec("xfuser") is None, reason="xfuser is not installed")
def test_xfusers_transformer_equals_one_process(ranks: GpuProcesses) -> None:
    ranks.run(attached_to_xfuser)
