"""Hooks on SGLang Diffusion: the self-attention of a transformer hands this rank's shard to the transformer's session.

SGLang has a closed list of attention backends; what it has for third parties are hooks on functions that they name.
Each worker calls `register`, entry point `sglang.multimodal_gen.plugins`, and puts the hooks on itself, until it ends.
Where `attach` has put a `DbspImpl` as kernel, the hooked layers call it with their rank's tokens, instead of
exchanging them. What hooks need is imported when a hook runs: before, SGLang forbids it.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.steps import StepClock
from dbsp_core.runtime.engine_session import CONFIG_VARIABLE, QKV, EngineLayout, EngineSession, generation_of
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.expected_host import ExpectedHost
from dbsp_core.utils.process import not_compiled

_TEXT_IN_PARTS = {
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "QwenImageTransformer2DModel",
}
"""Transformers whose ranks may have a part of the text each, without saying where it is."""
_SESSION = "_dbsp_transformer"
"""Attribute of a transformer that has a session."""
_SUPPORTED = "db-SP supports SGLang's own transformers with one self-attention per block"
_INSTEAD = "unset DBSP_CONFIG to run this model without db-SP"
_WHOLE = "SGLang gave every rank the whole video; leave out --enable-sequence-shard false"


class _Now(NamedTuple):
    """A request of LTX-2, whose forward passes don't have it in their context, and its grid of tokens."""

    request: Any
    thw: tuple[int, int, int]


_now: ContextVar[_Now | None] = ContextVar("_now", default=None)


