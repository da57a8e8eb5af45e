"""Attention backend DBSP of vLLM-Omni: each layer passes its rank's shard to its transformer's session.

`dbsp_engines.vllm_omni_plugin` registers it, and calls `attach` after a pipeline has been loaded.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from vllm_omni.diffusion.attention.backends.abstract import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    VideoTokenLayout,
)
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.attention.selector import get_attn_backend_for_role
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import get_sp_group
from vllm_omni.diffusion.forward_context import get_forward_context

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.steps import StepClock
from dbsp_core.runtime.engine_session import QKV, EngineLayout, EngineSession, generation_of
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models import TokenSequence, known_architecture
from dbsp_diffusers.patching import signature_of

_AGREEING_CACHES = ("none", "tea_cache", "sea_cache", "mag_cache", "cache_dit")
"""Supported `cache_backend`s: decide by all ranks' tokens (tea, sea) or the step (mag), or are polled (cache-dit)."""
_numbers = itertools.count()
_transformers: WeakValueDictionary[int, DbspTransformer] = WeakValueDictionary()
"""Attached transformers by number; compiled graphs hold the number instead of the transformer."""


class DbspTransformer:
    """A transformer and its session: a hook begins each forward pass, and `DbspImpl` calls each layer's attention."""

    def __init__(self, module: torch.nn.Module, session: EngineSession) -> None:
        self.number = next(_numbers)
        _transformers[self.number] = self
        self._session = session
        self._architecture = known_architecture(module)
        self._tokens: Callable[[], TokenSequence] | None = None
        self._begun = False
        module.register_forward_pre_hook(self._pass, with_kwargs=True)

    @torch.compiler.disable
    def _pass(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._begun = False
        # vLLM-Omni keeps the padding of a request's first pass, but a second stage has other sizes.
        context = get_forward_context()
        context.sp_original_seq_len, context.sp_padding_size = None, 0
        if self._architecture is not None:
            inputs = signature_of(module).bind(*args, **kwargs).arguments
            self._tokens = functools.partial(self._architecture.sequence, module, inputs)
        cache = vars(module).get("_context_manager")  # cache-dit's
        if cache is not None and "can_cache" not in vars(cache):
            cache.can_cache = functools.partial(self._all_can, cache.can_cache)

    @torch.compiler.disable
    def _all_can(self, can_cache: Callable[..., bool], *args: Any, **options: Any) -> bool:
        """Polls all ranks for cache-dit's decision, which uses one rank's tokens, so that all skip a layer or none."""
        return self._session.all_agree(can_cache(*args, **options))

    def attend(
        self,
        layer: int,
        qkv: QKV,
        scale: float,
        text: QKV | None,
        text_last: bool,
        gate: torch.Tensor | None,
        published: EngineLayout | None,
    ) -> torch.Tensor:
        """Computes attention of q, k and v [B, this rank's tokens, H, D]; see `DbspImpl.forward`."""
        if not self._begun:
            self._begin(qkv[0], text is not None, text_last, published)
        return self._session.attend(layer, *qkv, scale=scale, text=text, gate=gate)

    def _begin(self, q: torch.Tensor, has_text: bool, text_last: bool, layout: EngineLayout | None) -> None:
        """Begins a pass at its first attention, with the published layout or one read from its arguments."""
        timestep = None
        if layout is None and self._architecture is not None and self._tokens is not None:
            tokens = self._tokens()
            tokens.require_grid(self._session.session.config.mask)
            last = text_last if has_text else self._architecture.text == "last"
            layout, timestep = _layout_of(tokens, last, q.shape[1], self._session.session.group.size), tokens.timestep
        if layout is None:
            raise UserError(
                "masks need the grid of video tokens, but this model does not publish it (video_layout) or have the "
                "name of a diffusers class that db-SP knows; use another attention backend"
            )
        context = get_forward_context()  # of one request, or of one step with step_execution
        takes_turns = getattr(context.omni_diffusion_config, "step_execution", False)
        self._session.begin(
            layout,
            q.device,
            step=context.denoise_step_idx,
            timestep=timestep,
            steps=getattr(context, "total_denoise_steps", None),
            generation=None if takes_turns else generation_of(context),
        )
        self._begun, self._tokens = True, None


def _published(metadata: AttentionMetadata) -> list[int]:
    """Returns a model's published layout [prefix | video | padding] as [t, h, w, tokens before, after, *runs].

    Empty if the model publishes none. Of several videos only the target counts as video.
    """
    layout = metadata.video_layout or VideoTokenLayout()
    targets = [span for span in layout.video_spans if span.role == "target"]
    first = targets[-1].start if targets else layout.prefix_len or 0
    thw = targets[-1].latent_grid if targets else layout.latent_grid
    if thw is None:
        return []
    end = first + math.prod(thw)
    return [*thw, first, (layout.used_len or end) - end, *metadata.extra.get("vsa_h3_prefix_segments", ())]


def _layout_of(tokens: TokenSequence, text_last: bool, shard: int, world: int) -> EngineLayout:
    """Returns the layout from a pass's arguments, with text replicated or packed with the image."""
    if tokens.packed is None:
        return EngineLayout(tokens.thw, text=tokens.text, text_last=text_last)
    length, video = tokens.packed_length or len(tokens.packed), tokens.packed[tokens.text :]
    in_order = int(tokens.packed.max()) < len(tokens.packed) and bool((video.diff() == 1).all())
    if shard != -(-length // world) or not in_order:
        raise UserError(
            f"{world} ranks of {shard} tokens do not hold this model's {length} in order: db-SP does not know how it "
            "packs image and text; use another attention backend"
        )
    first = int(video[0])
    return EngineLayout(tokens.thw, first, tokens.text - first, shard)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    text: list[torch.Tensor],
    gate: torch.Tensor | None,
    where: torch.Tensor,
    scale: float,
    text_last: bool,
    published: list[int],
) -> torch.Tensor:
    number, layer = where.tolist()
    transformer = _transformers.get(number)
    if transformer is None:
        raise UserError("vLLM-Omni has not loaded the transformer of this attention as part of a pipeline")
    layout = None
    if published:
        t, h, w, before, after, *runs = published
        layout = EngineLayout((t, h, w), before, after, q.shape[1], runs=tuple(runs))
    joint: QKV | None = (text[0], text[1], text[2]) if text else None
    out = transformer.attend(layer, (q, k, v), scale, joint, text_last, gate, layout)
    return out.contiguous()  # as compiled graphs expect


_attend_in_graph = torch.library.custom_op("dbsp::vllm_omni_attend", _attend, mutates_args=())
"""`_attend` for compiled blocks, without graph breaks. `where` is a CPU tensor, because a Python index would compile
one graph per layer."""


@_attend_in_graph.register_fake
def _shape_of_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text: Any, *_: Any) -> torch.Tensor:
    tokens = q.shape[1] + (text[0].shape[1] if text else 0)
    return q.new_empty(q.shape[0], tokens, *q.shape[2:])


