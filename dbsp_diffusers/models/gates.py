"""Layers of branches, VSA's gate and SLA's projection: read from the checkpoint where the class lacks them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dbsp_core.sources import MaskSource, SlaSource, VsaSource, parts_of
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import read_text
from dbsp_diffusers.checkpoint import cached_checkpoint
from dbsp_diffusers.models.architecture import heads_of
from dbsp_diffusers.models.table import known_architecture

GATE, PROJECTION = VsaSource.gate, SlaSource.projection
"""The layers' names in a self-attention module."""
_DO_WITHOUT = {
    GATE: "or set coarse: false of mask source vsa, for the mask alone",
    PROJECTION: "or set linear: false of mask source sla, for the mask alone",
}
_WEIGHTS = (
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.*.json",
    "diffusion_pytorch_model.*.safetensors",
)
"""Patterns of the file that says where weights are, the first to be looked for first; the latter two of variants."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def branch_layer(source: MaskSource) -> str | None:
    """Returns the name of the layer that the branch of a mask source needs, if it has a branch."""
    names = (getattr(part, "branch_layer", None) for part in parts_of(source))
    return next(filter(None, names), None)


def gate_of(attention: nn.Module, source: MaskSource) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Returns what makes `LocalQK.gate` of a module's hidden states [B, n, C], if it has the layer of a branch.

    It calls the layer, as hooks of offloading are on the call.
    """
    name = branch_layer(source)
    layer = None if name is None else getattr(attention, name, None)
    return functools.partial(_projected_units, layer) if layer is not None and name == PROJECTION else layer


