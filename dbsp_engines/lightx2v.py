"""Attention "dbsp" of LightX2V, as `parallel.seq_p_attn_type` on several GPUs or `self_attn_1_type` on one.

LightX2V calls `register` (entry point `lightx2v.platform_plugins`) before collecting attentions, and makes one object
per layer. Wan models pass layer, scheduler and grid to each call, but not the transformer: the object of layer 0 holds
its transformer's session, and later layers use the session begun last. Other models pass none of these; see
`lightx2v_models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.steps import StepClock
from dbsp_core.runtime.engine_session import QKV, EngineLayout, EngineSession
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.expected_host import ExpectedHost
from dbsp_core.utils.process import not_compiled
from dbsp_engines.lightx2v_models import MODELS, actions, running
from dbsp_xdit.import_hook import after_import

_NAME = "dbsp"  # name of the attention in `seq_p_attn_type` and `self_attn_1_type`
EXPECTED = ExpectedHost(
    "LightX2V",
    package="lightx2v",
    version=None,
    names=(
        "lightx2v_platform.registry_factory:PLATFORM_ATTN_WEIGHT_REGISTER",
        "lightx2v.models.networks.wan.infer.transformer_infer:WanTransformerInfer.infer_self_attn",
        "lightx2v.models.networks.wan.model:WanModel._seq_parallel_pre_process",
        "lightx2v.models.networks.wan.model:WanModel._infer_cond_uncond",
        "lightx2v.models.schedulers.scheduler:BaseScheduler.infer_condition",
        "lightx2v.models.schedulers.scheduler:BaseScheduler.infer_steps",
        "lightx2v.models.schedulers.scheduler:BaseScheduler.step_index",
        "lightx2v.models.schedulers.wan.scheduler:WanScheduler.timesteps",
        "lightx2v.models.networks.ltx2.infer.transformer_infer:LTX2TransformerInfer._gather_cross_attn_context",
        "lightx2v.models.networks.ltx2.infer.transformer_infer:LTX2TransformerInfer._mm_skip_video_self_blocks",
        "lightx2v.models.networks.minimax_h3.model:MiniMaxH3Model._validate_tensor_parallel_config",
        *(f"lightx2v.models.networks.{module}:{cls}._seq_parallel_pre_process" for module, (cls, _) in MODELS.items()),
    ),
)
_running: ContextVar[EngineSession | None] = ContextVar("_running", default=None)
"""The session begun last by a layer 0; the transformers of a rank run one after another."""
_SESSION = "_dbsp_session"  # attribute of a model, or of Wan's layer 0, with the session
_CLOCK = "_dbsp_clock"  # attribute of a scheduler with the step clock of all transformers that it schedules


def register() -> None:
    """Registers the attention, once; configurations that do not name it are unaffected.

    Raises UserError for an unsupported LightX2V, which logs the error and continues without the attention.
    """
    if problem := EXPECTED.problem():
        raise UserError(problem)
    from lightx2v_platform.registry_factory import PLATFORM_ATTN_WEIGHT_REGISTER

    if _NAME not in PLATFORM_ATTN_WEIGHT_REGISTER:
        PLATFORM_ATTN_WEIGHT_REGISTER(_NAME)(DbspAttention)
        after_import(actions(_NAME))


class DbspAttention:
    """The self-attention of one layer; it has no weights."""

    def __init__(self, **_: Any) -> None: ...

    @not_compiled
    def apply_new(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seq_p_group: Any = None,
        quant_scheme: str | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        aux_q: torch.Tensor | None = None,
        aux_k: torch.Tensor | None = None,
        aux_v: torch.Tensor | None = None,
        **options: Any,  # Ulysses communication options
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes attention of q, k, v [this rank's tokens, H, D], including padding on the last rank.

        Replicated text [tokens, H, D], in aux_q, aux_k and aux_v, precedes the other tokens. Returns [this rank's
        tokens, H · D], and [tokens, H · D] of the text, or None.
        """
        _reject_quantised(quant_scheme)
        context = attention_kwargs or {}
        if context.get("grid_sizes") is not None:
            return self._attend(q, k, v, SequenceGroup.from_group(seq_p_group), context), None
        if aux_q is None or aux_k is None or aux_v is None:
            return _attend_in_pass((q, k, v), None), None
        out = _attend_in_pass((q, k, v), (aux_q, aux_k, aux_v))
        return out[len(aux_q) :], out[: len(aux_q)]

    @not_compiled
    def apply(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slice_qkv_len: int | torch.Tensor | None = None,
        img_first: bool = True,
        q_only_img: bool = False,
        use_fp8_comm: bool = False,
        use_fp4_comm: bool = False,
        **context: Any,
    ) -> torch.Tensor:
        """Computes attention on one GPU, or with LightX2V's older interface of sequence parallelism.

        In the latter, q, k and v are [tokens, H, D] or [1, tokens, H, D]: this rank's tokens, then replicated text, or
        in reverse; `slice_qkv_len` is the length of the first part. Returns [tokens, H · D].
        """
        if slice_qkv_len is None:
            return self._attend(q, k, v, SequenceGroup(0, 1), context)
        _reject_quantised("fp8" if use_fp8_comm else "fp4" if use_fp4_comm else None)
        if q_only_img:  # Z-Image's refiner, before its blocks
            from lightx2v.utils.registry_factory import ATTN_WEIGHT_REGISTER

            ulysses = ATTN_WEIGHT_REGISTER["ulysses"]()
            out: torch.Tensor = ulysses.apply(q, k, v, slice_qkv_len, q_only_img=True, img_first=img_first, **context)
            return out
        parts = [each.flatten(0, -3).tensor_split([int(slice_qkv_len)]) for each in (q, k, v)]
        shard, text = zip(*(part if img_first else part[::-1] for part in parts), strict=True)
        return _attend_in_pass(shard, text if len(text[0]) else None)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: SequenceGroup, context: dict[str, Any]
    ) -> torch.Tensor:
        """Computes attention of a model of the Wan family."""
        layer, grid = context.get("block_idx"), context.get("grid_sizes")
        if layer is None or grid is None or q.shape != k.shape:
            raise UserError(
                "dbsp needs the grid of video tokens, but this model does not pass it on one GPU, or it keeps keys of "
                "earlier frames; use another attention"
            )
        if layer == 0:
            frames, height, width = map(int, grid)
            scheduler = context["scheduler"]
            layers, branch = scheduler.config["num_layers"], int(not scheduler.infer_condition)
            _running.set(_begin(self, EngineLayout((frames, height, width)), q, group, scheduler, layers, branch))
        session = _running.get()
        if session is None:
            raise UserError("LightX2V called an attention of a later layer before the first")
        out = session.attend(layer, q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))
        return out.squeeze(0).flatten(1)

    def load(self, *_: Any, **__: Any) -> None:
        """Does nothing, since attention has no weights."""

    set_config = to_cpu = to_cuda = load_state_dict_from_disk = load

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        return {} if destination is None else destination

    def load_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


