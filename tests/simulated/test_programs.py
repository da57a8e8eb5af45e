"""Programs of several processes on simulated GPUs: the ranks of `dbsp generate`, xDiT and ParaAttention."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

import dbsp_diffusers
from dbsp_cli.tiny_models import make_tiny
from dbsp_diffusers.rank_program import process_group, use_local_device
from tests.gpu_node.processes import GpuProcesses
from tests.gpu_node.runtime import why_unavailable
from tests.simulated.model_cases import MASKS, backward, brief_inputs, gradients_on_one_process, moved, on_one_process
from tests.support.gradients import gradients_of
from tests.support.models.tiny_pipelines import alone, latents, load, small_wan
from tests.support.models.tiny_transformers import make_brief_transformer
from tests.support.outcomes import assert_near, outputs, said, share_apart
from tests.support.repository import child_environment
from tests.support.single_process import attach_single_process
from tests.xdit.xdit_cases import in_xfusers_class, load_cogvideox, start_xfuser

VIDEO = {"height": 64, "width": 96, "num_frames": 5, "guidance_scale": 2.0}


def transfer(rank: int, world: int, what: str) -> None:
    """Makes a transfer that NCCL or gloo would not make, but for the right one."""
    device = use_local_device()
    with process_group(device):
        gloo, mine = dist.new_group(backend="gloo"), torch.full((2,), float(rank), device=device)
        calls = {
            "right": lambda: dist.all_to_all_single(mine, mine.clone()),
            "host tensor to NCCL": lambda: dist.all_reduce(torch.ones(2)),
            "device tensor to gloo": lambda: dist.all_reduce(mine, group=gloo),
            "another rank's device": lambda: torch.ones(2, device=torch.device("cuda", 1 - rank)),
        }
        answer = said(calls[what])
        if what != "right":
            assert UNSUPPORTED[what] in answer
        else:
            assert answer == "nothing"
            assert dist.get_backend() == "nccl"
            assert mine.cpu().tolist() == [0.0, 1.0], "each rank sends its number"


def summed_gradients(rank: int, world: int, model: str, mask: str) -> None:
    expected = gradients_on_one_process(model, mask)
    device = use_local_device()
    with process_group(device):
        transformer = make_brief_transformer(model).train().to(device)
        dbsp_diffusers.enable(transformer, {"mask": MASKS[mask]})
        backward(transformer, moved(brief_inputs(model), device))
        dbsp_diffusers.sum_gradients(transformer)
        dbsp_diffusers.disable(transformer)
    found = gradients_of(transformer)
    assert share_apart([found[name] for name in expected], expected.values()) <= 1e-5


def parallelized_pipe(rank: int, world: int, folder: str, module: str) -> None:
    """Compares a module's `parallelize_pipe(pipe, attn="dbsp")` with one process; para-attn's has a mesh of GPUs."""
    from para_attn.context_parallel import init_context_parallel_mesh

    import dbsp_para

    config, size = {"mask": MASKS["static"]}, {"num_inference_steps": 1, "num_frames": 5}
    pipe = load("wan", folder)
    dense, expected, device = latents(pipe, **size), alone(pipe, config, **size), use_local_device()
    with process_group(device):
        mesh = None if module == "dbsp_para" else init_context_parallel_mesh("cuda", max_ring_dim_size=2)
        parallelize_pipe = importlib.import_module(module).parallelize_pipe
        pipe = parallelize_pipe(load("wan", folder).to(device), attn="dbsp", mesh=mesh, config=config)
        assert dbsp_para.session_of(pipe).strategy.ring == (1 if mesh is None else 2)
        assert_near(latents(pipe, **size), expected, dense)
        dbsp_para.unparallelize(pipe)


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


def attached_to_xfuser(rank: int, world: int, mask: str) -> None:
    """Compares xfuser's own Wan transformer with one process."""
    from dbsp_xdit import attach, detach

    expected, dense = on_one_process("wan", mask)
    device = use_local_device()
    start_xfuser(rank, world)
    wrapped = in_xfusers_class("wan", make_brief_transformer("wan")).to(device)
    pipe = SimpleNamespace(transformer=wrapped)
    attach(pipe, {"mask": MASKS[mask]})
    with torch.no_grad():
        assert_near(outputs(wrapped, moved(brief_inputs("wan"), device)), expected, dense)
    detach(pipe)


