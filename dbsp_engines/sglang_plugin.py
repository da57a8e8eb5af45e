"""Makes db-SP known to SGLang Diffusion, in every worker that loads its plug-ins: `register`.

SGLang has a closed list of attention backends; what it has for third parties are hooks on functions that they name.
SGLang takes them off with the process, and puts them on itself.
"""

from __future__ import annotations

import os
from importlib.metadata import version

from dbsp_core.runtime.engine_session import CONFIG_VARIABLE

__all__ = ["HOOKED", "KNOWN_VERSIONS", "NAMES", "knows", "register"]

KNOWN_VERSIONS = ("0.5.23",)
"""Of SGLang, which have the names below; their post-releases too."""
_LAYERS = "sglang.multimodal_gen.runtime.layers.attention.layer"
_WAN = "sglang.multimodal_gen.runtime.models.dits.wanvideo"
HOOKED = {
    f"{_WAN}.WanTransformerBlock.__init__": "make_block",
    f"{_LAYERS}.USPAttention.__init__": "make_attention",
    f"{_WAN}.WanTransformer3DModel.forward": "begin_pass",
    f"{_WAN}.WanTransformer3DModel.should_skip_forward_for_cached_states": "skip_together",
    "sglang.multimodal_gen.runtime.pipelines_core.build_pipeline": "attach_pipeline",
}
"""What is wrapped, and by which function of `dbsp_engines.sglang`."""
NAMES = (
    *HOOKED,
    f"{_LAYERS}.USPAttention.forward",
    "sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend.AttentionImpl",
    "sglang.multimodal_gen.runtime.distributed.parallel_state.get_sp_group",
    "sglang.multimodal_gen.runtime.distributed.parallel_state.get_ulysses_parallel_world_size",
    "sglang.multimodal_gen.runtime.distributed.parallel_state.get_ring_parallel_world_size",
    "sglang.multimodal_gen.runtime.distributed.parallel_state.get_tp_world_size",
    "sglang.multimodal_gen.runtime.disaggregation.roles.RoleType.DENOISER",
    "sglang.multimodal_gen.runtime.loader.component_loaders.transformer_loader.TransformerLoader.component_names",
    "sglang.multimodal_gen.runtime.managers.forward_context.get_forward_context",
    "sglang.multimodal_gen.runtime.server_args.get_global_server_args",
)
"""All that is used of SGLang; tests/engines looks each up."""


def knows(found: str) -> bool:
    """Whether the hooks were made for this version."""
    return any(found == known or found.startswith(f"{known}.post") for known in KNOWN_VERSIONS)


def register() -> None:
    """Registers the hooks, if $DBSP_CONFIG names a configuration; without it nothing changes.

    Raises:
        SystemExit: For a version of SGLang that is not known. SGLang logs other errors of plug-ins and goes on, and
            would run dense attention where a mask was asked for.
    """
    if not os.environ.get(CONFIG_VARIABLE):
        return
    found = version("sglang")
    if not knows(found):
        raise SystemExit(
            f"db-SP hooks into SGLang {', '.join(KNOWN_VERSIONS)}, and this is {found}, whose functions may be "
            f"others; install one of those, or unset {CONFIG_VARIABLE} to run without db-SP"
        )
    from sglang.multimodal_gen.runtime.platforms.plugins import HookType, plugin_hook

    from dbsp_engines import sglang as attention

    for target, wrapper in HOOKED.items():
        plugin_hook(target, HookType.AROUND)(getattr(attention, wrapper))