class DbspImpl(AttentionImpl[AttentionMetadata]):
    """The self-attention of one layer, which communicates itself; see `attach`."""

    def __init__(self, num_heads: int, head_size: int, softmax_scale: float, prefix: str = "", **_: Any) -> None:
        self.scale = softmax_scale
        self.where = torch.tensor([-1, -1], device="cpu")  # int64[2]: index of the transformer and of the layer

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None, platform_key: str) -> bool:
        """Raises UserError for 8 and 4 bits, with db-SP's alternatives."""
        if kv_cache_dtype is None:
            return True
        raise UserError(
            f"diffusion_kv_cache_dtype {kv_cache_dtype} is for vLLM-Omni's own kernels; remove it, and set kernel: "
            "triton-int8 in db-SP's configuration for 8-bit attention, or precision: int8 for 8-bit communication"
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Computes attention of [B, this rank's tokens, H, D], including padding on the last rank.

        Replicated text (joint_query and so on) is joined, and placed in the output by joint_strategy. Masks are
        ignored: by contract they only hide padding.
        """
        metadata = attn_metadata or AttentionMetadata()
        text = []
        if metadata.joint_query is not None:
            text = [metadata.joint_query, metadata.joint_key, metadata.joint_value]
        attend = _attend_in_graph if torch.compiler.is_compiling() else _attend
        return attend(
            query,
            key,
            value,
            text,
            metadata.extra.get("gate_compress"),
            self.where,
            self.scale,
            metadata.joint_strategy == "rear",
            _published(metadata),
        )


class DbspBackend(AttentionBackend):
    """vLLM-Omni's interface of the backend."""

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        return True  # masks only hide padding, which is never a key here

    @classmethod
    def supports_packed_mask_free(cls) -> bool:
        return True

    @staticmethod
    def get_name() -> str:
        return "DBSP"

    @staticmethod
    def get_impl_cls() -> type[DbspImpl]:
        return DbspImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> None:
        return None

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return []  # any


def attach(
    transformer: torch.nn.Module, config: OmniDiffusionConfig, clock: StepClock, name: str = "transformer"
) -> None:
    """Gives the DBSP layers of a transformer one session. Collective if several ranks share the sequence.

    Disables vLLM-Omni's exchange in these layers. Attention outside the model's repeated blocks (such as refiners) or
    outside the sharded sequence gets vLLM-Omni's default backend. `clock` is that of all transformers of the pipeline,
    where this one is called `name`.
    """
    blocks = getattr(transformer, "_layerwise_offload_blocks_attrs", None) or [""]
    in_blocks = {module for block in blocks for module in transformer.get_submodule(block).modules()}
    attentions = [module for module in transformer.modules() if isinstance(module, Attention)]
    layers = [module for module in attentions if isinstance(module.attention, DbspImpl)]
    for layer in list(layers):
        kind = getattr(layer, "ltx_sp_mode", "video_self")  # of LTX-2's attentions
        if layer in in_blocks and not layer.skip_sequence_parallel and kind == "video_self":
            continue
        layer.attn_backend, _ = get_attn_backend_for_role(layer.role, layer.head_size)
        names = ("num_heads", "head_size", "softmax_scale", "causal", "num_kv_heads", "qkv_layout", "prefix", "role")
        layer.attention = layer.attn_backend.get_impl_cls()(**{name: getattr(layer, name) for name in names})
        layers.remove(layer)
        if kind == "video_to_audio":
            layer.register_forward_pre_hook(_hide_padding)
    if not layers:
        return
    for layer in layers:
        _require_supported(layer)
    parallel = config.parallel_config
    if getattr(parallel, "allgather_degree", 1) > 1:
        raise UserError("DBSP does not support AllGather-KV; set --allgather-degree 1, and use --usp or --ring")
    world = parallel.sequence_parallel_size or 1
    if world > 1 and (config.cache_backend or "none") not in _AGREEING_CACHES:
        raise UserError(
            f"db-SP does not know whether cache_backend {config.cache_backend} skips the same layers on all ranks; "
            f"set it to one of {', '.join(_AGREEING_CACHES)}, or name another attention backend"
        )
    group = SequenceGroup.from_group(get_sp_group().device_group) if world > 1 else SequenceGroup(0, 1)
    strategy = Strategy(parallel.ulysses_degree or 1, parallel.ring_degree or 1)
    session = EngineSession(group, strategy, layers[0].num_heads, len(layers), clock=clock, transformer=name)
    attached = DbspTransformer(transformer, session)
    for index, layer in enumerate(layers):
        layer.attention.where = torch.tensor([attached.number, index], device="cpu")
        layer.skip_sequence_parallel = True  # marks attention that communicates itself


def _hide_padding(layer: Attention, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Masks padded keys [B, tokens, H, D] of LTX-2's video, to which audio attends with vLLM-Omni's attention."""
    context = get_forward_context()
    if not context.sp_padding_size:
        return None
    tokens = context.sp_original_seq_len
    real = torch.arange(tokens + context.sp_padding_size, device=args[1].device) < tokens
    return *args[:3], AttentionMetadata(attn_mask=real[None, None, None])


def _require_supported(layer: Attention) -> None:
    reasons = {
        f"is {layer.role} attention": layer.role != "self",
        "is causal": layer.causal,
        "has fewer key than query heads": layer.num_kv_heads != layer.num_heads,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        problem = f"{layer.prefix or 'an attention'} {reason}, which DBSP does not support"
        raise UserError(f"{problem}; name DBSP in per_role.self.backend alone, or use another backend")
