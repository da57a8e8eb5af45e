"""Cases for the workers: xfuser's real wrappers and pipelines with db-SP attached, against one process."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import logging
import os
from types import SimpleNamespace
from typing import Any

from diffusers import CogVideoXPipeline

from dbsp_diffusers.patching import PatchSet
from dbsp_xdit.runner import allow_all_degrees, install
from tests.support.models.tiny_transformers import make_tiny_transformer

_started: list[tuple[int, int]] = []


def start_xfuser(rank: int, world: int, guidance: int = 1, data: int = 1) -> None:
    """Starts xfuser on this worker's process group, with groups for guidance and data next to the sequence's.

    Its degrees are all that is left, and 1: configurations name the strategy. Groups that are there are kept: gloo's
    threads outlive a group that is destroyed.
    """
    if _started == [(guidance, data)]:
        return
    _started[:] = [(guidance, data)]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    install()
    from xfuser.core.distributed import init_distributed_environment, initialize_runtime_state
    from xfuser.core.distributed.parallel_state import destroy_model_parallel, model_parallel_is_initialized

    logging.getLogger("xfuser").setLevel(logging.ERROR)
    init_distributed_environment()
    if model_parallel_is_initialized():
        destroy_model_parallel()
    allow_all_degrees(PatchSet())
    pipe = SimpleNamespace(transformer=SimpleNamespace(config=SimpleNamespace(num_attention_heads=6)), vae=None)
    initialize_runtime_state(pipe, engine_config(world, guidance, data))


def engine_config(world: int, guidance: int = 1, data: int = 1) -> Any:
    from xfuser import xFuserArgs

    args = xFuserArgs(
        model="tiny",
        ulysses_degree=world // guidance // data,
        ring_degree=1,
        use_cfg_parallel=guidance > 1,
        data_parallel_degree=data,
    )
    return args.create_config()[0]


FAMILIES = {
    "wan": "transformer_wan:xFuserWanTransformer3DWrapper",
    "vace": "transformer_wan_vace:xFuserWanVACETransformer3DWrapper",
    "hunyuan": "transformer_hunyuan_video:xFuserHunyuanVideoTransformer3DWrapper",
    "hunyuan1.5": "transformer_hunyuan_video15:xFuserHunyuanVideo15Transformer3DWrapper",
    "ltx2": "transformer_ltx2:xFuserLTX2VideoTransformer3DWrapper",
    "flux": "transformer_flux:xFuserFlux1Transformer2DWrapper",
    "flux2": "transformer_flux2:xFuserFlux2Transformer2DWrapper",
    "qwen": "transformer_qwen:xFuserQwenImageTransformerWrapper",
    "z-image": "transformer_z_image:xFuserZImageTransformer2DWrapper",
    "krea2": "transformer_krea2:xFuserKrea2Transformer2DWrapper",
    "minimax-h3": "transformer_minimax_h3:xFuserMiniMaxH3Transformer3DWrapper",
}
"""By a tiny transformer's name, the module and name of xfuser's subclass of its class."""


def family_class(model: str) -> Any:
    module, name = FAMILIES[model].split(":")
    return getattr(importlib.import_module(f"xfuser.model_executor.models.transformers.{module}"), name)


def in_xfusers_class(model: str, stock: Any = None) -> Any:
    """Returns a transformer in xfuser's subclass of its class, with the weights of `stock` or of the tiny one."""
    stock, cls = make_tiny_transformer(model) if stock is None else stock, family_class(model)
    known = inspect.signature(cls.__init__).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    settings = {key: value for key, value in stock.config.items() if not key.startswith("_")}
    wrapped = cls(**{key: value for key, value in settings.items() if anything or key in known}).eval()
    wrapped.load_state_dict(stock.state_dict())
    if model == "minimax-h3":
        wrapped.fuse_qkv_projections()  # as xfuser's runner does
    return wrapped


def load_cogvideox(folder: str) -> Any:
    """Returns a pipeline with a transformer and a scheduler of its own, which xfuser changes; it shares the rest."""
    parts = _cogvideox_parts(folder)
    pipe = CogVideoXPipeline(**parts | {name: copy.deepcopy(parts[name]) for name in ("transformer", "scheduler")})
    pipe.set_progress_bar_config(disable=True)
    return pipe


@functools.cache
def _cogvideox_parts(folder: str) -> dict[str, Any]:
    parts: dict[str, Any] = CogVideoXPipeline.from_pretrained(folder, local_files_only=True).components
    with parts["transformer"].cache_context("cond"):  # which leaves an attribute, as a first generation does
        return parts
