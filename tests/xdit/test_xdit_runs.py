"""CogVideoX from the command line: the unmodified `xdit … --sp-backend dbsp`, to mp4 and report."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import imageio_ffmpeg
import pytest
import yaml
from safetensors.torch import load_file

from tests.support.models.tiny_pipelines import alone
from tests.support.ports import free_port
from tests.support.programs import run
from tests.xdit.xdit_cases import load_cogvideox

MASK = {"source": "synthetic", "density": 0.4, "block_q": 16, "block_k": 16}
SIZE = {"height": 80, "width": 112, "num_frames": 9, "num_inference_steps": 2, "guidance_scale": 2.0}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def expected(tiny):
    """Returns final latents of one process."""
    return alone(load_cogvideox(tiny), {"mask": MASK}, prompt="the sea at dusk", seed=42, **SIZE)


@pytest.mark.parametrize(
    "start",
    [run, pytest.param(subprocess.run, marks=pytest.mark.long)],  # torch must teach `xdit`, its torchrun and its ranks
    ids=["forked", "really started"],
)
def test_command_line_makes_the_video_of_one_process(tmp_path, tiny, expected, start):
    """Makes 5 rows of 7 tokens on 2 ranks."""
    settings = tmp_path / "dbsp.yaml"
    settings.write_text(yaml.safe_dump({"mask": MASK, "report": str(tmp_path / "report")}))
    line = [os.path.join(os.path.dirname(sys.executable), "xdit"), "--sp-backend", "dbsp", "--model", tiny]
    line += ["--prompt", "the sea at dusk", "--output_directory", str(tmp_path), "--sp-config", str(settings)]
    line += [word for name, value in SIZE.items() for word in (f"--{name}", str(value))]
    line += ["--ring_degree", "2", "--enable_tiling", "--enable_slicing", "--master_port", str(free_port())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = start(line, env={**os.environ, **ENVIRONMENT}, **pipes)
    assert done.returncode == 0, done.stderr[-3000:]
    latents = load_file(tmp_path / "report" / "latents.safetensors")["latents"]
    assert float((latents - expected).abs().max()) <= 1e-5
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["world_size"] == 2
    assert set(report["calls"]["layer"]) == {0, 1}
    (video,) = tmp_path.glob("cogvideox_*.mp4")
    reader = imageio_ffmpeg.read_frames(str(video))
    assert next(reader)["size"] == (112, 80)
    assert sum(1 for _ in reader) == 9
