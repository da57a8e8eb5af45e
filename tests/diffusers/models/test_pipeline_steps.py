"""Denoising steps and guidance passes of every model's own pipeline, as diffusers calls it in its published dtype.

Pipelines cast timesteps to their latents' dtype; of bfloat16's 8 bits, neighbours are equal. Steps must not be told
from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dbsp_diffusers
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.runtime.session.observer import SessionObserver
from dbsp_diffusers.models import ARCHITECTURES
from dbsp_diffusers.sharding.generations import LEFT_OUT, Generations
from tests.support.models.tiny_transformers import TINY, make_tiny_transformer

BF16 = torch.bfloat16


class StubVae(torch.nn.Module):
    """What pipelines ask of their VAE, which has nothing to say here. Stands for published weights."""

    dtype, device = BF16, torch.device("cpu")
    temporal_compression_ratio, spatial_compression_ratio, temperal_downsample = 4, 8, (False, True, True)
    config = SimpleNamespace(
        latent_channels=4,
        z_dim=4,
        scaling_factor=1.0,
        shift_factor=0.0,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        block_out_channels=(1, 1, 1, 1),
        temporal_compression_ratio=4,
        scale_factor_temporal=4,
        scale_factor_spatial=8,
        spatial_compression_ratio=8,
    )

    def encode(self, video: torch.Tensor) -> Any:
        batch, _, *size = video.shape
        frames = [(size[0] - 1) // 4 + 1] if len(size) == 3 else []
        return SimpleNamespace(latents=torch.zeros(batch, 4, *frames, size[-2] // 8, size[-1] // 8, dtype=BF16))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=BF16)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.long)


def _image() -> Any:
    from PIL import Image

    return Image.new("RGB", (64, 64))


def _euler(**settings: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**settings)


def _unipc() -> Any:
    from diffusers import UniPCMultistepScheduler

    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 5.0}
    return UniPCMultistepScheduler(**flow)


def _ddim() -> Any:
    from diffusers import CogVideoXDDIMScheduler

    return CogVideoXDDIMScheduler()


def _dynamic() -> Any:
    return _euler(shift=3.0, use_dynamic_shifting=True)


def _guided(text: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return text | {f"negative_{name}": value for name, value in text.items()}


@dataclass(frozen=True)
class Case:
    """A pipeline's class in diffusers, the tiny transformer in it, its scheduler, and how it is called.

    passes: of guidance, in a step;  settings: further ones of the transformer;  parts: further ones of the pipeline
    """

    pipeline: str
    tiny: str
    scheduler: Callable[[], Any]
    passes: int
    call: Callable[[], dict[str, Any]]
    settings: dict[str, Any] | None = None
    parts: Callable[[], dict[str, Any]] = dict


def _video(channels: int = 4) -> dict[str, Any]:
    return {"latents": noise(1, channels, 3, 8, 8), "height": 64, "width": 64, "num_frames": 9}


def _hunyuan_text(tokens: int = 13) -> dict[str, torch.Tensor]:
    return {
        "prompt_embeds": noise(1, tokens, 16),
        "pooled_prompt_embeds": noise(1, 8),
        "prompt_attention_mask": ones(1, tokens),
    }


def _hunyuan_15() -> dict[str, Any]:
    text = {"prompt_embeds": noise(1, 10, 16), "prompt_embeds_2": noise(1, 6, 32)}
    masks = {"prompt_embeds_mask": ones(1, 10), "prompt_embeds_mask_2": ones(1, 6)}
    return _video() | _guided(text | masks)


def _guider() -> dict[str, Any]:
    from diffusers.guiders import ClassifierFreeGuidance

    return {"guider": ClassifierFreeGuidance(guidance_scale=6.0)}


def _wan() -> dict[str, Any]:
    return _video() | _guided({"prompt_embeds": noise(1, 9, 16)})


def _flux() -> dict[str, Any]:
    text = {"prompt_embeds": noise(1, 9, 32), "pooled_prompt_embeds": noise(1, 32)}
    return {"latents": noise(1, 16, 4), "height": 64, "width": 64} | text


def _kandinsky() -> dict[str, Any]:
    names = {"prompt_embeds_qwen": noise(1, 9, 16), "prompt_embeds_clip": noise(1, 12)}
    ends = {"prompt_cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)}
    return _guided(names | ends) | {"height": 128, "width": 128, "num_frames": 9}


_FRAMES = [_image() for _ in range(9)]
_PAIR = {"in_channels": 9, "image_condition_type": "latent_concat", "guidance_embeds": False}
CASES = [
    Case("WanPipeline", "wan", _unipc, 2, _wan),
    Case("WanVACEPipeline", "vace", _unipc, 2, lambda: _wan() | {"video": _FRAMES}, {"vace_in_channels": 72}),
    Case("SkyReelsV2Pipeline", "skyreels", _unipc, 2, _wan),
    Case(
        "ChronoEditPipeline",
        "chronoedit",
        _unipc,
        2,
        lambda: _wan() | {"image": _image(), "latents": noise(1, 4, 2, 8, 8)},
        {"in_channels": 12, "image_dim": 20, "added_kv_proj_dim": 144},
    ),
    Case(
        "CogVideoXPipeline",
        "cogvideox",
        _ddim,
        1,
        lambda: (
            _guided({"prompt_embeds": noise(1, 32, 16)})
            | {"latents": noise(1, 4, 4, 16, 16), "height": 128, "width": 128, "num_frames": 13}
        ),
        {"attention_head_dim": 32},  # rotary tables need a multiple of 16
    ),
    Case("HunyuanVideoPipeline", "hunyuan", lambda: _euler(shift=7.0), 1, lambda: _video() | _hunyuan_text()),
    Case(
        "HunyuanVideoImageToVideoPipeline",
        "hunyuan",
        lambda: _euler(shift=7.0),
        2,
        lambda: _video() | _guided(_hunyuan_text()) | {"image": _image(), "true_cfg_scale": 6.0},
        _PAIR,
    ),
    Case("HunyuanVideo15Pipeline", "hunyuan1.5", lambda: _euler(shift=9.0), 2, _hunyuan_15, None, _guider),
    Case(
        "LTXPipeline",
        "ltx",
        _dynamic,
        1,
        lambda: (
            _guided({"prompt_embeds": noise(1, 9, 16), "prompt_attention_mask": ones(1, 9)})
            | {"latents": noise(1, 48, 8), "height": 32, "width": 32, "num_frames": 9}
        ),
    ),
    Case("FluxPipeline", "flux", _dynamic, 1, _flux),
    Case(
        "FluxKontextPipeline",
        "flux",
        _dynamic,
        2,
        lambda: _guided(_flux_text()) | {"true_cfg_scale": 2.0, "height": 64, "width": 64, "max_area": 64 * 64},
    ),
    Case(
        "Flux2Pipeline",
        "flux2",
        _dynamic,
        1,
        lambda: {"prompt_embeds": noise(1, 9, 32), "latents": noise(1, 4, 4, 4), "height": 64, "width": 64},
    ),
    Case(
        "QwenImagePipeline",
        "qwen",
        _dynamic,
        2,
        lambda: (
            _guided({"prompt_embeds": noise(1, 9, 16), "prompt_embeds_mask": ones(1, 9)})
            | {"latents": noise(1, 16, 16), "height": 64, "width": 64}
        ),
    ),
    Case("Kandinsky5T2VPipeline", "kandinsky5-nabla", lambda: _euler(shift=5.0), 2, _kandinsky),
]
_WITHOUT_PIPELINE = {"MiniMaxH3Transformer3DModel": "diffusers has blocks for it, and no pipeline"}


def _flux_text() -> dict[str, torch.Tensor]:
    return {"prompt_embeds": noise(1, 9, 32), "pooled_prompt_embeds": noise(1, 32)}


_ONE_OF_EACH = {"num_single_layers": 1}
ONE_LAYER = {"vace": {"vace_layers": [0]}, **dict.fromkeys(("hunyuan", "flux", "flux2"), _ONE_OF_EACH)}
"""Beside num_layers."""


class Moments(SessionObserver):
    """(step, guidance pass) of each forward pass."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def begin(self, step: Any, *others: Any) -> None:
        self.seen.append((step.step, step.cfg_branch))


