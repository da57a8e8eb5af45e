"""Keeps the masks of a run in a folder. Whatever goes wrong here, the run goes on as if it were not there."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.mask_file import pack_mask_bits
from dbsp_core.masks.schedule import DenoisingStep
from dbsp_core.utils.atomic_io import ByteTensor, write_atomically, write_byte_tensors
from dbsp_core.utils.errors import UserError

__all__ = ["ENVIRONMENT", "INDEX", "MaskRecorder", "RecordSettings", "parse_layers", "parse_size"]

INDEX = "index.json"
ENVIRONMENT = "DBSP_RECORD"
"""Names the folder; with _EVERY, _LAYERS and _LIMIT after it, the other settings."""

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

Method = TypeVar("Method", bound=Callable[..., Any])

_Packed = tuple[BlockGrid, np.ndarray]
"""A mask's grid, and its bits as `pack_mask_bits` gives them."""


@dataclass(frozen=True)
class RecordSettings:
    """folder: where to; None records nothing.  every: n keeps each n-th step.  limit: bytes on disk

    layers: which; None: all
    """

    folder: str | None = None
    every: int = 1
    layers: frozenset[int] | None = None
    limit: int = 2 * 2**30

    @classmethod
    def of(cls, folder: str | None) -> RecordSettings:
        """A configuration's folder, or else the environment's; the rest from the environment."""
        read = os.environ.get
        folder = folder or read(ENVIRONMENT) or None
        if folder is None:
            return cls()
        layers = read(f"{ENVIRONMENT}_LAYERS")
        return cls(
            folder,
            every=_every(read(f"{ENVIRONMENT}_EVERY") or "1"),
            layers=parse_layers(layers) if layers else None,
            limit=parse_size(read(f"{ENVIRONMENT}_LIMIT") or "2GiB"),
        )


def _every(text: str) -> int:
    if not text.strip().isdecimal():
        raise UserError(f"{ENVIRONMENT}_EVERY={text!r} is no whole number; 1 keeps every step")
    return max(1, int(text))


def parse_layers(text: str) -> frozenset[int]:
    """From "0,5,10-12". Raises ValueError for anything else."""
    layers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if found is None:
            raise UserError(f"layers {text!r} are not of the form '0,5,10-12'")
        first, last = int(found[1]), int(found[2] or found[1])
        layers |= set(range(first, last + 1))
    return frozenset(layers)


