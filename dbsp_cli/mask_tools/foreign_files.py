"""Reads arrays in other projects' files. Nothing is unpickled: files that need that are refused."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from dbsp_core.utils.errors import UserError
from dbsp_core.utils.paths import require_file, user_path

__all__ = ["SUFFIXES", "find_array", "read_arrays"]

SUFFIXES = (".safetensors", ".pt", ".pth", ".npy", ".npz")


def read_arrays(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Reads every tensor in a file by its name: "" for a lone one, "a/b" in nested mappings, "a/0" in lists.

    .pt and .pth are read with weights_only, .npy and .npz without pickles. Where the format allows it, tensors are
    mapped from disk, not read.

    Raises:
        UserError: It is no such file, or has nothing to read in it.
    """
    path = user_path(path)
    require_file(path, "file", "give the path of a file with masks")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} has an unknown suffix; masks are read from {', '.join(SUFFIXES)}")
    try:
        content = _read(path)
    except Exception as error:  # damaged files bring up every kind from the libraries that read them
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{path} cannot be read without unpickling objects, or is damaged ({reason}); save plain "
            "tensors, in mappings at most: torch.save({'sparse': masks}, path)"
        ) from error
    found: dict[str, torch.Tensor] = {}
    try:
        _collect(content, "", found)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if not found:
        raise UserError(f"{path} has no tensors in it")
    return found


def find_array(
    arrays: Mapping[str, torch.Tensor], wanted: str | None, usual: tuple[str, ...], where: object, option: str
) -> torch.Tensor | None:
    """Returns the array called `wanted`; else the first of the usual names that is there; None if none is.

    Raises:
        UserError: There is no `wanted`; the message names `option`.
    """
    if wanted is not None:
        if wanted not in arrays:
            raise UserError(f"{where} has no tensor {wanted!r}; {option} can be one of {', '.join(arrays) or 'none'}")
        return arrays[wanted]
    return next((arrays[name] for name in usual if name in arrays), None)


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix in (".pt", ".pth"):
        mapped = zipfile.is_zipfile(path)  # older files are no archives, and cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    content = np.load(path, allow_pickle=False, mmap_mode="c" if path.suffix == ".npy" else None)
    return content if isinstance(content, np.ndarray) else dict(content)


def _require_all_there(tensor: torch.Tensor, name: str) -> None:
    """Raises UserError for a tensor that the file holds only in part, expanded or sparse: it could be of any size."""
    size = tensor.numel() * tensor.element_size()
    if tensor.layout != torch.strided or tensor.untyped_storage().nbytes() < size:
        raise UserError(
            f"tensor {name!r} of shape {list(tensor.shape)} is not whole in the file, but expanded or sparse; save it "
            "as .contiguous() or .to_dense() makes it"
        )


def _collect(content: Any, name: str, found: dict[str, torch.Tensor]) -> None:
    inside = f"{name}/" if name else ""
    if isinstance(content, np.ndarray):
        if content.dtype.kind in "biuf":
            found[name] = torch.from_numpy(content.astype(content.dtype.newbyteorder("="), copy=False))
    elif isinstance(content, torch.Tensor):
        _require_all_there(content, name)
        found[name] = content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            _collect(value, f"{inside}{key}", found)
    elif isinstance(content, (list, tuple)):
        for index, value in enumerate(content):
            _collect(value, f"{inside}{index}", found)
