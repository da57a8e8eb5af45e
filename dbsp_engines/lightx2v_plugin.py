"""Makes db-SP known to LightX2V: `register`, which it calls before it collects its attentions."""

from __future__ import annotations

__all__ = ["NAME", "NAMES", "register"]

NAME = "dbsp"
"""Of the attention, in `seq_p_attn_type` and `self_attn_1_type`."""
NAMES = (
    "lightx2v_platform.registry_factory.PLATFORM_ATTN_WEIGHT_REGISTER",
    "lightx2v.models.networks.wan.infer.transformer_infer.WanTransformerInfer.infer_self_attn",
    "lightx2v.models.networks.wan.model.WanModel._seq_parallel_pre_process",
    "lightx2v.models.schedulers.scheduler.BaseScheduler",
)
"""What is used of LightX2V, beyond what it passes to an attention; tests/engines looks each up."""


def register() -> None:
    """Adds the attention. Nothing changes for configurations that do not name it. Called again, it does nothing."""
    from lightx2v_platform.registry_factory import PLATFORM_ATTN_WEIGHT_REGISTER

    from dbsp_engines.lightx2v import DbspAttention

    if NAME not in PLATFORM_ATTN_WEIGHT_REGISTER:
        PLATFORM_ATTN_WEIGHT_REGISTER(NAME)(DbspAttention)