def parse_size(text: str) -> int:
    """Bytes, from "2GiB", "500 MiB" or a plain number. Raises ValueError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2] not in _UNITS:
        raise UserError(f"size {text!r} is not of the form '2GiB'; units are {', '.join(u for u in _UNITS if u)}")
    return int(float(found[1]) * _UNITS[found[2]])


def _never_raises(method: Method) -> Method:
    """A method of the recorder whose first failure is one notice, after which nothing is recorded any more."""

    @functools.wraps(method)
    def guarded(self: MaskRecorder, *args: Any) -> Any:
        if not self.active:
            return None
        try:
            return method(self, *args)
        except Exception as error:  # a full disk must not end hours of denoising
            self.stop(f"{type(error).__name__}: {error}")
            return None

    return guarded  # type: ignore[return-value]


@dataclass
class _Pass:
    """One forward pass.

    layers: the name of the mask of each layer that is kept
    fresh:  the masks among them that are not on disk yet;  spare: those of other layers, which may be wanted later
    """

    moment: DenoisingStep
    layers: dict[int, str] = field(default_factory=dict)
    fresh: dict[str, _Packed] = field(default_factory=dict)
    spare: dict[str, _Packed] = field(default_factory=dict)


@dataclass
class MaskRecorder:
    """`begin` at each forward pass, `keep` for each mask made, `used` for each attention.

    A mask is written once, whatever layers and steps have it. Memory holds the masks of one forward pass. Files:
    one per pass with new masks, and index.json, whole after each pass. `Recording` reads them.
    layers: of the model;  active: False on all ranks but the first, and after `stop`
    """

    settings: RecordSettings
    layers: int
    active: bool = True
    bytes_written: int = 0
    stopped: str | None = None
    _names: dict[Hashable, str] = field(default_factory=dict)
    _files: dict[str, tuple[str, int]] = field(default_factory=dict)
    _grids: list[BlockGrid] = field(default_factory=list)
    _passes: list[dict[str, Any]] = field(default_factory=list)
    _current: _Pass | None = None
    _pending: dict[str, _Packed] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: str | None, group: SequenceGroup, layers: int) -> MaskRecorder:
        """folder: the configuration's `record`; without one, the environment's."""
        alone = not (dist.is_available() and dist.is_initialized())
        try:
            settings = RecordSettings.of(folder)
        except UserError as error:
            print(f"db-SP: not recording masks: {error}", file=sys.stderr)
            settings = RecordSettings()
        first = group.rank == 0 and (alone or dist.get_rank() == 0)
        return cls(settings, layers, active=settings.folder is not None and first)

    @property
    def wanted(self) -> bool:
        """Whether steps need to be told apart, on every rank."""
        return self.settings.folder is not None

    @_never_raises
    def begin(self, moment: DenoisingStep) -> None:
        """Starts a forward pass."""
        self._finish()
        self._current = _Pass(moment)

    @_never_raises
    def keep(self, key: Hashable, layer: int, mask: BlockMask, lasting: bool) -> None:
        """Takes a mask that was made just now. key: by which `used` will speak of it, until another is kept by it

        lasting: whether it may be used in later passes, or for other layers, without being made again
        """
        self._names.pop(key, None)
        if not (lasting or (self._wants_step() and self._wants_layer(layer))):
            return
        name = f"{mask.fingerprint:016x}"
        self._names[key] = name
        if name not in self._files:
            self._pending[name] = mask.grid, pack_mask_bits(mask.bits)

    @_never_raises
    def used(self, layer: int, key: Hashable) -> None:
        """Notes that a layer's attention had the mask of this key."""
        now, name = self._current, self._names.get(key)
        if now is None:
            return
        if name is not None and self._wants_layer(layer):
            if name in self._pending:
                now.fresh[name] = self._pending[name]
            if name in now.fresh or name in self._files:
                now.layers[layer] = name
        elif name in self._pending:
            now.spare[name] = self._pending[name]
        if layer == self.layers - 1:
            self._finish()

    def stop(self, why: str) -> None:
        """Records nothing from now on, says so once, and in the index."""
        self.active, self.stopped, self._current = False, why, None
        self._pending.clear()
        print(f"db-SP: stopped recording masks to {self.settings.folder}: {why}; the run goes on", file=sys.stderr)
        try:
            if self._passes:
                self._write_index()
        except OSError:  # said already
            return

    def _wants_step(self) -> bool:
        return self._current is not None and self._current.moment.step % self.settings.every == 0

    def _wants_layer(self, layer: int) -> bool:
        return self.settings.layers is None or layer in self.settings.layers

    def _finish(self) -> None:
        """Writes the pass that ended, if it is wanted and had any mask. Else masks it used may be wanted later."""
        now, wanted, self._current = self._current, self._wants_step(), None
        if now is None:
            return
        self._pending = now.spare if wanted else now.spare | now.fresh
        if wanted and now.layers:
            self._write(now)

    def _write(self, now: _Pass) -> None:
        if self.settings.folder is None:
            return
        folder = Path(self.settings.folder)
        if not self._passes and (folder / INDEX).exists():
            raise FileExistsError(f"{folder} has a recording already; give another folder, or remove it")
        moment = {"generation": self._generation(now.moment), **asdict(now.moment)}
        if now.fresh:
            size = sum(packed.size for _, packed in now.fresh.values())
            if self.bytes_written + size > self.settings.limit:
                self.stop(f"the limit of {self.settings.limit} bytes was reached at step {now.moment.step}")
                return
            file = "g{generation}-step{step:04d}-pass{cfg_branch}.safetensors".format(**moment)
            self.bytes_written += _write_fresh(folder / file, now.fresh)
            for name, (grid, _) in now.fresh.items():
                if grid not in self._grids:
                    self._grids.append(grid)
                self._files[name] = file, self._grids.index(grid)
        self._passes.append({**moment, "masks": now.layers})
        self._write_index()

    def _generation(self, moment: DenoisingStep) -> int:
        """Counts how often the steps began anew."""
        if not self._passes:
            return 0
        last = self._passes[-1]
        again = (moment.step, moment.cfg_branch) <= (last["step"], last["cfg_branch"])
        return int(last["generation"]) + int(again)

    def _write_index(self) -> None:
        content = {
            "format": "db-SP mask recording 1",
            "layers": self.layers,
            "every": self.settings.every,
            "bytes": self.bytes_written,
            "stopped": self.stopped,
            "grids": [asdict(grid) for grid in self._grids],
            "masks": self._files,
            "passes": self._passes,
        }
        write_atomically(Path(self.settings.folder or ".") / INDEX, json.dumps(content) + "\n")


def _write_fresh(path: Path, fresh: dict[str, _Packed]) -> int:
    tensors = {name: ByteTensor(packed.shape, [packed.tobytes()]) for name, (_, packed) in fresh.items()}
    return write_byte_tensors(path, tensors, {})
