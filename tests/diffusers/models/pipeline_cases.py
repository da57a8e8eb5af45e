"""Every model's own pipeline around a tiny transformer, and what the workers run with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import dbsp_diffusers
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.steps import StepClock
from dbsp_diffusers.sharding.generations import Generations
from tests.support.models.tiny_transformers import make_tiny_transformer
from tests.support.references import kept_from_rank_0
from tests.support.single_process import attach_single_process

BF16 = torch.bfloat16


class Stub(torch.nn.Module):
    """A stub of a part of a pipeline that is not used."""

    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype


class StubVae(Stub):
    """A stub of a VAE with what pipelines ask of it, instead of published weights."""

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
        spatial_compression_ratio=8,
        scale_factor_temporal=4,
        scale_factor_spatial=8,
    )
    latents_mean, latents_std = torch.zeros(4), torch.ones(4)

    def encode(self, video: torch.Tensor) -> Any:
        batch, _, *size = video.shape
        frames = [(size[0] - 1) // 4 + 1] if len(size) == 3 else []
        latents = torch.zeros(batch, 4, *frames, size[-2] // 8, size[-1] // 8, dtype=self.dtype)
        known = SimpleNamespace(sample=lambda generator=None: latents, mode=lambda: latents)
        return SimpleNamespace(latent_dist=known, latents=latents)

    def decode(self, latents: torch.Tensor, **options: Any) -> tuple[torch.Tensor]:
        frames, height, width = latents.shape[2:]
        size = 4 * (frames - 1) + 1, 8 * height, 8 * width
        return (torch.nn.functional.interpolate(latents[:, :3], size),)


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

    passes: of guidance, in a step;  settings: further ones of the transformer;  parts: further ones of the pipeline;
    around: what represents published parts while it is called;  output: its output_type
    """

    pipeline: str
    tiny: str
    scheduler: Callable[[], Any]
    passes: int
    call: Callable[[], dict[str, Any]]
    settings: dict[str, Any] | None = None
    parts: Callable[[torch.dtype], dict[str, Any]] = lambda dtype: {}
    around: Callable[[torch.dtype], AbstractContextManager[Any]] = nullcontext
    output: str = "latent"

    def arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """Of a call in a dtype."""
        return {name: _cast(value, dtype) for name, value in self.call().items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_cast(one, dtype) for one in value]
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


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


def _guider(dtype: torch.dtype) -> dict[str, Any]:
    from diffusers.guiders import ClassifierFreeGuidance

    return {"guider": ClassifierFreeGuidance(guidance_scale=6.0)}


def _wan() -> dict[str, Any]:
    return _video() | _guided({"prompt_embeds": noise(1, 9, 16)})


def _flux() -> dict[str, Any]:
    text = {"prompt_embeds": noise(1, 9, 32), "pooled_prompt_embeds": noise(1, 32)}
    return {"latents": noise(1, 16, 4), "height": 64, "width": 64} | text


def _flux_text() -> dict[str, torch.Tensor]:
    return {"prompt_embeds": noise(1, 9, 32), "pooled_prompt_embeds": noise(1, 32)}


