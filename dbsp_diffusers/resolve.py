"""Resolves and logs the effective settings of a model."""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import DEFAULT_ORIGIN, ConfigLike, DbspConfig, default_config, require_same_model
from dbsp_core.cost.machine import kernel_order, load_hardware
from dbsp_core.models.signature import PIPELINES, ModelSignature, model_signature, variant_of
from dbsp_core.models.table import model_title
from dbsp_core.planning.comm_dtype import MODEL
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import NablaSource, UnionSource, parts_of
from dbsp_core.sources.spec import mask_in_words
from dbsp_core.utils.errors import UserError, blame_setting, in_number
from dbsp_core.utils.process import log
from dbsp_core.utils.yaml_file import shown_config
from dbsp_diffusers.models import architecture_of, known_architecture
from dbsp_kernels import KernelRequirements, choose_kernel


def identify(transformer: Any, pipe: Any = None) -> ModelSignature:
    """Returns the signature of a transformer and its pipeline, if any. Raises UserError for an unknown class."""
    name = type(pipe).__name__.removeprefix("xFuser")
    if not name.endswith("Pipeline"):
        name = architecture_of(transformer).pipeline or type(transformer).__name__
    if name not in PIPELINES:  # another class for the same checkpoints
        name = next((usual for usual, kind in PIPELINES.items() if name in (kind.from_image, kind.from_video)), name)
    two = all(getattr(pipe, part, None) is not None for part in ("transformer", "transformer_2"))
    return model_signature(name, transformer.config, variant_of(two, getattr(pipe, "config", {})))


def resolve_config(
    config: ConfigLike, transformer: Any, pipe: Any = None, name: str = "transformer", *, vae: bool = False
) -> DbspConfig:
    """Returns the settings of transformer `name`: `config`, or else those shipped for its checkpoint.

    Without a mask setting, the checkpoint's own mask is used, if any. `vae` enables setting `vae`. Raises UserError
    for invalid settings and for a configuration of another model.
    """
    if config is None:
        loaded = default_config(identify(transformer, pipe))
    else:
        loaded = DbspConfig.load(config)
        if loaded.model is not None:
            require_same_model(loaded, identify(transformer, pipe), with_pipeline=pipe is not None)
    if vae and not loaded.vae:
        loaded = replace(loaded, vae=True)
    if loaded.transformer_2:
        loaded = loaded.for_transformer(name)
    return _with_own_mask(loaded, transformer)


def _with_own_mask(config: DbspConfig, transformer: Any) -> DbspConfig:
    """Adds the checkpoint's own mask if none is set, or its numbers if that mask is set without them."""
    known = known_architecture(transformer)
    mask = known.own_mask.source(transformer) if known is not None and known.own_mask is not None else None
    if mask is None:
        return config
    if not config.mask_is_named:
        return replace(config, mask=mask, origin=None if config.origin == DEFAULT_ORIGIN else config.origin)
    if not isinstance(mask, NablaSource):
        return config
    parts = tuple(part.or_else(mask) if isinstance(part, NablaSource) else part for part in parts_of(config.mask))
    return replace(config, mask=parts[0] if len(parts) == 1 else UnionSource(parts))


def require_possible(config: DbspConfig) -> None:
    """Raises SettingError for settings that are not supported on this machine or with these masks."""
    if config.transformer_2:
        with blame_setting("transformer_2"):
            require_possible(config.for_transformer("transformer_2"))
    with blame_setting("mask"):
        needs = KernelRequirements(config.blocks)
    with blame_setting("kernel"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        choose_kernel(config.kernel, device, config.generate.torch_dtype, needs)
    if config.machine is not None:
        with blame_setting("machine"):
            load_hardware(config.machine)


def log_config(session: AttentionSession, transformer: Any, pipe: Any, ranks: SequenceGroup) -> None:
    """Logs a transformer's effective settings in two lines, once per settings."""
    config, identity = session.config, identify(transformer, pipe)
    title = model_title(identity, type(transformer).__name__ if pipe is None else None)
    # 1. Kernel for the attention's dtype (other weights, such as embeddings, may be float32)
    attention = architecture_of(transformer).attentions_of(transformer)[0]
    floats = (parameter for parameter in attention.parameters() if parameter.is_floating_point())
    like = next(floats, next(transformer.parameters()))
    try:
        wanted = kernel_order(config.kernel, config.machine, like.device)
        needs = KernelRequirements(head_dim=identity.sizes[2] or None)
        kernel = choose_kernel(wanted, like.device, like.dtype, needs).name
    except UserError:  # raised at the first attention, on all ranks
        kernel = config.kernel
    layout = f"planner {config.planner.setting}, layout {config.layout}, kernel {kernel}"
    if config.precision != MODEL:
        layout += f", precision {config.precision.setting}"
    _log_once(f"{title} on {in_number(ranks.size, 'rank')}, strategy {session.strategy or 'auto'}, {layout}")
    # 2. Mask with all settings, such as "sol:…, dense last_steps 5"
    schedule = config.dense_schedule
    dense = [f"{setting.name} {number}" for setting in fields(schedule) if (number := getattr(schedule, setting.name))]
    mask = mask_in_words(config.mask, defaults=True) + (f", dense {', '.join(dense)}" if dense else "")
    origin = config.origin if config.origin in (None, DEFAULT_ORIGIN) else f"from {shown_config(config.origin)}"
    _log_once(f"mask {mask}" + (f"; {origin}" if origin else ""))


@functools.lru_cache(maxsize=64)
def _log_once(text: str) -> None:
    log.info(text)
