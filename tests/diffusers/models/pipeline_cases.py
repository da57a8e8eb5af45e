"""Every model's own pipeline around a tiny transformer."""

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
from torch.utils._pytree import tree_map_only

from tests.support.models.tiny_transformers import make_tiny_transformer

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


def _scheduler(name: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        import diffusers

        return getattr(diffusers, name)(**settings)

    return make


def _euler(**settings: Any) -> Callable[[], Any]:
    return _scheduler("FlowMatchEulerDiscreteScheduler", **settings)


_UNIPC = _scheduler("UniPCMultistepScheduler", prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
_DDIM, _FLOW_MAP = _scheduler("CogVideoXDDIMScheduler"), _scheduler("FlowMapEulerDiscreteScheduler")
_DYNAMIC = _euler(shift=3.0, use_dynamic_shifting=True)
_EDM = _scheduler("EDMEulerScheduler", sigma_min=0.002, sigma_max=80, sigma_data=0.5, sigma_schedule="karras")


def _guided(text: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return text | {f"negative_{name}": value for name, value in text.items()}


@dataclass(frozen=True)
class Case:
    """A pipeline's class in diffusers, the tiny transformer in it, and its scheduler.

    passes: of guidance, in a step;  settings: further ones of the transformer;  parts: further ones of the pipeline;
    around: what represents published parts while it is called;  output: its output_type
    """

    pipeline: str
    tiny: str
    scheduler: Callable[[], Any]
    passes: int
    settings: dict[str, Any] | None = None
    parts: Callable[[torch.dtype], dict[str, Any]] = lambda dtype: {}
    around: Callable[[torch.dtype], AbstractContextManager[Any]] = nullcontext
    output: str = "latent"

    def arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the arguments of a call in a dtype."""
        cast: dict[str, Any] = tree_map_only(
            torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, CALLS[self.pipeline]()
        )
        return cast


_SQUARE = {"height": 64, "width": 64}


def _video() -> dict[str, Any]:
    return {"latents": noise(1, 4, 3, 8, 8), "num_frames": 9, **_SQUARE}


def _text(width: int = 16) -> dict[str, torch.Tensor]:
    return _guided({"prompt_embeds": noise(1, 9, width)})


def _masked_text(name: str = "prompt_attention_mask") -> dict[str, torch.Tensor]:
    return _guided({"prompt_embeds": noise(1, 9, 16), name: ones(1, 9)})


def _two_texts() -> dict[str, Any]:
    texts = {"prompt_embeds": noise(1, 10, 16), "prompt_embeds_mask": ones(1, 10)}
    return _guided(texts | {"prompt_embeds_2": noise(1, 6, 32), "prompt_embeds_mask_2": ones(1, 6)})


def _hunyuan_text() -> dict[str, torch.Tensor]:
    masked = {"prompt_embeds": noise(1, 13, 16), "prompt_attention_mask": ones(1, 13)}
    return masked | {"pooled_prompt_embeds": noise(1, 8)}


def _guider(dtype: torch.dtype) -> dict[str, Any]:
    from diffusers.guiders import ClassifierFreeGuidance

    return {"guider": ClassifierFreeGuidance(guidance_scale=6.0)}


def _wan() -> dict[str, Any]:
    return _video() | _text()


def _flux_text() -> dict[str, torch.Tensor]:
    return {"prompt_embeds": noise(1, 9, 32), "pooled_prompt_embeds": noise(1, 32)}


def _kandinsky() -> dict[str, Any]:
    names = {"prompt_embeds_qwen": noise(1, 9, 16), "prompt_embeds_clip": noise(1, 12)}
    ends = {"prompt_cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)}
    return _guided(names | ends) | {"height": 128, "width": 128, "num_frames": 9}


def _animate() -> dict[str, Any]:
    videos = {"image": _image(), "pose_video": _FRAMES[:5], "face_video": _FRAMES[:5]}
    return _text() | videos | _SQUARE | {"segment_frame_length": 5, "guidance_scale": 2.0}


def _cogvideox() -> dict[str, Any]:
    size = {"latents": noise(1, 4, 4, 16, 16), "height": 128, "width": 128, "num_frames": 13}
    return _guided({"prompt_embeds": noise(1, 32, 16)}) | size


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
    """Returns arguments for guidance of all three kinds: by text (in one batch), spatio-temporal, by modality."""
    size = {"height": 64, "width": 96, "num_frames": 9}
    return _masked_text() | size | {"spatio_temporal_guidance_blocks": [1]}


_LTX2_SETTINGS = {"in_channels": 4, "out_channels": 4, "perturbed_attn": True, "cross_attn_mod": True}
_LTX2_SETTINGS |= {"audio_cross_attn_mod": True, "num_layers": 2}


def _qwen() -> dict[str, Any]:
    return _masked_text("prompt_embeds_mask")


def _krea() -> dict[str, Any]:
    text = {"prompt_embeds": noise(1, 9, 3, 16), "prompt_embeds_mask": ones(1, 9).bool()}
    return _guided(text) | _SQUARE


def _small_images(module: str, *more: None) -> Callable[[torch.dtype], AbstractContextManager[Any]]:
    """Brings images, which become a megapixel, to 64 × 48. more: results that the pipeline leaves aside"""
    function = f"diffusers.pipelines.qwenimage.pipeline_qwenimage_{module}.calculate_dimensions"
    return lambda _: mock.patch(function, return_value=(64, 48, *more))


def _encoded(dtype: torch.dtype) -> AbstractContextManager[Any]:
    return mock.patch("diffusers.LongCatImagePipeline._encode_prompt", return_value=noise(1, 9, 32).to(dtype))


def _part(name: str) -> Callable[[torch.dtype], dict[str, Any]]:
    return lambda dtype: {name: Stub(dtype)}


_FRAMES = [_image() for _ in range(9)]
_FRAMEPACK = {"num_frames": 9, "latent_window_size": 3}
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "WanPipeline": _wan,
    "WanVACEPipeline": lambda: _wan() | {"video": _FRAMES},
    "SkyReelsV2Pipeline": _wan,
    "ChronoEditPipeline": lambda: _wan() | {"image": _image(), "latents": noise(1, 4, 2, 8, 8)},
    "CogVideoXPipeline": _cogvideox,
    "HunyuanVideoPipeline": lambda: _video() | _hunyuan_text(),
    "HunyuanVideo15Pipeline": lambda: _video() | _two_texts(),
    "LTXPipeline": lambda: _masked_text() | {"latents": noise(1, 48, 8), "num_frames": 9, "height": 32, "width": 32},
    "FluxPipeline": lambda: _flux_text() | {"latents": noise(1, 16, 4), **_SQUARE},
    "FluxKontextPipeline": lambda: _guided(_flux_text()) | {"true_cfg_scale": 2.0, "max_area": 64 * 64, **_SQUARE},
    "Flux2Pipeline": lambda: {"prompt_embeds": noise(1, 9, 32), "latents": noise(1, 4, 4, 4), **_SQUARE},
    "QwenImagePipeline": lambda: _qwen() | {"latents": noise(1, 16, 16), **_SQUARE},
    "LTX2Pipeline": _ltx2,
    "QwenImageEditPipeline": lambda: _qwen() | {"image": _image(), **_SQUARE},
    "QwenImageLayeredPipeline": lambda: _qwen() | {"image": _image(), "prompt": "a red ball", "layers": 2},
    "CosmosTextToWorldPipeline": _wan,
    "HunyuanImagePipeline": lambda: _two_texts() | _SQUARE,
    "ZImagePipeline": lambda: _guided({"prompt_embeds": [noise(9, 16)]}) | {"guidance_scale": 3.0, **_SQUARE},
    "AnyFlowPipeline": lambda: _wan() | {"guidance_scale": 2.0},
    "WanAnimatePipeline": _animate,
    "EasyAnimatePipeline": lambda: _video() | _masked_text(),
    "HunyuanVideoFramepackPipeline": lambda: _hunyuan_text() | {"image": _image(), **_SQUARE, **_FRAMEPACK},
    "OvisImagePipeline": lambda: _text(32) | {"negative_prompt": None, **_SQUARE},
    "LongCatImagePipeline": lambda: {"prompt": "a red ball", "enable_prompt_rewrite": False, **_SQUARE},
    "Krea2Pipeline": _krea,
    "ErnieImagePipeline": lambda: _guided({"prompt_embeds": [noise(9, 16)]}) | {"prompt": None, **_SQUARE},
    "Kandinsky5T2VPipeline": _kandinsky,
}
"""By a pipeline's class, the arguments of a call."""

_OF_AN_IMAGE = {"image_dim": 20, "added_kv_proj_dim": 144}
_ONE_SINGLE = {"num_single_layers": 1}
_CHECKED = {"parts": _part("safety_checker")}
_LAYERED = {"parts": _part("text_encoder"), "around": _small_images("layered"), "output": "pt"}
CASES = [
    Case("WanPipeline", "wan", _UNIPC, 2),
    Case("WanVACEPipeline", "vace", _UNIPC, 2, {"vace_in_channels": 72}),
    Case("SkyReelsV2Pipeline", "skyreels", _UNIPC, 2),
    Case("ChronoEditPipeline", "chronoedit", _UNIPC, 2, {"in_channels": 12, **_OF_AN_IMAGE}),
    # rotary tables need a multiple of 16
    Case("CogVideoXPipeline", "cogvideox", _DDIM, 1, {"attention_head_dim": 32}),
    Case("HunyuanVideoPipeline", "hunyuan", _euler(shift=7.0), 1),
    Case("HunyuanVideo15Pipeline", "hunyuan1.5", _euler(shift=9.0), 2, parts=_guider),
    Case("LTXPipeline", "ltx", _DYNAMIC, 1),
    Case("FluxPipeline", "flux", _DYNAMIC, 1),
    Case("FluxKontextPipeline", "flux", _DYNAMIC, 2),
    Case("Flux2Pipeline", "flux2", _DYNAMIC, 1),
    Case("QwenImagePipeline", "qwen", _DYNAMIC, 2),
    Case("LTX2Pipeline", "ltx2", _DYNAMIC, 3, _LTX2_SETTINGS, _ltx2_parts),
    Case("QwenImageEditPipeline", "qwen-edit", _DYNAMIC, 2, around=_small_images("edit", None)),
    Case("QwenImageLayeredPipeline", "qwen-layered", _DYNAMIC, 2, **_LAYERED),
    Case("CosmosTextToWorldPipeline", "cosmos", _EDM, 2, **_CHECKED),
    Case("HunyuanImagePipeline", "hunyuan-image", _euler(shift=5.0), 2, parts=_guider),
    Case("ZImagePipeline", "z-image", _DYNAMIC, 1),
    Case("AnyFlowPipeline", "anyflow", _FLOW_MAP, 1),
    Case("WanAnimatePipeline", "animate", _UNIPC, 2, {"inject_face_latents_blocks": 1, **_OF_AN_IMAGE}),
    Case("EasyAnimatePipeline", "easyanimate", _euler(), 1, {"in_channels": 4, "text_embed_dim_t5": None}),
    Case("HunyuanVideoFramepackPipeline", "framepack", _euler(shift=7.0), 1, {"image_proj_dim": 20, **_ONE_SINGLE}),
    Case("OvisImagePipeline", "ovis", _DYNAMIC, 2, {"in_channels": 16, "out_channels": 16, **_ONE_SINGLE}),
    Case("LongCatImagePipeline", "longcat-image", _DYNAMIC, 2, {"in_channels": 64, **_ONE_SINGLE}, around=_encoded),
    Case("Krea2Pipeline", "krea2", _DYNAMIC, 2, {"in_channels": 16}),
    Case("ErnieImagePipeline", "ernie-image", _euler(), 1),
    Case("Kandinsky5T2VPipeline", "kandinsky5", _euler(shift=5.0), 2),
]
WITHOUT_PIPELINE = {
    "ConsisIDTransformer3DModel": "its pipeline needs OpenCV",
    "Flux3Transformer2DModel": "diffusers has blocks for it, and no pipeline",
    "Kandinsky6SRTransformer3DModel": "its pipeline calls it for tiles of pixels that its own VAE encodes",
    "MiniMaxH3Transformer3DModel": "diffusers has blocks for it, and no pipeline",
}

ONE_LAYER = {"vace": {"vace_layers": [0]}, **dict.fromkeys(("hunyuan", "flux", "flux2"), _ONE_SINGLE)}
"""Next to num_layers."""


_SELDOM = (
    *("AnyFlow", "ChronoEdit", "EasyAnimate", "Ernie", "Flux2", "FluxPipe", "HunyuanImage", "Krea2", "LongCat"),
    *("Ovis", "QwenImageEdit", "SkyReels", "WanAnimate"),
)
"""How the names of pipelines begin that are like others, and run in the long part alone."""


def marked(case: Case) -> Any:
    """Returns a case as a parameter of a test."""
    return pytest.param(case, id=case.pipeline, marks=pytest.mark.long if case.pipeline.startswith(_SELDOM) else ())


def make_pipe(case: Case, dtype: torch.dtype = BF16, **settings: Any) -> Any:
    import diffusers

    cls = getattr(diffusers, case.pipeline)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    empty = [
        part.name for part in parameters if part.default is part.empty or part.name in ("text_encoder", "tokenizer")
    ]
    own = dict.fromkeys(empty)
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
    """Returns the setting of a tiny transformer's number of layers."""
    names = {"z-image": "n_layers", "kandinsky5": "num_visual_blocks", "kandinsky5-nabla": "num_visual_blocks"}
    return {names.get(tiny, "num_layers"): number} | ONE_LAYER.get(tiny, {})


def made(pipe: Any, case: Case, dtype: torch.dtype, **more: Any) -> list[torch.Tensor]:
    """Returns what two steps of a case's pipeline give. more: further arguments of the call"""
    torch.manual_seed(1)
    with case.around(dtype):
        arguments = case.arguments(dtype) | {"generator": torch.Generator().manual_seed(3)} | more
        parts = pipe(num_inference_steps=2, output_type=case.output, return_dict=False, **arguments)
    flat = [one for part in parts for one in (part if isinstance(part, list) else [part])]
    return [one for one in flat if isinstance(one, torch.Tensor)]