def _attend_in_pass(shard: QKV, text: QKV | None) -> torch.Tensor:
    """Computes attention of the current pass's next layer, for q, k and v [tokens, H, D] of a shard and of text."""
    current = running.get()
    layer = None if current is None else next(current.upcoming, None)
    if current is None or layer is None or shard[0].shape != shard[1].shape:
        raise UserError(
            "dbsp does not know how this model of LightX2V shards its tokens, or the model keeps keys of earlier "
            "frames; use seq_p_attn_type ulysses"
        )
    if current.session is None:
        model, group = current.model, SequenceGroup.from_group(current.model.seq_p_group)
        of_pass = current.layers, current.cfg_branch
        current.session = _begin(model, current.layout, shard[0], group, model.scheduler, *of_pass)
    q, k, v = (each.unsqueeze(0) for each in shard)
    joint = None if text is None else (text[0].unsqueeze(0), text[1].unsqueeze(0), text[2].unsqueeze(0))
    return current.session.attend(layer, q, k, v, text=joint).squeeze(0).flatten(1)


def _begin(
    owner: Any, layout: EngineLayout, q: torch.Tensor, group: SequenceGroup, scheduler: Any, layers: int, branch: int
) -> EngineSession:
    """Begins a pass of the session stored on `owner`, and returns the session."""
    session: EngineSession | None = vars(owner).get(_SESSION)
    if session is None:
        config = scheduler.config
        _require_supported(config, group.size)
        setting = (config.get("parallel") or {}).get(_NAME, config.get(_NAME))
        clock = vars(scheduler).setdefault(_CLOCK, StepClock(shared=True))
        of_model = Strategy(group.size, 1), q.shape[1], layers, setting
        session = EngineSession(group, *of_model, clock=clock, transformer=_transformer_of(scheduler))
        vars(owner)[_SESSION] = session
    steps = getattr(scheduler, "infer_steps", None)
    session.begin(layout, q.device, step=scheduler.step_index, cfg_branch=branch, steps=steps)
    return session


def _reject_quantised(scheme: str | None) -> None:
    if scheme is not None:
        raise UserError(
            f"seq_p_quant_scheme {scheme} (or seq_p_{scheme}_comm) is for LightX2V's own exchange; remove it, and "
            "set precision: {qkv: int8, out: int8} in db-SP's configuration to send 8 bits both ways"
        )


def _transformer_of(scheduler: Any) -> str:
    """Returns which of Wan2.2's two transformers a step runs, by LightX2V's rules; other models have one."""
    config, step, second = scheduler.config, scheduler.step_index, False
    if "boundary_step_index" in config:  # distilled
        second = step >= config["boundary_step_index"]
    elif "boundary" in config:
        second = bool(scheduler.timesteps[step] < 1000 * config["boundary"])
    return "transformer_2" if second else "transformer"


def _require_supported(config: Mapping[str, Any], ranks: int) -> None:
    if config.get("tensor_parallel", False):
        raise UserError("dbsp does not support LightX2V's tensor parallelism; remove parallel.tensor_p_size")
    # Models with a timestep per token, which is sharded; Hunyuan's Tea reads the image's tokens
    model, task = str(config.get("model_cls")), config.get("task")
    by_token = model in ("wan2.2", "wan2.2_audio") and task in ("i2v", "s2v", "rs2v")
    by_token |= model.startswith("hunyuan_video")
    cache, by_timestep = config.get("feature_caching", "NoCaching"), ("Tea", "Custom")
    by_tokens = ("Ada", "FirstBlock", "DualBlock", "DynamicBlock")
    if ranks > 1 and cache in (by_tokens + by_timestep if by_token else by_tokens):
        raise UserError(
            f"feature_caching {cache} decides by one rank's tokens, so ranks would skip different layers; "
            f"use {'Mag' if by_token else 'Tea, Mag'} or NoCaching"
        )
