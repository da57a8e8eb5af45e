"""Attention "dbsp" of LightX2V, as `parallel.seq_p_attn_type` on several GPUs or `self_attn_1_type` on one.

LightX2V calls `register`, entry point `lightx2v.platform_plugins`, before it collects its attentions. It makes one
object per layer, and passes the layer, the scheduler and the grid to each call, but not which transformer calls. So
the object of layer 0 has its transformer's session, and later layers use the one begun last.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.masks.steps import StepClock
from dbsp_core.runtime.engine_session import EngineSession
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.expected_host import ExpectedHost
from dbsp_core.utils.process import not_compiled

_NAME = "dbsp"
"""The attention in `seq_p_attn_type` and `self_attn_1_type`, and the name of its setting."""
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
    ),
)
_running: ContextVar[EngineSession | None] = ContextVar("_running", default=None)
"""Begun last by a layer 0: the transformers of a rank run one after the other."""
_CLOCK = "_dbsp_clock"
"""Attribute of a scheduler: the count of steps of all transformers that it schedules."""
_BY_TOKENS = ("Ada", "FirstBlock", "DualBlock", "DynamicBlock")
"""Values of `feature_caching` that decide by the tokens of one rank."""
_BY_TIMESTEP = ("Tea", "Custom")
"""Values that decide by the timestep, of which a rank has a shard where each token has its own."""
_TIMESTEP_BY_TOKEN = ("wan2.2", "wan2.2_audio"), ("i2v", "s2v", "rs2v")
"""Models and tasks whose tokens each have a timestep."""


def register() -> None:
    """Adds the attention; configurations that do not name it run as before. Called again, it does nothing.

    Raises:
        UserError: For another LightX2V than expected, which LightX2V logs before it goes on without the attention.
    """
    if problem := EXPECTED.problem():
        raise UserError(problem)
    from lightx2v_platform.registry_factory import PLATFORM_ATTN_WEIGHT_REGISTER

    if _NAME not in PLATFORM_ATTN_WEIGHT_REGISTER:
        PLATFORM_ATTN_WEIGHT_REGISTER(_NAME)(DbspAttention)


class DbspAttention:
    """The self-attention of one layer; it has no weights."""

    def __init__(self, **_: Any) -> None:
        self._session: EngineSession | None = None

    @not_compiled
    def apply_new(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seq_p_group: Any = None,
        quant_scheme: str | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        **options: Any,  # text that all ranks hold, and how Ulysses would send
    ) -> tuple[torch.Tensor, None]:
        """Computes attention of q, k, v [this rank's tokens, H, D], padding of the last rank included.

        Returns:
            [this rank's tokens, H · D], and None: models with tokens that all ranks hold are not supported.
        """
        if any(options.get(name) is not None for name in ("aux_q", "aux_k", "aux_v")):
            raise UserError("dbsp does not support models whose ranks all hold the text; use seq_p_attn_type ulysses")
        if quant_scheme is not None:
            raise UserError(
                f"seq_p_quant_scheme {quant_scheme} is for LightX2V's own exchange; leave it out, and set "
                "precision: int8 in db-SP's configuration"
            )
        return self._attend(q, k, v, SequenceGroup.from_group(seq_p_group), attention_kwargs or {}), None

    @not_compiled
    def apply(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **context: Any) -> torch.Tensor:
        """Computes on one GPU what `apply_new` does, of all tokens."""
        if "seq_p_group" in context:
            raise UserError(
                "this model calls LightX2V's older interface of sequence parallelism, which dbsp does not support; "
                "use seq_p_attn_type ulysses"
            )
        return self._attend(q, k, v, SequenceGroup(0, 1), context)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: SequenceGroup, context: dict[str, Any]
    ) -> torch.Tensor:
        layer, grid = context.get("block_idx"), context.get("grid_sizes")
        if layer is None or grid is None or q.shape != k.shape:
            raise UserError(
                "dbsp computes self-attention over a grid of video tokens, as LightX2V's Wan has it; this model gives "
                "none, or keeps keys of earlier frames; use seq_p_attn_type ulysses"
            )
        if layer == 0:
            frames, height, width = map(int, grid)
            self._begin(Video((frames, height, width)), q, group, context["scheduler"])
        session = _running.get()
        if session is None:
            raise UserError("LightX2V called an attention of a later layer before the first")
        out = session.attend(layer, q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))
        return out.squeeze(0).flatten(1)

    def _begin(self, video: Video, q: torch.Tensor, group: SequenceGroup, scheduler: Any) -> None:
        if self._session is None:
            config = scheduler.config
            _require_supported(config, group.size)
            setting = (config.get("parallel") or {}).get(_NAME, config.get(_NAME))
            of_model = Strategy(group.size, 1), q.shape[1], config["num_layers"]
            clock = vars(scheduler).setdefault(_CLOCK, StepClock(shared=True))
            self._session = EngineSession(
                group, *of_model, setting, clock=clock, transformer=_transformer_of(scheduler)
            )
        self._session.begin(
            video,
            q.device,
            step=scheduler.step_index,
            cfg_branch=int(not scheduler.infer_condition),
            steps=getattr(scheduler, "infer_steps", None),
        )
        _running.set(self._session)

    def load(self, *_: Any, **__: Any) -> None:
        """Does nothing, like all that LightX2V asks of each part of a model: an attention has no weights."""

    set_config = to_cpu = to_cuda = load_state_dict_from_disk = load

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        return {} if destination is None else destination

    def load_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


def _transformer_of(scheduler: Any) -> str:
    """Returns which of Wan2.2's two transformers a step runs, by LightX2V's own rules; other models have one."""
    config, step, second = scheduler.config, scheduler.step_index, False
    if "boundary_step_index" in config:  # distilled
        second = step >= config["boundary_step_index"]
    elif "boundary" in config:
        second = bool(scheduler.timesteps[step] < 1000 * config["boundary"])
    return "transformer_2" if second else "transformer"


def _require_supported(config: Mapping[str, Any], ranks: int) -> None:
    """Raises UserError for settings of LightX2V that db-SP does not go with."""
    if config.get("tensor_parallel", False):
        raise UserError("dbsp does not go with LightX2V's tensor parallelism; leave out parallel.tensor_p_size")
    models, tasks = _TIMESTEP_BY_TOKEN
    by_token = config.get("model_cls") in models and config.get("task") in tasks
    cache = config.get("feature_caching", "NoCaching")
    if ranks > 1 and cache in (_BY_TOKENS + _BY_TIMESTEP if by_token else _BY_TOKENS):
        raise UserError(
            f"feature_caching {cache} decides by the tokens of one rank, so that ranks would skip different layers; "
            f"use {'Mag' if by_token else 'Tea, Mag'} or NoCaching"
        )
