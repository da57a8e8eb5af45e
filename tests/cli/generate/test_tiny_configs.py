"""Every configuration for a tiny model that ships makes a video, as `dbsp generate --host para` makes it in a rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dbsp_cli.generate.job import GenerateRequest, resolve
from dbsp_cli.tiny_models import make_tiny
from dbsp_core import BlockMask, save_mask
from dbsp_core.config import DbspConfig
from dbsp_core.sources import DenseSource, MaskRequest
from dbsp_core.utils.yaml_file import Settings, read_settings, shipped_configs

pytest.importorskip("diffusers")

FILES = {path.stem: path for path in sorted(shipped_configs().glob("tiny-*.yaml"))}
TOKENS = {"tiny-wan": ((9, 7, 13), 12, 0), "tiny-cogvideox": ((3, 6, 10), 6, 226)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """In a process group of this process alone, the folder of tiny checkpoints, which are made at first use."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield tmp_path_factory.mktemp("checkpoints")
    dist.destroy_process_group()


def checkpoint(folder: Path, model: str) -> str:
    made = folder / model
    return str(made if made.exists() else make_tiny(model.removeprefix("tiny-"), made))


def save_masks_of_the_users(settings: Settings, file: Path) -> Settings:
    """Masks of the right size, which are the user's to supply."""
    thw, heads, text = TOKENS[settings.values["model"]]
    grid = DenseSource(block_q=64, block_k=64).grid(MaskRequest(0, heads, thw, text_tokens=text))
    bits = torch.rand(heads, grid.nq, grid.nk, generator=torch.Generator().manual_seed(0)) < 0.5
    save_mask(file, BlockMask(bits, grid))
    return settings.changed(("mask", "path"), str(file), "here")


@pytest.mark.parametrize("name", FILES)
def test_it_makes_a_video(tmp_path, checkpoints, name):
    from dbsp_para.generate import generate

    settings = read_settings(FILES[name], "configuration file")
    changes = []
    if settings.values["mask"]["source"] == "paro":
        settings = save_masks_of_the_users(settings, tmp_path / "masks.safetensors")
        changes = [f"mask.path={tmp_path / 'masks.safetensors'}"]
    request = GenerateRequest(
        config=name, prompt="a red ball", host="para", nproc=1, out=tmp_path / "ball.mp4", changes=changes
    )
    assert resolve(request).tiny == settings.values["model"].removeprefix("tiny-")
    settings = settings.changed(("model",), checkpoint(checkpoints, settings.values["model"]), "here")
    for key, value in {"prompt": "a red ball", "steps": 1}.items():
        settings = settings.changed(("generate", key), value, "here")
    generate(DbspConfig.load(settings), tmp_path / "ball.mp4")
    assert (tmp_path / "ball.mp4").stat().st_size > 1000