def _kandinsky() -> dict[str, Any]:
    names = {"prompt_embeds_qwen": noise(1, 9, 16), "prompt_embeds_clip": noise(1, 12)}
    ends = {"prompt_cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)}
    return _guided(names | ends) | {"height": 128, "width": 128, "num_frames": 9}


class StubConnectors(Stub):
    """A stub of LTX-2's connectors, which make text of each kind from the text encoder's."""

    def forward(self, text: torch.Tensor, mask: torch.Tensor, **others: Any) -> tuple[torch.Tensor, ...]:
        return text, text.flip(1), mask


class StubAudioVae(StubVae):
    """A stub of LTX-2's VAE of sound."""

    mel_compression_ratio, temporal_compression_ratio = 4, 4
    config = SimpleNamespace(sample_rate=16000, mel_hop_length=160, mel_bins=16, latent_channels=2)
    latents_mean, latents_std = torch.zeros(8), torch.ones(8)


def _ltx2_parts(dtype: torch.dtype) -> dict[str, Any]:
    return {"connectors": StubConnectors(dtype), "audio_vae": StubAudioVae(dtype)}


def _ltx2() -> dict[str, Any]:
    """With all three kinds of guidance: by text (in one batch), spatio-temporal, and by each modality alone."""
    text = _guided({"prompt_embeds": noise(1, 9, 16), "prompt_attention_mask": ones(1, 9)})
    return text | {"height": 64, "width": 96, "num_frames": 9, "spatio_temporal_guidance_blocks": [1]}


_LTX2_SETTINGS = {"in_channels": 4, "out_channels": 4, "perturbed_attn": True, "cross_attn_mod": True}
_LTX2_SETTINGS |= {"audio_cross_attn_mod": True, "num_layers": 2}


def _qwen_text(tokens: int = 9) -> dict[str, torch.Tensor]:
    return _guided({"prompt_embeds": noise(1, tokens, 16), "prompt_embeds_mask": ones(1, tokens)})


def _small_images(module: str, *more: None) -> AbstractContextManager[Any]:
    """Edited images are brought to a megapixel, here to 64 × 48. more: results that the pipeline leaves aside"""
    function = f"diffusers.pipelines.qwenimage.{module}.calculate_dimensions"
    return mock.patch(function, return_value=(64, 48, *more))


def _text_encoder(dtype: torch.dtype) -> dict[str, Any]:
    return {"text_encoder": Stub(dtype)}


def _safety_checker(dtype: torch.dtype) -> dict[str, Any]:
    return {"safety_checker": Stub(dtype)}


def _edm() -> Any:
    from diffusers import EDMEulerScheduler

    return EDMEulerScheduler(sigma_min=0.002, sigma_max=80, sigma_data=0.5, sigma_schedule="karras")


def _flow_map() -> Any:
    from diffusers import FlowMapEulerDiscreteScheduler

    return FlowMapEulerDiscreteScheduler()


def _two_texts() -> dict[str, Any]:
    texts = {"prompt_embeds": noise(1, 10, 16), "prompt_embeds_mask": ones(1, 10)}
    return _guided(texts | {"prompt_embeds_2": noise(1, 6, 32), "prompt_embeds_mask_2": ones(1, 6)})


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
    Case("LTX2Pipeline", "ltx2", _dynamic, 3, _ltx2, _LTX2_SETTINGS, _ltx2_parts),
    Case(
        "LTX2ImageToVideoPipeline",
        "ltx2",
        _dynamic,
        3,
        lambda: _ltx2() | {"image": _image()},
        _LTX2_SETTINGS | {"rope_type": "split"},
        _ltx2_parts,
    ),
    Case(
        "QwenImageEditPipeline",
        "qwen-edit",
        _dynamic,
        2,
        lambda: _qwen_text() | {"image": _image(), "height": 64, "width": 64},
        around=lambda _: _small_images("pipeline_qwenimage_edit", None),
    ),
    Case(
        "QwenImageEditPlusPipeline",
        "qwen-edit",
        _dynamic,
        2,
        lambda: _qwen_text() | {"image": [_image(), _image()], "height": 64, "width": 64},
        around=lambda _: _small_images("pipeline_qwenimage_edit_plus"),
    ),
    Case(
        "QwenImageLayeredPipeline",
        "qwen-layered",
        _dynamic,
        2,
        lambda: _qwen_text() | {"image": _image(), "prompt": "a red ball", "layers": 2},
        None,
        _text_encoder,
        lambda _: _small_images("pipeline_qwenimage_layered"),
        "pt",
    ),
    Case(
        "CosmosTextToWorldPipeline",
        "cosmos",
        _edm,
        2,
        lambda: _video() | _guided({"prompt_embeds": noise(1, 9, 16)}),
        None,
        _safety_checker,
    ),
    Case(
        "Cosmos2_5_PredictBasePipeline",
        "cosmos2.5",
        _unipc,
        2,
        lambda: _video() | _guided({"prompt_embeds": noise(1, 9, 16)}),
        {"img_context_dim_in": None},
        _safety_checker,
    ),
    Case(
        "HunyuanImagePipeline",
        "hunyuan-image",
        lambda: _euler(shift=5.0),
        2,
        lambda: _two_texts() | {"height": 64, "width": 64},
        None,
        _guider,
    ),
    Case(
        "ZImagePipeline",
        "z-image",
        _dynamic,
        1,
        lambda: _guided({"prompt_embeds": [noise(9, 16)]}) | {"height": 64, "width": 64, "guidance_scale": 3.0},
    ),
    Case(
        "AnyFlowPipeline",
        "anyflow",
        _flow_map,
        1,
        lambda: _wan() | {"guidance_scale": 2.0},
    ),
    Case(
        "WanAnimatePipeline",
        "animate",
        _unipc,
        2,
        lambda: (
            _guided({"prompt_embeds": noise(1, 9, 16)})
            | {"image": _image(), "pose_video": _FRAMES[:5], "face_video": _FRAMES[:5], "guidance_scale": 2.0}
            | {"height": 64, "width": 64, "segment_frame_length": 5}
        ),
        {"image_dim": 20, "added_kv_proj_dim": 144, "inject_face_latents_blocks": 1},
    ),
    Case(
        "EasyAnimatePipeline",
        "easyanimate",
        _euler,
        1,
        lambda: _video() | _guided({"prompt_embeds": noise(1, 9, 16), "prompt_attention_mask": ones(1, 9)}),
        {"in_channels": 4, "text_embed_dim_t5": None},
    ),
    Case(
        "HunyuanVideoFramepackPipeline",
        "framepack",
        lambda: _euler(shift=7.0),
        1,
        lambda: (
            _hunyuan_text() | {"image": _image(), "height": 64, "width": 64, "num_frames": 9, "latent_window_size": 3}
        ),
        {"num_single_layers": 1, "image_proj_dim": 20},
    ),
    Case(
        "OvisImagePipeline",
        "ovis",
        _dynamic,
        2,
        lambda: _guided({"prompt_embeds": noise(1, 9, 32)}) | {"height": 64, "width": 64, "negative_prompt": None},
        {"num_single_layers": 1, "in_channels": 16, "out_channels": 16},
    ),
    Case(
        "LongCatImagePipeline",
        "longcat-image",
        _dynamic,
        2,
        lambda: ({"prompt": "a red ball", "height": 64, "width": 64, "enable_prompt_rewrite": False}),
        {"num_single_layers": 1, "in_channels": 64},
        around=lambda dtype: mock.patch(
            "diffusers.LongCatImagePipeline._encode_prompt", return_value=noise(1, 9, 32).to(dtype)
        ),
    ),
    Case(
        "Krea2Pipeline",
        "krea2",
        _dynamic,
        2,
        lambda: (
            _guided({"prompt_embeds": noise(1, 9, 3, 16), "prompt_embeds_mask": ones(1, 9).bool()})
            | {"height": 64, "width": 64}
        ),
        {"in_channels": 16},
    ),
    Case(
        "ErnieImagePipeline",
        "ernie-image",
        _euler,
        1,
        lambda: _guided({"prompt_embeds": [noise(9, 16)]}) | {"height": 64, "width": 64, "prompt": None},
    ),
    Case("Kandinsky5T2VPipeline", "kandinsky5", lambda: _euler(shift=5.0), 2, _kandinsky),
]
WITHOUT_PIPELINE = {
    "ConsisIDTransformer3DModel": "its pipeline needs OpenCV",
    "Flux3Transformer2DModel": "diffusers has blocks for it, and no pipeline",
    "MiniMaxH3Transformer3DModel": "diffusers has blocks for it, and no pipeline",
}

