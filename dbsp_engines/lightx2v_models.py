"""LightX2V models that do not pass layer, grid or scheduler to their attention.

Their `_seq_parallel_pre_process` runs once per pass on every rank, before the first block, and is wrapped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from dbsp_core.runtime.engine_session import EngineLayout, EngineSession
from dbsp_xdit.import_hook import Action

_Layout = Callable[[Any, Any], EngineLayout]
"""Returns a pass's layout, from the model and the result of its `_seq_parallel_pre_process`."""


@dataclass
class Pass:
    """A forward pass of one of these models."""

    model: Any
    layout: EngineLayout
    cfg_branch: int  # CFG pass within the step
    layers: int  # number of the model's attentions
    upcoming: Iterator[int]  # indices of the attentions that the pass calls, in order
    session: EngineSession | None = None  # the model's, once the pass has begun


running: ContextVar[Pass | None] = ContextVar("running", default=None)  # the current pass


def actions(attention: str) -> dict[str, Action]:
    """Returns the changes to make after importing each module of LightX2V, for models that name `attention`."""
    hooks: dict[str, Action] = {
        f"{_NETWORKS}.{module}": functools.partial(_hook, name, layout, attention)
        for module, (name, layout) in MODELS.items()
    }
    return hooks | {f"{_NETWORKS}.ltx2.infer.transformer_infer": functools.partial(_trim_video, attention)}


def _hook(name: str, layout: _Layout, attention: str, module: ModuleType) -> None:
    cls = getattr(module, name)
    pre_process = cls._seq_parallel_pre_process

    @functools.wraps(pre_process)
    def begin(model: Any, pre: Any) -> Any:
        pre = pre_process(model, pre)
        if model.config["parallel"].get("seq_p_attn_type") == attention:
            running.set(_pass_of(model, layout(model, pre)))
        return pre

    cls._seq_parallel_pre_process = begin
    if layout is _minimax_h3:
        _admit(cls, attention)


def _pass_of(model: Any, layout: EngineLayout) -> Pass:
    blocks = [getattr(model.transformer_weights, name, ()) for name in ("double_blocks", "single_blocks", "blocks")]
    layers, infer = sum(map(len, blocks)), model.transformer_infer
    # Besides guidance, LTX-2 has passes that skip some blocks' attention, and passes with video apart from audio.
    skipped = getattr(infer, "_mm_skip_video_self_blocks", ())
    branch = int(not model.scheduler.infer_condition)
    if getattr(infer, "_mm_skip_a2v", False):
        branch = 3
    elif skipped or getattr(infer, "_mm_skip_audio_self_blocks", ()):
        branch = 2
    return Pass(model, layout, branch, layers, iter([layer for layer in range(layers) if layer not in skipped]))


def _admit(cls: Any, attention: str) -> None:
    """Bypasses a check of MiniMax-H3's constructor, between these calls, that rejects attention except Ulysses."""
    before, after = cls._validate_tensor_parallel_config, cls._init_infer_class

    @functools.wraps(before)
    def hide(model: Any) -> None:
        before(model)
        if model.config.get("seq_parallel") and model.config["parallel"].get("seq_p_attn_type") == attention:
            model.dbsp_hides = True
            dict.__setitem__(model.config, "seq_parallel", False)  # also if LightX2V has locked its settings

    @functools.wraps(after)
    def restore(model: Any) -> None:
        if vars(model).pop("dbsp_hides", False):
            dict.__setitem__(model.config, "seq_parallel", True)
        after(model)

    cls._validate_tensor_parallel_config, cls._init_infer_class = hide, restore


def _trim_video(attention: str, module: ModuleType) -> None:
    """Removes padding from the video that LTX-2 gathers for audio, [tokens, C] and rotary [..., tokens, D]."""
    cls = module.LTX2TransformerInfer
    gather = cls._gather_cross_attn_context

    @functools.wraps(gather)
    def gather_real(infer: Any, context: torch.Tensor, k_pe: Any = None) -> tuple[torch.Tensor, Any]:
        context, k_pe = gather(infer, context, k_pe)
        current = running.get()
        if current is None or infer.config["parallel"].get("seq_p_attn_type") != attention:
            return context, k_pe
        tokens = current.layout.video.tokens
        return context[:tokens], k_pe and tuple(each.narrow(-2, 0, tokens) for each in k_pe)

    cls._gather_cross_attn_context = gather_real


def _hunyuan(model: Any, pre: Any) -> EngineLayout:
    return EngineLayout(tuple(pre.grid_sizes), text=pre.txt.shape[1], text_last=True)


def _qwen_image(model: Any, pre: Any) -> EngineLayout:
    """Input images follow the generated image."""
    ((grid, *others),) = model.scheduler.input_info.image_shapes
    return EngineLayout(tuple(grid), after=sum(map(math.prod, others)), text=len(pre.encoder_hidden_states))


def _flux2(model: Any, pre: Any) -> EngineLayout:
    """Input images follow the generated image; its size is read from its last position [T, H, W, L]."""
    _, height, width, _ = map(int, model.scheduler.latent_image_ids[0, -1].tolist())
    grid = 1, height + 1, width + 1
    return EngineLayout(grid, after=len(pre.img_ids) - math.prod(grid), text=len(pre.encoder_hidden_states))


def _z_image(model: Any, pre: Any) -> EngineLayout:
    """Image and text are each padded to a multiple of 32; padding is attended to."""
    height, width = (
        side // model.config.get("patch_size", 2) for side in model.scheduler.input_info.target_shape[-2:]
    )
    filling = -(height * width) % 32
    return EngineLayout((1, height, width), after=filling, text=len(pre.encoder_hidden_states), text_last=True)


def _longcat_image(model: Any, pre: Any) -> EngineLayout:
    height, width = (side // 2 for side in model.scheduler.input_info.target_shape[-2:])
    return EngineLayout((1, height, width), text=len(pre.encoder_hidden_states))


def _ltx2(model: Any, pre: Any) -> EngineLayout:
    """Keyframes and references follow the video; audio and text are separate."""
    scheduler = model.scheduler
    patch = scheduler.video_patchifier.patch_size
    grid = tuple(side // size for side, size in zip(scheduler.video_latent_shape_orig[1:], patch, strict=True))
    return EngineLayout(grid, after=model.original_video_seq_len - math.prod(grid))


def _minimax_h3(model: Any, pre: Any) -> EngineLayout:
    """[most of the text, replicated | rest of the text, conditions, audio, video in shards]."""
    scheduler, state = model.scheduler, pre.sequence_parallel_state
    sides = scheduler.num_latent_frames, scheduler.latent_height, scheduler.latent_width
    t, h, w = (side // size for side, size in zip(sides, model.config.get("patch_size", (1, 2, 2)), strict=True))
    before = len(state.timestep_indices) - state.aux_length - t * h * w
    return EngineLayout((t, h, w), before, text=state.aux_length)


_NETWORKS = "lightx2v.models.networks"
MODELS: dict[str, tuple[str, _Layout]] = {
    "hunyuan_video.model": ("HunyuanVideo15Model", _hunyuan),
    "qwen_image.model": ("QwenImageTransformerModel", _qwen_image),
    "flux2.model": ("_Flux2TransformerModelBase", _flux2),
    "z_image.model": ("ZImageTransformerModel", _z_image),
    "longcat_image.model": ("LongCatImageTransformerModel", _longcat_image),
    "ltx2.model": ("LTX2Model", _ltx2),
    "minimax_h3.model": ("MiniMaxH3Model", _minimax_h3),
}
"""Class and layout by module."""