def _projected_units(projection: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Returns what a projection of D channels makes of zeros, and of each channel alone, [D + 1, D]."""
    units = torch.eye(projection.in_features, dtype=projection.weight.dtype, device=hidden.device)
    units = torch.cat([torch.zeros_like(units[:1]), units])
    return cast(torch.Tensor, projection(units))


def gate_by_head(gate: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Returns the output of a gate's layer, [B, n, H · D], in shape and dtype of queries [B, H, n, D].

    What a projection makes, [D + 1, D], stays as it is.
    """
    if gate.ndim == 2:
        return gate
    # No method: within a function mode torch.compile does not trace the super() of Tensor.unflatten.
    return torch.unflatten(gate, 2, (q.shape[1], q.shape[3])).transpose(1, 2).to(q.dtype)


def branch_layers_in_checkpoint(
    transformer: nn.Module, source: MaskSource, name: str | None = None
) -> dict[nn.Module, nn.Linear]:
    """Loads the layers of a mask source's branch that a transformer lacks and its checkpoint has.

    diffusers' Wan has no place for them, and drops their weights when it reads FastWan's or TurboWan's checkpoint.
    They are read from safetensors in a local folder or in Hugging Face's cache; nothing is downloaded.

    Args:
        name: The transformer's name in its pipeline; None: it is given alone.

    Returns:
        By self-attention module its layer, on the device of `to_q`, gates of its dtype; empty if the checkpoint
        has none or cannot be found.

    Raises:
        UserError: For weights of some layers only, or that don't fit or can't be read.
    """
    layer, known = branch_layer(source), known_architecture(transformer)
    stems = () if layer is None or known is None else known.branch_layers.get(layer, ())
    if layer is None or known is None or not stems:
        return {}
    paths = {module: path for path, module in transformer.named_modules()}
    lacking = [attention for attention in known.attentions_of(transformer) if not hasattr(attention, layer)]
    weights = _weights_of(transformer, name, layer) if lacking else None
    files = {} if weights is None else _files_of(weights, layer)
    if not files:
        return {}
    layers, without = {}, []
    for attention in lacking:
        block = paths[attention].rpartition(".")[0]
        stem = next((f"{block}.{stem}" for stem in stems if f"{block}.{stem}.weight" in files), None)
        if stem is None:
            without.append(block)
        elif not without:
            layers[attention] = _layer(transformer, attention, layer, stem, files)
    if without:
        raise UserError(
            f"{weights} has {layer} for {len(lacking) - len(without)} of {len(lacking)} layers, and not for "
            f"{without[0]}; load a checkpoint that has all of them, {_DO_WITHOUT[layer]}"
        )
    return layers


def _weights_of(transformer: nn.Module, name: str | None, layer: str) -> Path | None:
    """Returns the file that the transformer's weights were read from, or their index; None if it is not found."""
    config: Any = getattr(transformer, "config", None)
    source = config.get("_name_or_path") if isinstance(config, Mapping) else None
    if not source:
        return None
    # A checkpoint's own folder, or that of a whole pipeline.
    names = ("transformer", "transformer_2") if name is None else (name,)
    folders: list[Path | None] = [Path(source, part) for part in ("", *names)]
    if not Path(source).is_dir():
        folders = [cached_checkpoint(str(source), f"{part}config.json") for part in ("", *(f"{n}/" for n in names))]
    alone, *parts = (None if folder is None else _first_weights(folder) for folder in folders)
    files = [part for part in ([alone] if alone is not None else parts) if part is not None]
    if len(files) > 1:
        raise UserError(
            f"{source} has two transformers, and nothing says which one this is, whose {layer} is to be read; "
            f"give db-SP the whole pipeline, load the transformer from its own folder, {_DO_WITHOUT[layer]}"
        )
    return files[0] if files else None


def _first_weights(folder: Path) -> Path | None:
    return next((path for pattern in _WEIGHTS for path in sorted(folder.glob(pattern))), None)


def _files_of(weights: Path, layer: str) -> dict[str, Path]:
    """Returns the file of each tensor of such layers, by its name."""
    with _readable(weights, layer):
        if weights.suffix == ".json":
            index: dict[str, str] = json.loads(read_text(weights))["weight_map"]
            return {name: weights.parent / file for name, file in index.items() if f".{layer}." in name}
        with safe_open(weights, framework="pt") as file:
            return {name: weights for name in file.keys() if f".{layer}." in name}  # noqa: SIM118  it is no mapping


def _layer(transformer: Any, attention: nn.Module, name: str, stem: str, files: Mapping[str, Path]) -> nn.Linear:
    """Builds the layer whose weights have names that begin with `stem`."""
    like: Any = attention.to_q
    if like.weight.is_meta:
        raise UserError(
            f"the transformer's weights are offloaded already, and {name} cannot be added; offload them once db-SP is "
            f"enabled, {_DO_WITHOUT[name]}"
        )
    # A gate has to_q's size and dtype, or the transformer's where weights are quantised; a projection a head's.
    dtype = like.weight.dtype if like.weight.dtype in _FLOATS else transformer.dtype
    inputs, outputs = like.in_features, like.out_features
    if name == PROJECTION:
        dtype, inputs, outputs = torch.float32, *(outputs // heads_of(attention),) * 2
    layer = nn.Linear(inputs, outputs, f"{stem}.bias" in files, device="meta")
    for part, expected in list(layer.named_parameters()):
        path, tensor = files[f"{stem}.{part}"], f"{stem}.{part}"
        with _readable(path, name), safe_open(path, framework="pt") as file:
            value = file.get_tensor(tensor)
        if value.shape != expected.shape or value.dtype not in _FLOATS:
            raise UserError(
                f"{path}: {tensor} is {value.dtype} of shape {list(value.shape)}, expected floating point of shape "
                f"{list(expected.shape)}; load a checkpoint of this model, {_DO_WITHOUT[name]}"
            )
        layer.register_parameter(part, nn.Parameter(value.to(like.weight.device, dtype), requires_grad=False))
    return layer.train(attention.training)


@contextmanager
def _readable(path: Path, layer: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{layer} cannot be read from {path} ({error}); load the checkpoint anew, {_DO_WITHOUT[layer]}"
        ) from error