ONE_OF_EACH = {"num_single_layers": 1}
ONE_LAYER = {"vace": {"vace_layers": [0]}, **dict.fromkeys(("hunyuan", "flux", "flux2"), ONE_OF_EACH)}
"""Next to num_layers."""


_SELDOM = ("AnyFlow", "EasyAnimate", "Ernie", "Krea2", "LongCat", "LTX2Image", "Ovis", "QwenImageEditPlus")
_SELDOM += ("WanAnimate",)
"""How the names of pipelines begin that are like others, and run in the long part alone."""


def marked(case: Case) -> Any:
    """Returns a case as a parameter of a test."""
    return pytest.param(case, id=case.pipeline, marks=pytest.mark.long if case.pipeline.startswith(_SELDOM) else ())


def make_pipe(case: Case, dtype: torch.dtype = BF16, **settings: Any) -> Any:
    import diffusers

    cls = getattr(diffusers, case.pipeline)
    parts = dict.fromkeys(list(inspect.signature(cls.__init__).parameters)[1:])
    own = {name: value for name, value in parts.items() if name in ("text_encoder", "tokenizer")}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if name != "self" and parameter.default is inspect.Parameter.empty:
            own[name] = None
    settings = _layers(case.tiny, 1) | (case.settings or {}) | settings
    transformer = make_tiny_transformer(case.tiny, **settings).to(dtype)
    for part in transformer.modules():
        if type(part).__name__ in ("Kandinsky5TimeEmbeddings", "Kandinsky5Modulation"):
            part.float()  # as when it is loaded
    main = {"vae": StubVae(dtype), "transformer": transformer, "scheduler": case.scheduler()}
    pipe = cls(**own | main | case.parts(dtype))
    pipe.encode_image = lambda *_, **__: noise(1, 17, 20).to(dtype)  # an image encoder's, where the pipeline has one
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _layers(tiny: str, number: int) -> dict[str, Any]:
    """The setting of a tiny transformer's number of layers."""
    names = {"z-image": "n_layers", "kandinsky5": "num_visual_blocks"}
    return {names.get(tiny, "num_layers"): number} | ONE_LAYER.get(tiny, {})


def run_pipeline(
    rank: int, world: int, number: int, config: dict[str, Any], dtype: torch.dtype = torch.float32
) -> tuple[float, float]:
    """Two steps of a pipeline of `CASES`: (largest difference from one process, from dense attention)."""
    case = CASES[number]
    torch.manual_seed(0)
    pipe = make_pipe(case, dtype)

    def call() -> list[torch.Tensor]:
        torch.manual_seed(1)
        with case.around(dtype):
            arguments = case.arguments(dtype) | {"generator": torch.Generator().manual_seed(3)}
            made = pipe(num_inference_steps=2, output_type=case.output, return_dict=False, **arguments)
        flat = [one for part in made for one in (part if isinstance(part, list) else [part])]
        return [one for one in flat if isinstance(one, torch.Tensor)]

    def alone() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        dense = call()
        generations = Generations(pipe, SequenceGroup(0, 1))
        single = attach_single_process(pipe.transformer, config, generations.steps, StepClock(generations.progress))
        expected = call()
        single.detach()
        return dense, expected

    dense, expected = kept_from_rank_0((number, config, dtype), alone)
    dbsp_diffusers.enable(pipe, config)
    found = call()
    dbsp_diffusers.disable(pipe)

    def apart(ones: list[torch.Tensor]) -> float:
        return max(float((one - other).abs().max()) for one, other in zip(ones, expected, strict=True))

    return apart(found), apart(dense)
