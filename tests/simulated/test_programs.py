"""Programs of several processes on simulated GPUs: the ranks of `dbsp generate`, xDiT and ParaAttention."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from dbsp_cli.tiny_models import make_tiny
from tests.gpu_node.processes import GpuProcesses
from tests.gpu_node.runtime import why_unavailable
from tests.simulated import program_cases
from tests.simulated.model_cases import MASKS
from tests.support.models.tiny_transformers import LATENTS, make_tiny_transformer
from tests.support.repository import child_environment
from tests.support.single_process import attach_single_process
from tests.xdit.xdit_cases import load_cogvideox

TOLERANCE = 1e-5
UNSUPPORTED = {
    "right": "",
    "host tensor to NCCL": "CPU tensor given to NCCL",
    "device tensor to gloo": "given to gloo",
    "another rank's device": "in a thread of the rank on",
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[GpuProcesses]:
    """Two processes, each with a simulated GPU of its own."""
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    processes = GpuProcesses(2)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = make_tiny("wan", tmp_path_factory.mktemp("tiny") / "wan")
    make_tiny_transformer("wan", num_layers=1, num_attention_heads=3, **LATENTS).save_pretrained(
        folder / "transformer"
    )
    return str(folder)


@pytest.fixture
def config_file(folder: str, tmp_path: Path) -> str:
    video = program_cases.VIDEO | {"dtype": "float32", "prompt": "a red ball", "steps": 2, "seed": 3}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"model": folder, "generate": video, "mask": MASKS["static"]}))
    return str(file)


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_processes_reject_what_nccl_and_gloo_reject(ranks: GpuProcesses, what: str) -> None:
    for said in ranks.run(program_cases.said_of_transfer, what):
        assert UNSUPPORTED[what] in said
        assert bool(said) == bool(UNSUPPORTED[what])


def test_gradients_are_summed_over_nccl(ranks: GpuProcesses) -> None:
    assert max(ranks.run(program_cases.summed_gradients, "wan", "static")) <= TOLERANCE


@pytest.mark.skipif(find_spec("para_attn") is None, reason="para-attn is not installed")
@pytest.mark.parametrize(("mask", "ring"), [("static", 1), ("predicted", 2)])
def test_para_attn_s_function_and_mesh_equal_one_process(ranks: GpuProcesses, mask: str, ring: int) -> None:
    assert max(ranks.run(program_cases.through_para_attn, mask, ring)) <= TOLERANCE


@pytest.mark.skipif(find_spec("para_attn") is None, reason="para-attn is not installed")
@pytest.mark.parametrize("module", ["dbsp_para", "para_attn.context_parallel.diffusers_adapters"])
def test_parallelized_pipe_equals_one_process(ranks: GpuProcesses, folder: str, module: str) -> None:
    assert max(ranks.run(program_cases.parallelized_pipe, folder, module)) <= TOLERANCE


def test_ranks_of_dbsp_generate_make_the_video_of_one_process(
    ranks: GpuProcesses, folder: str, config_file: str, tmp_path: Path
) -> None:
    (difference, size), _ = ranks.run(program_cases.generated, folder, config_file, str(tmp_path / "ball.mp4"))
    assert difference <= TOLERANCE
    assert size > 1000


@pytest.mark.skipif(find_spec("xfuser") is None, reason="xfuser is not installed")
@pytest.mark.parametrize("mask", ["static", "predicted"])
def test_xfusers_transformer_equals_one_process(ranks: GpuProcesses, mask: str) -> None:
    assert max(ranks.run(program_cases.attached_to_xfuser, mask)) <= TOLERANCE


@pytest.mark.long
def test_torchrun_starts_ranks_of_dbsp_generate_on_gpus(config_file: str, tmp_path: Path) -> None:
    video = tmp_path / "ball.mp4"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["tests.gpu_node.program", "dbsp_cli", "generate", "--config", config_file, "--out", str(video)]
    done = subprocess.run(command, env=child_environment(), cwd=tmp_path, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert video.stat().st_size > 1000
    assert "kernel triton" in done.stderr, "the ranks must have found their GPUs"


@pytest.mark.long
@pytest.mark.skipif(find_spec("xfuser") is None, reason="xfuser is not installed")
def test_ranks_of_the_unmodified_xdit_command_equal_one_process(tmp_path: Path) -> None:
    """What `xdit --sp-backend dbsp` starts on each GPU: xfuser's own runner."""
    tiny = str(make_tiny("cogvideox", tmp_path / "cogvideox"))
    mask = {"source": "window", "window": [2, 3, 3], "block_q": 16, "block_k": 16}
    settings = tmp_path / "settings.yaml"
    settings.write_text(
        yaml.safe_dump({"mask": mask, "generate": {"dtype": "float32"}, "report": str(tmp_path / "report")})
    )
    size = {"height": 80, "width": 112, "num_frames": 9, "num_inference_steps": 1, "guidance_scale": 2.0}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["tests.gpu_node.program", "xfuser.runner", "--model", tiny, "--prompt", "the sea at dusk"]
    command += [word for name, value in size.items() for word in (f"--{name}", str(value))]
    command += ["--sp-backend", "dbsp", "--ring_degree", "2"]
    command += ["--sp-config", str(settings), "--output_directory", str(tmp_path)]
    environment = child_environment() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "kernel triton" in done.stdout + done.stderr, "the ranks must have found their GPUs"
    pipe = load_cogvideox(tiny)
    attach_single_process(pipe.transformer, {"mask": mask})
    generator = torch.Generator().manual_seed(42)
    expected = pipe(prompt="the sea at dusk", generator=generator, output_type="latent", **size).frames
    latents = load_file(tmp_path / "report" / "latents.safetensors")["latents"]
    assert float((latents - expected).abs().max()) <= TOLERANCE
