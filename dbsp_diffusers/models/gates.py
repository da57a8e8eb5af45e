"""Branch layers (VSA's gate, SLA's projection), read from the checkpoint if the class lacks them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dbsp_core.sources import MaskSource, SlaSource, VsaSource, parts_of
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import read_text
from dbsp_diffusers.checkpoint import cached_checkpoint
from dbsp_diffusers.models import known_architecture
from dbsp_diffusers.models.architecture import heads_of

GATE, PROJECTION = VsaSource.gate, SlaSource.projection  # names of the layers in a self-attention module
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
"""Patterns of the weights' index or file, in order of preference; the last two are for variants."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def branch_layer(source: MaskSource) -> str | None:
    """Returns the name of the layer that a mask source's branch needs, or None."""
    names = (getattr(part, "branch_layer", None) for part in parts_of(source))
    return next(filter(None, names), None)


def gate_of(attention: nn.Module, source: MaskSource) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Returns a function from hidden states [B, n, C] to `LocalQK.gate`, or None without a branch layer.

    It calls the layer, so that offloading hooks run.
    """
    name = branch_layer(source)
    layer = None if name is None else getattr(attention, name, None)
    return functools.partial(_projected_units, layer) if layer is not None and name == PROJECTION else layer


def _projected_units(projection: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Returns a projection's outputs for zeros and for each unit channel, [D + 1, D]."""
    units = torch.eye(projection.in_features, dtype=projection.weight.dtype, device=hidden.device)
    return projection(torch.cat([torch.zeros_like(units[:1]), units]))


def gate_by_head(gate: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Reshapes a gate [B, n, H · D] to shape and dtype of queries [B, H, n, D]; a projection [D + 1, D] is kept."""
    if gate.ndim == 2:
        return gate
    # A function, since torch.compile cannot trace super() in Tensor.unflatten within a function mode.
    return torch.unflatten(gate, 2, (q.shape[1], q.shape[3])).transpose(1, 2).to(q.dtype)


def branch_layers_in_checkpoint(
    transformer: nn.Module, source: MaskSource, name: str | None = None
) -> dict[nn.Module, nn.Linear]:
    """Loads the branch layers that a transformer lacks but its checkpoint has.

    diffusers' Wan drops these weights when loading checkpoints of FastWan or TurboWan. They are read from safetensors
    in a local folder or Hugging Face's cache, without downloading. `name` is the transformer's in a pipeline, if any.

    Returns:
        The layer by self-attention module, on the device of `to_q`, gates in its dtype; empty if the checkpoint has
        none or cannot be found. Raises UserError if weights of some layers are missing, do not fit or cannot be read.
    """
    layer, known = branch_layer(source), known_architecture(transformer)
    if layer is None or known is None or layer not in known.branch_layers:
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
        stems = (f"{block}.{stem}" for stem in known.branch_layers[layer])
        stem = next((stem for stem in stems if f"{stem}.weight" in files), None)
        if stem is None:
            without.append(block)
        elif not without:
            layers[attention] = _layer(transformer, attention, layer, stem, files)
    if without:
        raise UserError(
            f"{weights} has {layer} for {len(lacking) - len(without)} of {len(lacking)} layers, but not for "
            f"{without[0]}; load a checkpoint that has all of them, {_DO_WITHOUT[layer]}"
        )
    return layers


def _weights_of(transformer: nn.Module, name: str | None, layer: str) -> Path | None:
    """Returns the file or index of the transformer's weights, or None if not found."""
    config: Any = getattr(transformer, "config", None)
    source = config.get("_name_or_path") if isinstance(config, Mapping) else None
    if not source:
        return None
    # The transformer's folder, or that of a whole pipeline
    names = ("transformer", "transformer_2") if name is None else (name,)
    folders: list[Path | None] = [Path(source, part) for part in ("", *names)]
    if not Path(source).is_dir():
        folders = [cached_checkpoint(str(source), f"{part}config.json") for part in ("", *(f"{n}/" for n in names))]
    alone, *parts = (None if folder is None else _first_weights(folder) for folder in folders)
    files = [part for part in ([alone] if alone is not None else parts) if part is not None]
    if len(files) > 1:
        raise UserError(
            f"{source} has two transformers, and db-SP cannot tell which one to read {layer} from; "
            f"enable db-SP on the whole pipeline, load the transformer from its own folder, {_DO_WITHOUT[layer]}"
        )
    return files[0] if files else None


def _first_weights(folder: Path) -> Path | None:
    return next((path for pattern in _WEIGHTS for path in sorted(folder.glob(pattern))), None)


def _files_of(weights: Path, layer: str) -> dict[str, Path]:
    """Returns the file of each tensor of these layers, by name."""
    with _readable(weights, layer):
        if weights.suffix == ".json":
            index: dict[str, str] = json.loads(read_text(weights))["weight_map"]
            return {name: weights.parent / file for name, file in index.items() if f".{layer}." in name}
        with safe_open(weights, framework="pt") as file:
            return {name: weights for name in file.keys() if f".{layer}." in name}  # noqa: SIM118  not a mapping


def _layer(transformer: Any, attention: nn.Module, name: str, stem: str, files: Mapping[str, Path]) -> nn.Linear:
    """Builds the layer from the weights whose names begin with `stem`."""
    like: Any = attention.to_q
    if like.weight.is_meta:
        raise UserError(
            f"the transformer's weights are already offloaded, so {name} cannot be added; offload them once db-SP is "
            f"enabled, {_DO_WITHOUT[name]}"
        )
    # A gate has to_q's size and dtype (if quantized, the transformer's dtype); a projection has a head's size.
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
            f"{layer} cannot be read from {path} ({error}); download the checkpoint again, {_DO_WITHOUT[layer]}"
        ) from error