def make_pipe(case: Case) -> Any:
    import inspect

    import diffusers

    cls = getattr(diffusers, case.pipeline)
    parts = dict.fromkeys(list(inspect.signature(cls.__init__).parameters)[1:])
    own = {name: value for name, value in parts.items() if name in ("text_encoder", "tokenizer")}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if name != "self" and parameter.default is inspect.Parameter.empty:
            own[name] = None
    layers = "num_visual_blocks" if case.tiny.startswith("kandinsky") else "num_layers"
    settings = {layers: 1} | ONE_LAYER.get(case.tiny, {}) | (case.settings or {})
    transformer = make_tiny_transformer(case.tiny, **settings).to(BF16)
    if case.tiny.startswith("kandinsky"):  # whose timestep's embeddings stay in float32, as when it is loaded
        for part in transformer.modules():
            if type(part).__name__ in ("Kandinsky5TimeEmbeddings", "Kandinsky5Modulation"):
                part.float()
    pipe = cls(**own | {"vae": StubVae(), "transformer": transformer, "scheduler": case.scheduler()} | case.parts())
    pipe.encode_image = lambda *_: noise(1, 17, 20)  # stands for an image encoder, where the pipeline has one
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.pipeline)
def test_steps_and_passes_of_a_pipeline_in_bfloat16(case):
    torch.manual_seed(0)
    pipe, ends = make_pipe(case), {"first_steps": 3, "last_steps": 4}
    config = {"mask": {"source": "window", "block_q": 16, "block_k": 16}, "dense_schedule": ends}
    session = dbsp_diffusers.enable(pipe, config)
    dense: list[bool] = []
    moments = Moments()
    session.observers = [*session.observers, moments]
    provider = session._mask_provider
    moments.mask_used = lambda layer, key: dense.append(provider._is_dense(layer)) if layer == 0 else None
    for steps in (50, 9):  # a second call begins anew
        moments.seen.clear()
        dense.clear()
        pipe(num_inference_steps=steps, output_type="latent", **case.call())
        assert moments.seen == [(step, branch) for step in range(steps) for branch in range(case.passes)]
        assert dense == [step < 3 or step >= steps - 4 for step, _ in moments.seen]


def test_the_pipelines_whose_loops_leave_out_the_last_step_are_known():
    import diffusers

    families = ("chronoedit", "cogvideo", "flux", "flux2", "hunyuan_video", "hunyuan_video1_5", "kandinsky5", "ltx")
    others = ("qwenimage", "skyreels_v2", "wan")
    folders = [Path(diffusers.__file__).parent / "pipelines" / name for name in (*families, *others)]
    files = [path for folder in folders for path in folder.glob("pipeline_*.py")]
    assert len(files) > 40
    sources = [path.read_text() for path in files]
    left_out = [source for source in sources if "timesteps[:-1]" in source]
    assert {name for source in left_out for name in re.findall(r"class (\w+Pipeline)\(", source)} == set(LEFT_OUT)


def test_their_steps_are_counted_without_it():
    pipe = type("LTXI2VLongMultiPromptPipeline", (), {"scheduler": _euler()})()  # stands for the pipeline
    pipe.scheduler.set_timesteps(8)
    assert Generations(pipe, SequenceGroup(0, 1)).steps() == 7


def test_every_known_class_has_a_pipeline_here():
    covered = {TINY[case.tiny].cls for case in CASES}
    assert covered | set(_WITHOUT_PIPELINE) == set(ARCHITECTURES)
