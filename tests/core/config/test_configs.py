"""configs/: every file loads, by path and by name, is for its model, and has blocks that fit its video; and the models
in the table, whose sizes are those of the paper, of diffusers and of the models' cards."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from dbsp_cli.generate.request import require_video
from dbsp_core import MaskFile
from dbsp_core.config import DEFAULT_ORIGIN, DbspConfig, default_config, require_same_model
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.models.signature import ModelSignature, token_grid
from dbsp_core.models.table import MODEL_SPECS, find_model_spec, published_model, signature_of_model
from dbsp_core.sources import MaskRequest
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.yaml_file import read_settings, shipped_configs
from tests.support import tiny_paro

FILES = {path.stem: path for path in sorted(shipped_configs().glob("*.yaml"))}
MODELS = ("wan2.1-t2v-14b", "wan2.1-t2v-1.3b", "cogvideox1.5-5b")
ANY_MODEL = {
    "minimax-h3-turbo-sla": (MaskRequest(0, 56, (37, 24, 42), 928), 89),
    "wan2.2-nvfp4-sparse": (MaskRequest(0, 40, (21, 45, 80)), 118),
    "hunyuanvideo1.5-ssta": (MaskRequest(0, 16, (31, 45, 80), 256), None),
}
"""Files that name no model: a request of its size, and the key blocks that LightX2V keeps of each row, if it does."""
DENSITY = {  # of all blocks: the tiny CogVideoX has more text, which is dense, than video
    "wan2.1-t2v-14b-window": 0.119,
    "wan2.1-t2v-1.3b-window": 0.165,
    "cogvideox1.5-5b-window": 0.114,
    "tiny-wan": 0.400,
    "tiny-wan-window": 0.128,
    "tiny-cogvideox": 0.819,
    "tiny-cogvideox-paro": 0.919,
    "tiny-wan-paro": 0.339,
    "tiny-cogvideox-window": 0.878,
}


def request_of(config: DbspConfig) -> MaskRequest:
    """Returns the request of a layer of the configuration's model, at its video size."""
    identity = signature_of_model(config.model)
    spec = find_model_spec(config.model)
    video = config.generate.filled(None if spec is None else spec.video)
    require_video(identity, with_images(video, identity))
    if spec is not None and spec.paper_thw is None:
        return MaskRequest(0, spec.heads, spec.thw, text_tokens=spec.text_tokens)
    thw = token_grid(video.num_frames, video.height, video.width, identity.sizes[3])
    text = 226 if identity.pipeline == "CogVideoXPipeline" else 0
    return MaskRequest(0, identity.sizes[1], thw, text_tokens=text)


def with_images(video: GenerateSettings, identity: ModelSignature) -> GenerateSettings:
    least, _ = identity.images
    return replace(video, **dict.fromkeys(("image", "last_image")[:least], "frame.png"))


@pytest.mark.parametrize("name", FILES)
def test_blocks_of_shipped_files_fit_the_video(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = DbspConfig.load(name)
    assert config.origin == str(FILES[name])
    assert DbspConfig.load(FILES[name]) == config == DbspConfig.load(f"{name}.yaml")
    request = ANY_MODEL[name][0] if name in ANY_MODEL else request_of(config)
    if name.endswith("-paro") and not name.startswith("tiny"):  # the user's own masks
        with pytest.raises(UserError, match=r"configs/masks/.*does not exist; .*dbsp masks convert"):
            config.mask.grid(request)
        return
    grid = config.mask.grid(request)
    assert grid.tokens == request.tokens
    if config.mask.changes == "per_call":
        assert min(grid.nq, grid.nk) > 4
        if ANY_MODEL.get(name, (None, None))[1] is not None:
            assert config.mask.limits(grid.nk, step=0) == (None, ANY_MODEL[name][1])
        return
    mask = config.mask.mask(replace(request, step=1))
    assert round(mask.density, 3) == DENSITY[name]
    if "window" in name:
        tile = config.mask.tile
        assert all(size % part == 0 for size, part in zip(request.thw, tile, strict=True)), "tiles divide the video"
        assert config.mask.block_q == config.mask.block_k == math.prod(tile), "a block is a tile"
        video = grid.q_axis.starts >= request.text_tokens
        assert (mask.counts.rows[:, video] == math.prod(config.mask.window) + (~video).sum()).all()


def test_shipped_file_is_rejected_for_other_models():
    for name in sorted(set(FILES) - set(ANY_MODEL)):
        settings = read_settings(FILES[name], "configuration file")
        config = DbspConfig.load(settings.changed(("mask",), {"source": "dense"}, "here"))  # masks need no file
        assert name.startswith(config.model)
        # models with the same sizes as others
        known = config.model.removesuffix("-trained").replace("distilled-i2v", "i2v-a14b")
        require_same_model(config, signature_of_model(known))
        other = "cogvideox1.5-5b" if known.startswith("wan") or known == "tiny-cogvideox" else "tiny-wan"
        if other != known:
            with pytest.raises(ValueError, match=f"is for {known}, the model is {other}"):
                require_same_model(config, signature_of_model(other))


def test_shipped_masks_are_those_of_their_program(tmp_path):
    tiny_paro.write(tmp_path)
    shipped = shipped_configs() / "masks"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in shipped.iterdir()}
    for path in tmp_path.iterdir():
        made, file = MaskFile(path), MaskFile(shipped / path.name)
        assert (made.groups, made.layers) == (file.groups, file.layers)
        for place in itertools.product(range(made.layers), range(len(made.groups))):
            assert made.layer(*place).grid == file.layer(*place).grid
            assert torch.equal(made.layer(*place).bits, file.layer(*place).bits)


def test_known_model_without_a_configuration_has_shipped_settings():
    for model in MODELS:
        for known in find_model_spec(model).names:
            config = default_config(signature_of_model(known))
            assert config == DbspConfig.load(f"{model}-{MODEL_SPECS[model].mask}")
    smaller = MODEL_SPECS["wan2.1-i2v-14b-480p"]  # has its checkpoint's weights in another repository
    assert default_config(smaller.signature, smaller) == DbspConfig.load("wan2.1-i2v-14b-subblock")
    for unknown in (None, signature_of_model("tiny-wan"), signature_of_model("cogvideox-5b")):
        config = default_config(unknown)
        assert (config, config.origin) == (DbspConfig(), DEFAULT_ORIGIN)


def test_token_grids_are_those_of_the_usual_video_but_for_the_papers():
    assert MODEL_SPECS["wan2.2-ti2v-5b"].thw == (31, 22, 40)  # 121 frames, tokens of 32 pixels
    assert MODEL_SPECS["cogvideox1.5-5b"].thw == (21, 51, 80)  # the paper's
    assert MODEL_SPECS["cogvideox-5b"].thw == (13, 30, 45)
    assert MODEL_SPECS["hunyuanvideo"].thw == (33, 45, 80)
    assert MODEL_SPECS["hunyuanvideo1.5"].thw == (31, 45, 80)
    assert MODEL_SPECS["ltx-2"].thw == (31, 34, 60)  # latents of 8 frames, tokens of 32 pixels
    for spec in MODEL_SPECS.values():
        require_video(spec.signature, with_images(spec.video, spec.signature))
        first = {"wan2.1-i2v-14b-480p": "wan2.1-i2v-14b", "wan2.2-distilled-i2v": "wan2.2-i2v-a14b"}
        assert published_model(spec.signature) is MODEL_SPECS[first.get(spec.name, spec.name)]
