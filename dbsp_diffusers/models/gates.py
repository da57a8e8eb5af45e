"""The gate of VSA's coarse branch: the layer that makes it, read from the checkpoint where the class lacks it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dbsp_core.sources import MaskSource, parts_of
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import read_text
from dbsp_diffusers.checkpoint import cached_checkpoint
from dbsp_diffusers.models.table import known_architecture

GATE = "to_gate_compress"
"""The layer's name in a self-attention module."""
_DO_WITHOUT = "or set coarse: false of mask source vsa, for the mask alone"
_WEIGHTS = (
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.*.json",
    "diffusion_pytorch_model.*.safetensors",
)
"""Patterns of the file that says where weights are, the first to be looked for first; the latter two of variants."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def gate_of(attention: nn.Module, source: MaskSource) -> nn.Module | None:
    """Returns the layer that makes the gate of a coarse branch, if the module has one and the mask source reads it."""
    return getattr(attention, GATE, None) if _reads_gate(source) else None


def gate_by_head(gate: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Returns the output of a gate's layer, [B, n, H · D], in shape and dtype of queries [B, H, n, D]."""
    # No method: within a function mode torch.compile does not trace the super() of Tensor.unflatten.
    return torch.unflatten(gate, 2, (q.shape[1], q.shape[3])).transpose(1, 2).to(q.dtype)


def gates_in_checkpoint(
    transformer: nn.Module, source: MaskSource, name: str | None = None
) -> dict[nn.Module, nn.Linear]:
    """Loads the gates that a transformer lacks and its checkpoint has, if the mask source reads a gate.

    diffusers' Wan has no layer for them, and drops their weights when it reads a checkpoint that has them, as FastWan
    does. They are read from safetensors in a local folder or in Hugging Face's cache; nothing is downloaded.

    Args:
        name: The transformer's name in its pipeline; None: it is given alone.

    Returns:
        By self-attention module its layer, of the dtype and on the device of `to_q`; empty if the checkpoint
        has none or cannot be found.

    Raises:
        UserError: For weights of some layers only, or that don't fit or can't be read.
    """
    known = known_architecture(transformer) if _reads_gate(source) else None
    if known is None or not known.gate_names:
        return {}
    paths = {module: path for path, module in transformer.named_modules()}
    lacking = [attention for attention in known.attentions_of(transformer) if not hasattr(attention, GATE)]
    weights = _weights_of(transformer, name) if lacking else None
    files = {} if weights is None else _gate_files(weights)
    if not files:
        return {}
    gates, without = {}, []
    for attention in lacking:
        block = paths[attention].rpartition(".")[0]
        stem = next(
            (f"{block}.{gate_name}" for gate_name in known.gate_names if f"{block}.{gate_name}.weight" in files), None
        )
        if stem is None:
            without.append(block)
        elif not without:
            gates[attention] = _layer(transformer, attention, stem, files)
    if without:
        raise UserError(
            f"{weights} has {GATE} for {len(lacking) - len(without)} of {len(lacking)} layers, and not for "
            f"{without[0]}; load a checkpoint that has all of them, {_DO_WITHOUT}"
        )
    return gates


def _reads_gate(source: MaskSource) -> bool:
    return any(getattr(part, "coarse", False) for part in parts_of(source))


def _weights_of(transformer: nn.Module, name: str | None) -> Path | None:
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
            f"{source} has two transformers, and nothing says which one this is, whose gates ({GATE}) are to be read; "
            f"give db-SP the whole pipeline, load the transformer from its own folder, {_DO_WITHOUT}"
        )
    return files[0] if files else None


def _first_weights(folder: Path) -> Path | None:
    return next((path for pattern in _WEIGHTS for path in sorted(folder.glob(pattern))), None)


def _gate_files(weights: Path) -> dict[str, Path]:
    """Returns the file of each tensor of a gate, by its name."""
    with _readable(weights):
        if weights.suffix == ".json":
            index: dict[str, str] = json.loads(read_text(weights))["weight_map"]
            return {name: weights.parent / file for name, file in index.items() if GATE in name}
        with safe_open(weights, framework="pt") as file:
            return {name: weights for name in file.keys() if GATE in name}  # noqa: SIM118  it is no mapping


def _layer(transformer: Any, attention: nn.Module, stem: str, files: Mapping[str, Path]) -> nn.Linear:
    """Builds the layer whose weights have names that begin with `stem`."""
    like: Any = attention.to_q
    if like.weight.is_meta:
        raise UserError(
            f"the transformer's weights are offloaded already, and gates ({GATE}) cannot be added; offload them once "
            f"db-SP is enabled, {_DO_WITHOUT}"
        )
    dtype = like.weight.dtype if like.weight.dtype in _FLOATS else transformer.dtype  # of quantised ones: the latter
    layer = nn.Linear(like.in_features, like.out_features, f"{stem}.bias" in files, device="meta")
    for part, expected in list(layer.named_parameters()):
        path, tensor = files[f"{stem}.{part}"], f"{stem}.{part}"
        with _readable(path), safe_open(path, framework="pt") as file:
            value = file.get_tensor(tensor)
        if value.shape != expected.shape or value.dtype not in _FLOATS:
            raise UserError(
                f"{path}: {tensor} is {value.dtype} of shape {list(value.shape)}, expected floating point of shape "
                f"{list(expected.shape)}; load a checkpoint of this model, {_DO_WITHOUT}"
            )
        layer.register_parameter(part, nn.Parameter(value.to(like.weight.device, dtype), requires_grad=False))
    return layer.train(attention.training)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"gates ({GATE}) cannot be read from {path} ({error}); load the checkpoint anew, {_DO_WITHOUT}"
        ) from error