UNSUPPORTED = {
    "right": "",
    "host tensor to NCCL": "CPU tensor given to NCCL",
    "device tensor to gloo": "given to gloo",
    "another rank's device": "in a thread of the rank on",
}


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


@pytest.fixture
def config_file(folder: str, tmp_path: Path) -> str:
    video = VIDEO | {"dtype": "float32", "prompt": "a red ball", "steps": 2, "seed": 3}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"model": folder, "generate": video, "mask": MASKS["static"]}))
    return str(file)


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_processes_reject_what_nccl_and_gloo_reject(ranks: GpuProcesses, what: str) -> None:
    ranks.run(transfer, what)


def test_gradients_are_summed_over_nccl(ranks: GpuProcesses) -> None:
    ranks.run(summed_gradients, "wan", "static")


@pytest.mark.skipif(find_spec("para_attn") is None, reason="para-attn is not installed")
@pytest.mark.parametrize("module", ["dbsp_para", "para_attn.context_parallel.diffusers_adapters"])
def test_parallelized_pipe_equals_one_process(ranks: GpuProcesses, folder: str, module: str) -> None:
    ranks.run(parallelized_pipe, folder, module)


def test_ranks_of_dbsp_generate_make_the_video_of_one_process(
    ranks: GpuProcesses, folder: str, config_file: str, tmp_path: Path
) -> None:
    ranks.run(generated, folder, config_file, str(tmp_path / "ball.mp4"))


@pytest.mark.skipif(find_spec("xfuser") is None, reason="xfuser is not installed")
@pytest.mark.parametrize("mask", ["static", "predicted"])
def test_xfusers_transformer_equals_one_process(ranks: GpuProcesses, mask: str) -> None:
    ranks.run(attached_to_xfuser, mask)


def torchrun(folder: Path, *program: str) -> str:
    """Starts a program on two simulated GPUs, and returns what it wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    environment = child_environment() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command += ["tests.gpu_node.program", *program]
    done = subprocess.run(command, env=environment, cwd=folder, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "kernel triton" in done.stdout + done.stderr, "the ranks must have found their GPUs"
    return done.stdout + done.stderr


@pytest.mark.long
def test_torchrun_starts_ranks_of_dbsp_generate_on_gpus(config_file: str, tmp_path: Path) -> None:
    torchrun(tmp_path, "dbsp_cli", "generate", "--config", config_file, "--out", str(tmp_path / "ball.mp4"))
    assert (tmp_path / "ball.mp4").stat().st_size > 1000


@pytest.mark.long
@pytest.mark.skipif(find_spec("xfuser") is None, reason="xfuser is not installed")
def test_ranks_of_the_unmodified_xdit_command_equal_one_process(tmp_path: Path) -> None:
    """Runs what `xdit --sp-backend dbsp` starts on each GPU: xfuser's own runner."""
    tiny, report = str(make_tiny("cogvideox", tmp_path / "cogvideox")), tmp_path / "report"
    mask = {"source": "window", "window": [2, 3, 3], "block_q": 16, "block_k": 16}
    settings = {"mask": mask, "generate": {"dtype": "float32"}, "report": str(report)}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    size = {"height": 80, "width": 112, "num_frames": 9, "num_inference_steps": 1, "guidance_scale": 2.0}
    words = [word for name, value in size.items() for word in (f"--{name}", str(value))]
    words += ["--sp-backend", "dbsp", "--ring_degree", "2", "--sp-config", str(tmp_path / "settings.yaml")]
    words += ["--prompt", "the sea at dusk", "--output_directory", str(tmp_path)]
    torchrun(tmp_path, "xfuser.runner", "--model", tiny, *words)
    pipe = load_cogvideox(tiny)
    attach_single_process(pipe.transformer, {"mask": mask})
    expected = latents(pipe, seed=42, **size)
    assert_near(load_file(report / "latents.safetensors")["latents"], expected)
