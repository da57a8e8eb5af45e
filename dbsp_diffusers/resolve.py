"""Finds the settings in effect for a model, and logs them."""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import DEFAULT_ORIGIN, ConfigLike, DbspConfig, default_config, require_same_model
from dbsp_core.cost.machine import kernel_order
from dbsp_core.layout.strategy import Strategy
from dbsp_core.models.signature import PIPELINES, ModelSignature, model_signature, variant_of
from dbsp_core.planning.comm_dtype import MODEL
from dbsp_core.sources import NablaSource, UnionSource, parts_of
from dbsp_core.sources.spec import mask_in_words
from dbsp_core.utils.errors import UserError, in_number
from dbsp_core.utils.process import log
from dbsp_core.utils.yaml_file import shown_config
from dbsp_diffusers.models import architecture_of, known_architecture
from dbsp_kernels import KernelRequirements, choose_kernel


def identify(transformer: Any, pipe: Any = None) -> ModelSignature:
    """Identifies a transformer, given its pipeline if there is one. Raises UserError for an unknown class."""
    name = type(pipe).__name__.removeprefix("xFuser")
    if not name.endswith("Pipeline"):
        name = architecture_of(transformer).pipeline or type(transformer).__name__
    name = next(
        (pipeline for pipeline, names in PIPELINES.items() if names.from_video == name), name
    )  # of the same checkpoints
    two = all(getattr(pipe, part, None) is not None for part in ("transformer", "transformer_2"))
    return model_signature(name, transformer.config, variant_of(two, getattr(pipe, "config", {})))


def resolve_config(
    config: ConfigLike, transformer: Any, pipe: Any = None, name: str = "transformer", *, vae: bool = False
) -> DbspConfig:
    """Returns the settings for a transformer: those given, or else those shipped for its checkpoint.

    Where they name no mask, and the checkpoint brings one of its own, they are given this one. `name` is that of the
    transformer in its pipeline, and `vae` turns the setting of that name on. Raises UserError for an error in the
    settings, and for a configuration of another model.
    """
    if config is None:
        loaded = default_config(identify(transformer, pipe))
    else:
        loaded = DbspConfig.load(config)
        require_same_model(loaded, identify(transformer, pipe), with_pipeline=pipe is not None)
    loaded = replace(loaded, vae=True) if vae else loaded
    return _with_own_mask(loaded.for_transformer(name), transformer)


def _with_own_mask(config: DbspConfig, transformer: Any) -> DbspConfig:
    """Adds the mask that a checkpoint brings if none is named; and its numbers if its mask is named without them."""
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


def log_config(
    config: DbspConfig, title: str, head_dim: int, group: SequenceGroup, strategy: Strategy | None, like: torch.Tensor
) -> None:
    """Logs the settings in effect, in two lines, on rank 0, once for the same settings.

    Args:
        title: The model in words.
        head_dim: Size of a head; 0 if the transformer's configuration does not name it.
        like: A tensor of the model's device and dtype, for which the kernel is chosen.
    """
    if group.rank != 0:
        return
    try:
        needs = KernelRequirements(head_dim=head_dim or None)
        wanted = kernel_order(config.kernel, config.machine, like.device)
        kernel = choose_kernel(wanted, like.device, like.dtype, needs).name
    except UserError:  # attention raises it, on all ranks together
        kernel = config.kernel
    layout = f"planner {config.planner}, layout {config.layout}, kernel {kernel}"
    if config.comm_dtype is not MODEL:
        layout += f", precision {config.precision}"
    _log_once(f"{title} on {in_number(group.size, 'rank')}, strategy {strategy or 'auto'}, {layout}")
    origin = config.origin if config.origin in (None, DEFAULT_ORIGIN) else f"from {shown_config(config.origin)}"
    _log_once(f"mask {describe_mask(config)}" + (f"; {origin}" if origin else ""))


def describe_mask(config: DbspConfig) -> str:
    """Describes the mask source with all settings, and what stays dense, such as "sol:…, dense last_steps 5"."""
    schedule = config.dense_schedule
    dense = [f"{setting.name} {number}" for setting in fields(schedule) if (number := getattr(schedule, setting.name))]
    return mask_in_words(config.mask, defaults=True) + (f", dense {', '.join(dense)}" if dense else "")


@functools.lru_cache(maxsize=64)
def _log_once(text: str) -> None:
    log.info(text)