class DbspTransformer:
    """One transformer: its session, and the forward pass that its attentions belong to.

    A pass begins at its first attention, which is never part of a captured graph. So it also begins when SGLang
    replays the graphs of a pass.
    """

    def __init__(self, module: Any, session: EngineSession) -> None:
        self.module, self.session = module, session
        self.runs: tuple[int, ...] = ()
        self._moment: tuple[Any, ...] | None = None
        self._layer = -1

    def attend(
        self,
        layer: int,
        qkv: QKV,
        scale: float,
        layout_of: Callable[[Any, tuple[int, int, int], int], EngineLayout],
        text: QKV | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention of [B, this rank's tokens, H, D].

        Args:
            layout_of: Returns the layout, given the request, its grid of video tokens and the number of ranks.
        """
        from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context

        context, now = get_forward_context(), _now.get()
        request = context.forward_batch if now is None else now.request
        # 1. LTX-2's passes of a step have no names; the session counts them.
        negative = None if now is not None else getattr(request, "is_cfg_negative", None)
        branch, generation = None if negative is None else int(negative), generation_of(request)
        moment = generation, int(context.current_timestep), branch
        # 2. The layers of a pass ascend; those that a step cache skips call no attention.
        if layer <= self._layer or moment != self._moment:
            thw = _grid_of(self.module, request) if now is None else now.thw
            timesteps = getattr(request, "timesteps", None)
            self.session.begin(
                layout_of(request, thw, self.session.session.group.size),
                qkv[0].device,
                step=moment[1],
                cfg_branch=branch,
                steps=None if timesteps is None else len(timesteps),
                generation=generation,
            )
        self._moment, self._layer = moment, layer
        return self.session.attend(layer, *qkv, scale=scale, text=text, gate=gate)


@dataclass
class DbspImpl:
    """Kernel of one layer, once `attach` has put it there."""

    scale: float
    transformer: DbspTransformer
    layer: int

    @not_compiled
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        """Computes attention of [B, text and this rank's tokens, H, D], as USPAttention is called.

        Of a breakable CUDA graph it is an eager part.
        """
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph

        if not is_in_breakable_cuda_graph():
            return self._attend(q, k, v, **options)
        text = options.get("q_prefix")
        out = torch.empty_like(q if text is None else torch.cat([text, q], dim=1))
        _eager()(self, q, k, v, out=out, **options)
        return out

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        attn_mask: torch.Tensor | None = None,
        attn_mask_meta: Any = None,
        num_replicated_prefix: int = 0,
        num_replicated_suffix: int = 0,
        seq_lens: Sequence[int] | None = None,
        q_prefix: torch.Tensor | None = None,
        k_prefix: torch.Tensor | None = None,
        v_prefix: torch.Tensor | None = None,
        gate_compress: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        # 1. Text that every rank has whole, apart from this rank's tokens.
        sequence: QKV = q, k, v
        text: QKV | None = None
        if q_prefix is not None and k_prefix is not None and v_prefix is not None:
            text = q_prefix, k_prefix, v_prefix
        slots = num_replicated_prefix or num_replicated_suffix
        if slots and text is None:
            sizes = (slots, q.shape[1] - slots)
            parts = [tensor.split(sizes[:: -1 if num_replicated_suffix else 1], dim=1) for tensor in sequence]
            first, last = zip(*parts, strict=True)
            text, sequence = (last, first) if num_replicated_suffix else (first, last)
        # 2. What else is in it is not known.
        unknown = sorted(name for name, value in others.items() if value)
        unknown += ["keys of other tokens than its queries"] if k.shape[1] != q.shape[1] else []
        unknown += ["attn_mask"] if attn_mask is not None and text is None else []
        if unknown:
            raise UserError(f"{_name(self.transformer.module)} has attention with {', '.join(unknown)}; {_INSTEAD}")
        # 3. Its layout, which a pass's first attention asks for.
        meta = attn_mask_meta.resolve(attn_mask) if hasattr(attn_mask_meta, "resolve") else attn_mask_meta or {}
        layout_of = functools.partial(
            _layout_of,
            local=sequence[0].shape[1],
            whole=None if text is None else functools.partial(_text_length, text[0], attn_mask, meta),
            last=num_replicated_suffix > 0 or seq_lens is not None,
            lengths=tuple(seq_lens or ()),
            padding=meta.get("pad_end", 0) - meta.get("pad_start", 0) if attn_mask is None else 0,
            in_parts=any(parent.__name__ in _TEXT_IN_PARTS for parent in type(self.transformer.module).__mro__),
        )
        return self.transformer.attend(self.layer, sequence, self.scale, layout_of, text=text, gate=gate_compress)

    @not_compiled
    def forward_varlen(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        max_seqlen: int,
        gate_compress: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Computes attention of MiniMax-H3's packed sequence [this rank's tokens, H, D], of `max_seqlen` in all."""

        def layout_of(request: Any, thw: tuple[int, int, int], world: int) -> EngineLayout:
            before = max_seqlen - math.prod(thw)
            return EngineLayout(thw, before=before, shard=q.shape[0], runs=self.transformer.runs)

        gate = None if gate_compress is None else gate_compress.unsqueeze(0)
        qkv = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        return self.transformer.attend(self.layer, qkv, self.scale, layout_of, gate=gate).squeeze(0)


@functools.cache
def _eager() -> Callable[..., None]:
    """Returns the attention of a kernel as an eager part of a breakable CUDA graph, which writes into `out`."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import eager_on_graph

    def attend(kernel: DbspImpl, *qkv: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
        out.copy_(kernel._attend(*qkv, **options))

    return eager_on_graph(attend)


def _grid_of(model: Any, request: Any) -> tuple[int, int, int]:
    """Returns the grid of a request's tokens: of latents [B, C, T, H, W], or of an image's packed tokens [B, S, C].

    Raises UserError if the request does not say it.
    """
    shape: Sequence[int] = getattr(request, "raw_latent_shape", None) or ()
    if len(shape) == 5:
        patch = getattr(model, "arch", model).patch_size
        t, h, w = (n // p for n, p in zip(shape[2:], (patch,) * 3 if isinstance(patch, int) else patch, strict=True))
        return t, h, w
    for pixels in (8, 16, 32) if len(shape) == 3 else ():  # of a token's side
        h, w = int(request.height) // pixels, int(request.width) // pixels
        if h * w == shape[1]:
            return 1, h, w
    raise UserError(
        f"masks need the grid of video tokens, which this request of {_name(model)} doesn't say; {_INSTEAD}"
    )


def _text_length(text: torch.Tensor, mask: torch.Tensor | None, meta: dict[str, Any]) -> int:
    """Returns how many tokens of text [B, slots, H, D] a mask of text and image keeps.

    Raises UserError if that differs within a batch.
    """
    slots = text.shape[1]
    if mask is None:
        return slots
    batch, kept = len(mask), meta["indices"].shape[0] if "indices" in meta else int(mask.sum())
    if batch > 1 and not (mask == mask[:1]).all():
        raise UserError(
            "a batch has prompts of several lengths, which db-SP does not support; send one prompt at once"
        )
    return kept // batch - (mask.shape[1] - slots)


def _layout_of(
    request: Any,
    thw: tuple[int, int, int],
    world: int,
    *,
    local: int,
    whole: Callable[[], int] | None,
    last: bool,
    lengths: tuple[int, ...],
    padding: int,
    in_parts: bool,
) -> EngineLayout:
    """Returns the layout of a pass, in which each rank has a run of tokens, or of frames, and text.

    Args:
        local: Slots of this rank, without text that every rank has whole.
        whole: Returns the tokens of that text; None: there is none.
        last: True if text follows.
        lengths: Slots of all ranks, if they differ; each rank then has a part of the text.
        padding: Slots of the last rank that are padding of text, of which each rank has a part.
        in_parts: True if the transformer is one whose ranks may have a part of the text each.

    Raises:
        UserError: For slots that are not those of the video and its text.
    """
    # 1. Ranks have as many tokens each, or as many frames.
    tokens = math.prod(thw)
    even, frames = -(-tokens // world), -(-thw[0] // world) * (tokens // thw[0])
    shard = even if thw[0] == 1 or local == even else frames
    if world > 1 and local == tokens:
        raise UserError(_WHOLE)
    # 2. The others are a part of the text.
    shares = tuple(slots - shard for slots in lengths or ((local,) * world if local != shard else ()))
    if padding and shares:
        shares = (*shares[:-1], shares[-1] - padding)
    is_cut = getattr(request, "did_sp_shard_latents", False)
    is_edit = not lengths and getattr(request, "image_latent", None) is not None
    has_parts = in_parts and whole is None and world > 1 and is_cut and not is_edit
    is_cut_in_space = thw[0] == 1 and is_cut and len(request.raw_latent_shape) == 5
    if (shares and not has_parts) or is_cut_in_space or min(shares, default=0) < 0:
        raise UserError(
            f"SGLang gave one of {world} ranks {local} tokens, of {tokens} video tokens {thw} and text; db-SP doesn't "
            f"know how it shards this request; {_INSTEAD}"
        )
    text = sum(shares) if whole is None else whole()
    return EngineLayout(thw, shard=shard, text=text, text_last=last, text_shares=shares)


def _make_attention(original: Callable[..., None], attention: Any, *args: Any, **options: Any) -> None:
    """Wraps USPAttention.__init__, which rejects a ring with a kernel that returns no LSE: db-SP's may replace it."""
    try:
        original(attention, *args, **options)
    except RuntimeError as error:
        original(attention, *args, **options | {"skip_sequence_parallel": True})
        attention.skip_sequence_parallel, attention._dbsp_problem = False, error


def _attend(original: Callable[..., Any], attention: Any, *args: Any, **options: Any) -> Any:
    """Wraps USPAttention.forward and UlyssesAttention_VSA.forward."""
    kernel = attention.attn_impl
    return kernel.attend(*args, **options) if isinstance(kernel, DbspImpl) else original(attention, *args, **options)


def _attend_ltx2(original: Callable[..., Any], module: Any, *args: Any, **options: Any) -> Any:
    """Wraps LTX2Attention.forward: db-SP's layout has the padding that masks hide, and its ranks exchange keys."""
    if isinstance(module.attn.attn_impl, DbspImpl):
        if options.pop("context_replicated_prefix_len", 0):
            raise UserError(f"this LTX-2 has a memory of earlier frames, which db-SP does not support; {_INSTEAD}")
        options |= {"mask": None, "gather_context_kv_for_sp": False}
    return original(module, *args, **options)


def _attend_packed(original: Callable[..., torch.Tensor], attention: Any, *args: Any, **options: Any) -> torch.Tensor:
    """Wraps MiniMax-H3's function that exchanges and attends: attention with db-SP's kernel exchanges nothing."""
    if isinstance(attention._attention_impl, DbspImpl):
        options |= {"ulysses_active": False, "ring_active": False}
    return original(attention, *args, **options)


def _note_runs(original: Callable[..., Any], *, model: Any, packed: Any, **options: Any) -> Any:
    """Wraps what MiniMax-H3 prepares for VSA of a request: tokens of each kind before the video."""
    from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3.stages import denoising

    transformer: DbspTransformer | None = getattr(model, _SESSION, None)
    if transformer is not None:
        text, audio, target = (int(packed[name].numel()) for name in ("text_pos", "audio_pos", "img_pos"))
        transformer.runs = (text, target - int(packed["update_mask"].sum()), audio)
        if options["is_ref2va"]:
            segments = denoising._ref2va_vsa_segments(packed, options["latent_shape"], model.arch.patch_size)
            transformer.runs = tuple(n if isinstance(n, int) else math.prod(n) for n in segments[:-1])
    return original(model=model, packed=packed, **options)


def _denoise_ltx2(original: Callable[..., None], stage: Any, ctx: Any, step: Any, batch: Any, *args: Any) -> None:
    """Wraps a step of LTX-2, which may have two stages: its forward passes get the request, and this stage's grid."""
    h, w = ctx.latent_height, ctx.latent_width
    token = _now.set(_Now(batch, (int(batch.raw_latent_shape[1]) // (h * w), h, w)))
    try:
        original(stage, ctx, step, batch, *args)
    finally:
        _now.reset(token)


def _compute_together(original: Callable[..., bool], model: Any, **options: Any) -> bool:
    """Wraps TeaCache's decision, by a rank's own timesteps: all ranks skip a pass, or none. Collective."""
    from sglang.multimodal_gen.runtime.distributed.parallel_state import get_tp_group

    computes, transformer = original(model, **options), getattr(model, _SESSION, None)
    if transformer is None:
        return computes
    skips = transformer.session.all_agree(not computes)
    if get_tp_group().world_size > 1:  # a session is of one tensor-parallel rank's sequence
        group = SequenceGroup.from_group(get_tp_group().device_group)
        skips = all(vote for (vote,) in group.gather_integers([skips]))
    return not skips


def _attach_pipeline(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Wraps build_pipeline, which each worker calls once: a session for each of its transformers. Collective.

    Raises:
        UserError: On all ranks, for a transformer that is not supported, which SGLang would run dense.
    """
    from sglang.multimodal_gen.runtime.disaggregation.roles import RoleType
    from sglang.multimodal_gen.runtime.loader.component_loaders.transformer_loader import TransformerLoader
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    pipeline = original(*args, **options)
    kinds = tuple(TransformerLoader.component_names)
    transformers = {name: module for name, module in pipeline.modules.items() if name.startswith(kinds)}
    role = getattr(get_global_server_args(), "disagg_role", RoleType.MONOLITHIC)
    if not transformers and role in (RoleType.MONOLITHIC, RoleType.DENOISER):
        raise UserError(f"{_SUPPORTED}, and this is {type(pipeline).__name__}; {_INSTEAD}")
    clock = StepClock(shared=len(transformers) > 1)
    for name, transformer in transformers.items():
        attach(transformer, name, clock)
    for part in filter(lambda part: isinstance(part, torch.nn.Module), pipeline.modules.values()):
        for layer in part.modules():
            if hasattr(layer, "_dbsp_problem") and not isinstance(layer.attn_impl, DbspImpl):
                raise layer._dbsp_problem
    return pipeline


def attach(module: Any, name: str = "transformer", clock: StepClock | None = None) -> None:
    """Gives a transformer its session. Collective. Raises UserError, on all ranks, for one that is not supported.

    Args:
        module: As SGLang has loaded it.
        name: Of the transformer in its pipeline, by which it may have settings of its own.
        clock: The count of steps of all transformers of the pipeline; None: there is one.
    """
    from sglang.multimodal_gen.runtime.distributed.parallel_state import (
        get_ring_parallel_world_size,
        get_sp_group,
        get_tp_group,
        get_ulysses_parallel_world_size,
    )
    from sglang.multimodal_gen.runtime.models.dits.minimax_h3 import MiniMaxH3DiTModel
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    # 1. Its attentions, and what db-SP does not go with.
    settings, is_h3 = get_global_server_args(), isinstance(module, MiniMaxH3DiTModel)
    layers = _attentions_of_h3(module) if is_h3 else _attentions_of(module)
    if getattr(settings, "kv_gather_degree", 1) > 1 and not getattr(settings, "sp_split_auto", False):
        raise UserError("db-SP takes Ulysses × ring, not K/V gathering; set --ulysses-degree, not --kv-gather-degree")
    # 2. The session, of the ranks that share a sequence. Tensor parallelism gives all of them the same heads.
    strategy = Strategy(get_ulysses_parallel_world_size(), get_ring_parallel_world_size())
    ranks = get_sp_group()
    group = SequenceGroup.from_group(ranks.device_group) if ranks.world_size > 1 else SequenceGroup(0, 1)
    heads, head_slice = layers[0].num_heads, None
    if get_tp_group().world_size > 1:
        all_heads = getattr(module, "num_attention_heads", None) or module.config.num_attention_heads
        head_slice = None if heads == all_heads else (get_tp_group().rank_in_group * heads, all_heads)
    session = EngineSession(group, strategy, heads, len(layers), clock=clock, transformer=name, head_slice=head_slice)
    transformer = DbspTransformer(module, session)
    setattr(module, _SESSION, transformer)
    # 3. Its kernels.
    for index, layer in enumerate(layers):
        (_set_kernel_of_h3 if is_h3 else _set_kernel)(layer, DbspImpl(layer.softmax_scale, transformer, index))


def _attentions_of(module: Any) -> list[Any]:
    """Returns the self-attention of each block, as SGLang's layer for attention over all ranks' tokens.

    Raises UserError unless each has one.
    """
    from sglang.multimodal_gen.runtime.layers.attention.layer import UlyssesAttention_VSA, USPAttention

    def is_self_attention(layer: Any) -> bool:
        return type(layer) in (USPAttention, UlyssesAttention_VSA) and not (
            getattr(layer, "is_cross_attention", False) or getattr(layer, "skip_sequence_parallel", False)
        )

    layers: list[Any] = []
    for block in (block for name in getattr(module, "layer_names", ()) for block in module.get_submodule(name)):
        found = list(filter(is_self_attention, getattr(block, "attn1", block).modules()))
        if len(found) != 1 or found[0].causal or found[0].num_heads != found[0].num_kv_heads:
            raise UserError(
                f"{_SUPPORTED}, and {_name(block)} of {_name(module)} has another; {_INSTEAD}, as for SLA checkpoints"
            )
        layers += found
    if not layers:
        raise UserError(f"{_SUPPORTED}, and this is {_name(module)}; {_INSTEAD}")
    return layers


def _set_kernel(layer: Any, kernel: DbspImpl) -> None:
    """Gives a layer db-SP's kernel, and keeps SGLang's own ways around the layer's forward off."""
    layer.attn_impl = kernel
    layer._attn_impl_by_backend = {layer.backend: kernel}
    layer._required_attention_backend = layer.backend  # so that no request names another
    layer.skip_sequence_parallel = True  # Wan's forward_qk_filled exchanges by itself otherwise
    layer.sp_attention_mode = "dbsp"  # and Qwen-Image in Ulysses' mode


def _attentions_of_h3(module: Any) -> list[Any]:
    """Returns the attention of each block, once SGLang has chosen all backends: its token refiner keeps SGLang's."""
    module._resolve_attention_backend_once()
    layers = [block.attn for block in module.blocks]
    if any(layer.hybrid is not None for layer in layers):
        raise UserError(f"this MiniMax-H3 has linear attention in addition to its softmax (VDN-H3); {_INSTEAD}")
    return layers


def _set_kernel_of_h3(layer: Any, kernel: DbspImpl) -> None:
    """Gives a block's attention db-SP's kernel, under a backend that SGLang pipelines nothing for.

    Under that of VSA it computes the gates of a checkpoint that has them.
    """
    from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum

    has_gate = layer.to_gate_compress is not None
    backends = AttentionBackendEnum
    layer._attention_impl = kernel
    layer._attention_backend_enum = backends.VIDEO_SPARSE_ATTN_H3 if has_gate else backends.TORCH_SDPA


def _name(thing: Any) -> str:
    return f"{type(thing).__module__.partition('.')[0]}'s {type(thing).__name__}"


_RUNTIME = "sglang.multimodal_gen.runtime"
_STAGES = f"{_RUNTIME}.pipelines_core.stages.model_specific_stages"
_ATTENTION = f"{_RUNTIME}.layers.attention.layer"
_LAYER = f"{_ATTENTION}:USPAttention"
_H3 = f"{_RUNTIME}.models.dits.minimax_h3"
_H3_STAGE = f"{_STAGES}.minimax_h3.stages.denoising"
_HOOKS: dict[str, Callable[..., Any]] = {
    f"{_LAYER}.__init__": _make_attention,
    f"{_LAYER}.forward": _attend,
    f"{_ATTENTION}:UlyssesAttention_VSA.forward": _attend,
    f"{_H3}:_minimax_h3_attention_core_impl": _attend_packed,
    f"{_H3_STAGE}:_maybe_prepare_vsa_h3_step_metadata": _note_runs,
    f"{_RUNTIME}.models.dits.ltx_2:LTX2Attention.forward": _attend_ltx2,
    f"{_STAGES}.ltx_2.denoising:LTX2DenoisingStage._run_denoising_step": _denoise_ltx2,
    f"{_RUNTIME}.cache.teacache:TeaCacheMixin._compute_teacache_decision": _compute_together,
    f"{_RUNTIME}.pipelines_core:build_pipeline": _attach_pipeline,
}
"""Functions of SGLang, and what each is wrapped in."""
_OF_LAYERS = (
    "attn_impl",
    "backend",
    "softmax_scale",
    "skip_sequence_parallel",
    "sp_attention_mode",
    "_attn_impl_by_backend",
    "_required_attention_backend",
)
_OF_GROUPS = ("get_sp_group", "get_tp_group", "get_ulysses_parallel_world_size", "get_ring_parallel_world_size")
EXPECTED = ExpectedHost(
    "SGLang",
    package="sglang",
    version="0.5.23",
    names=(
        *_HOOKS,
        *(f"{_LAYER}.{name}" for name in _OF_LAYERS),
        *(f"{_RUNTIME}.distributed.parallel_state:{name}" for name in _OF_GROUPS),
        *(f"{_H3}:MiniMaxH3Attention.{name}" for name in ("_attention_backend_enum", "to_gate_compress")),
        f"{_H3}:MiniMaxH3DiTModel._resolve_attention_backend_once",
        f"{_H3_STAGE}:_ref2va_vsa_segments",
        f"{_RUNTIME}.disaggregation.roles:RoleType.DENOISER",
        f"{_RUNTIME}.loader.component_loaders.transformer_loader:TransformerLoader.component_names",
        f"{_RUNTIME}.managers.forward_context:get_forward_context",
        f"{_RUNTIME}.platforms.plugins:plugin_hook",
        f"{_RUNTIME}.server_args:get_global_server_args",
    ),
)


def register() -> None:
    """Registers the hooks if $DBSP_CONFIG names a configuration; without it nothing changes.

    Raises:
        SystemExit: For another SGLang than expected. SGLang logs other errors of plug-ins and goes on, and would run
            dense attention where a mask was asked for.
    """
    if not os.environ.get(CONFIG_VARIABLE):
        return
    if problem := EXPECTED.problem():
        raise SystemExit(f"{problem}, or unset {CONFIG_VARIABLE} to run without db-SP")
    from sglang.multimodal_gen.runtime.platforms.plugins import HookType, plugin_hook

    for target, wrapper in _HOOKS.items():
        plugin_hook(target.replace(":", "."), HookType.AROUND)(wrapper)
