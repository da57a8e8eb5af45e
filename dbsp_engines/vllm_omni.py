"""Attention backend DBSP of vLLM-Omni: each layer hands its rank's shard to the session of its transformer.

`dbsp_engines.vllm_omni_plugin` makes it known, and calls `attach` once a pipeline has been loaded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

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
from dbsp_core.utils.process import not_compiled
from dbsp_diffusers.models import TokenSequence, known_architecture
from dbsp_diffusers.patching import signature_of

_AGREEING_CACHES = ("none", "tea_cache", "sea_cache", "mag_cache", "cache_dit")
"""Values of `cache_backend`: by all ranks' tokens (tea, sea), by the step (mag), or polled (cache-dit)."""


class DbspTransformer:
    """One transformer: a hook begins each forward pass, and `DbspImpl` calls each layer's attention."""

    def __init__(self, module: torch.nn.Module, session: EngineSession) -> None:
        self._session = session
        self._architecture = known_architecture(module)
        self._tokens: Callable[[], TokenSequence] | None = None
        self._begun = False
        module.register_forward_pre_hook(self._pass, with_kwargs=True)

    @torch.compiler.disable
    def _pass(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._begun = False
        if self._architecture is not None:
            inputs = signature_of(module).bind(*args, **kwargs).arguments
            self._tokens = functools.partial(self._architecture.sequence, module, inputs)
        cache = vars(module).get("_context_manager")  # cache-dit's
        if cache is not None and "can_cache" not in vars(cache):
            cache.can_cache = functools.partial(self._all_can, cache.can_cache)

    @torch.compiler.disable
    def _all_can(self, can_cache: Callable[..., bool], *args: Any, **options: Any) -> bool:
        """Polls all ranks for cache-dit's decision, which looks at one rank's tokens: all skip a layer, or none."""
        return self._session.all_agree(can_cache(*args, **options))

    def attend(self, layer: int, qkv: QKV, metadata: AttentionMetadata, scale: float) -> torch.Tensor:
        """Computes attention of q, k and v [B, this rank's tokens, H, D]; see `DbspImpl.forward`."""
        if not self._begun:
            self._begin(metadata, qkv[0])
        text: QKV | None = None
        if metadata.joint_query is not None:
            text = metadata.joint_query, metadata.joint_key, metadata.joint_value
        return self._session.attend(layer, *qkv, scale=scale, text=text, gate=metadata.extra.get("gate_compress"))

    def _begin(self, metadata: AttentionMetadata, q: torch.Tensor) -> None:
        """Starts a pass at its first attention: where its tokens are is published, or read from its arguments."""
        layout, timestep = _published(metadata, q.shape[1]), None
        if layout is None and self._architecture is not None and self._tokens is not None:
            tokens, last = self._tokens(), self._architecture.text == "last"
            if metadata.joint_query is not None:
                last = metadata.joint_strategy == "rear"
            tokens.require_grid(self._session.session.config.mask)
            layout, timestep = _layout_of(tokens, last, q.shape[1], self._session.session.group.size), tokens.timestep
        if layout is None:
            raise UserError(
                "masks need the grid of this model's video tokens. It does not publish it (video_layout), and db-SP "
                "knows no class of diffusers of its name; use another attention backend"
            )
        context = get_forward_context()  # of one request, or, if they take turns, of one step
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


def _published(metadata: AttentionMetadata, shard: int) -> EngineLayout | None:
    """Returns what a model says of its sequence: [prefix | video | padding]; of several, only the target is video."""
    layout = metadata.video_layout or VideoTokenLayout()
    targets = [span for span in layout.video_spans if span.role == "target"]
    first = targets[-1].start if targets else layout.prefix_len or 0
    thw = targets[-1].latent_grid if targets else layout.latent_grid
    if thw is None:
        return None
    end, runs = first + math.prod(thw), metadata.extra.get("vsa_h3_prefix_segments", ())
    return EngineLayout(tuple(thw), first, (layout.used_len or end) - end, shard, runs=tuple(runs))


def _layout_of(tokens: TokenSequence, text_last: bool, shard: int, world: int) -> EngineLayout:
    """Returns the sequence of a pass's arguments: text is whole on every rank, or packed with the image.

    Raises UserError for a packed sequence with padding inside, or of another length than its ranks hold.
    """
    if tokens.packed is None:
        return EngineLayout(tokens.thw, text=tokens.text, text_last=text_last)
    length, video = tokens.packed_length or len(tokens.packed), tokens.packed[tokens.text :]
    in_order = int(tokens.packed.max()) < len(tokens.packed) and bool((video.diff() == 1).all())
    if shard != -(-length // world) or not in_order:
        raise UserError(
            f"{world} ranks of {shard} tokens do not hold this model's {length} in order; db-SP does not know how it "
            "packs image and text; use another attention backend"
        )
    first = int(video[0])
    return EngineLayout(tokens.thw, first, tokens.text - first, shard)


class DbspImpl(AttentionImpl[AttentionMetadata]):
    """The self-attention of one layer. Its communication is its own: see `attach`."""

    def __init__(self, num_heads: int, head_size: int, softmax_scale: float, prefix: str = "", **_: Any) -> None:
        self.scale, self.where = softmax_scale, prefix or "this attention"
        self.transformer: DbspTransformer | None = None
        self.layer = -1

    @not_compiled
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Computes attention of [B, this rank's tokens, H, D] with the last rank's padding, which no token attends to.

        Text that all ranks have (joint_query and so on) is attended over with them, and is in the output where
        joint_strategy says. Masks are not read: by contract they hide padding alone.
        """
        if self.transformer is None:
            raise UserError(f"{self.where}: vLLM-Omni has not loaded this transformer as part of a pipeline")
        metadata = attn_metadata or AttentionMetadata()
        return self.transformer.attend(self.layer, (query, key, value), metadata, self.scale)


class DbspBackend(AttentionBackend):
    """Backend as vLLM-Omni asks for it."""

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        return True  # of padding, which is never a key here

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
    """Gives the DBSP layers of a transformer one session. Collective where several ranks share the sequence.

    Their exchange of vLLM-Omni's own is switched off: a layer passes on its rank's shard as it is. Attention outside
    the model's repeated blocks, such as that of refiners, and what it calls outside the sharded sequence get
    vLLM-Omni's default backend.

    Args:
        transformer: As vLLM-Omni has sharded it.
        config: Its degrees and its step cache.
        clock: The counter of steps of all transformers of the pipeline.
        name: Of the transformer in its pipeline, by which it may have settings of its own.
    """
    names = getattr(transformer, "_layerwise_offload_blocks_attrs", None) or [""]
    in_blocks = {module for name in names for module in transformer.get_submodule(name).modules()}
    attentions = [module for module in transformer.modules() if isinstance(module, Attention)]
    layers = [module for module in attentions if isinstance(module.attention, DbspImpl)]
    for layer in [module for module in layers if module.skip_sequence_parallel or module not in in_blocks]:
        _give_back(layer)
        layers.remove(layer)
    if not layers:
        return
    for layer in layers:
        _require_supported(layer)
    parallel = config.parallel_config
    if getattr(parallel, "allgather_degree", 1) > 1:
        raise UserError("DBSP takes Ulysses × Ring, not AllGather-KV; set --allgather-degree 1 and --usp or --ring")
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
        layer.attention.transformer, layer.attention.layer = attached, index
        layer.skip_sequence_parallel = True  # by which vLLM-Omni knows attention that communicates itself


def _give_back(layer: Attention) -> None:
    """Gives a layer what it has where no backend is named."""
    layer.attn_backend, _ = get_attn_backend_for_role(layer.role, layer.head_size)
    names = ("num_heads", "head_size", "softmax_scale", "causal", "num_kv_heads", "qkv_layout", "prefix", "role")
    layer.attention = layer.attn_backend.get_impl_cls()(**{name: getattr(layer, name) for name in names})


def _require_supported(layer: Attention) -> None:
    reasons = {
        f"is {layer.role} attention": layer.role != "self",
        "is causal": layer.causal,
        "has fewer key than query heads": layer.num_kv_heads != layer.num_heads,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        problem = f"{layer.prefix or 'an attention'} {reason}, which DBSP does not support"
        raise UserError(f"{problem}; name DBSP in per_role.self.backend alone, or use another backend")
