"""Writes files that appear whole or not at all."""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

__all__ = ["ByteTensor", "open_atomically", "write_atomically", "write_byte_tensors"]


@contextmanager
def open_atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a file to write: readers see the old one until the block ends without an error, and then the new one.

    Links are followed. An existing file keeps its mode. A device or a pipe is written to as it is.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        with open(path, "wb") as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            with suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Writes a file so that a reader sees the old one or the new one, never half of it."""
    with open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@dataclass(frozen=True)
class ByteTensor:
    """A uint8 tensor that is written piece by piece, in row-major order."""

    shape: tuple[int, ...]
    pieces: Iterable[bytes]


def write_byte_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, ByteTensor], metadata: Mapping[str, str]
) -> int:
    """Writes a safetensors file with one piece in memory at a time, whole or not at all.

    Returns:
        Its size in bytes.

    Raises:
        ValueError: When a tensor's pieces don't add up to its shape.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + math.prod(tensor.shape)
        header[name] = {"dtype": "U8", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with open_atomically(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            written = sum(file.write(piece) for piece in tensor.pieces)
            if written != math.prod(tensor.shape):
                raise ValueError(f"tensor {name!r} of shape {list(tensor.shape)} was given {written} bytes")
    return 8 + len(text) + end
