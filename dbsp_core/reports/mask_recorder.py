"""Records a run's masks as mask files in a folder. An error stops the recording, not the run."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import CANONICAL
from dbsp_core.masks.mask_file import MaskLayout, mask_file_bytes
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.runtime.session_observer import SessionObserver
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import parse_size, require_folder_path, write_atomically
from dbsp_core.utils.process import RECORD, RECORD_EVERY, RECORD_LAYERS, RECORD_LIMIT, environment_value, log

INDEX = "index.json"
_TAKEN = "already has a recording, maybe of a run in progress; give another folder, or remove it"


def require_new_recording(folder: Path, what: str) -> None:
    """Raises UserError if masks cannot be recorded to the folder, or it has a recording, of one transformer or two."""
    require_folder_path(folder, what)
    if any(os.path.lexists(recording / INDEX) for recording in (folder, *folder.glob("transformer*"))):
        raise UserError(f"{what} {folder} {_TAKEN}")


@dataclass(frozen=True)
class RecordSettings:
    """Settings of a `MaskRecorder`; without a folder, nothing is recorded."""

    folder: str | None = None
    every: int = 1  # record steps that are multiples of this
    layers: frozenset[int] | None = None  # layers to record; None: all
    limit: int = 2 * 2**30  # maximum bytes on disk

    @classmethod
    def from_environment(cls, folder: str | None) -> RecordSettings:
        """Reads the settings from the environment, if there is a folder."""
        if folder is None:
            return cls()
        every = environment_value(RECORD_EVERY) or "1"
        if not re.fullmatch(r"\d{1,9}", every.strip()):
            raise UserError(f"{RECORD_EVERY} must be a number of steps, got {every!r}; 1 records every step")
        layers, limit = environment_value(RECORD_LAYERS), environment_value(RECORD_LIMIT) or "2GiB"
        return cls(folder, max(1, int(every)), parse_layers(layers) if layers else None, parse_size(limit))


def parse_layers(text: str) -> frozenset[int]:
    """Reads "0,5,10-12". Raises UserError for anything else."""
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None:
            raise UserError(f"layers {text!r} must have the form '0,5,10-12'")
        layers |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(layers)


def _never_raises(method: Callable[..., None]) -> Callable[..., None]:
    """Wraps a method of the recorder: an error stops the recording with a warning."""

    @functools.wraps(method)
    def guarded(self: MaskRecorder, *args: Any, **options: Any) -> None:
        try:
            if self.active:
                method(self, *args, **options)
        except Exception as error:  # a full disk must not end hours of denoising
            self.stop(f"{type(error).__name__}: {error}")

    return guarded


@dataclass
class MaskRecorder(SessionObserver):
    """Writes the masks of one session to a folder.

    Each distinct mask is written once, to a mask file named by its fingerprint; index.json lists the mask of each
    layer in each finished pass. Memory holds the packed masks of one forward pass.
    """

    settings: RecordSettings
    layers: int  # number of the model's layers
    active: bool = True  # False on all ranks but the first, and after `stop`
    bytes_written: int = 0
    stopped: str | None = None
    _names: dict[Hashable, str] = field(default_factory=dict)  # masks' names by the session's key
    _pending: dict[str, bytes] = field(default_factory=dict)  # contents of masks not written yet
    _written: set[str] = field(default_factory=set)
    _moment: DenoisingStep | None = None  # of the current pass
    _of_layers: dict[int, str] = field(default_factory=dict)  # names of the pass's masks by recorded layer
    _used: set[str] = field(default_factory=set)  # names of all masks in the pass
    _passes: list[dict[str, Any]] = field(default_factory=list)
    _claimed: bool = False

    @classmethod
    def from_environment(cls, folder: str | None, group: SequenceGroup, layers: int) -> MaskRecorder:
        """Creates a recorder that writes to `folder`, if any; see `RecordSettings.from_environment`."""
        single = not (dist.is_available() and dist.is_initialized())
        first, settings = group.rank == 0 and (single or dist.get_rank() == 0), RecordSettings()
        try:
            settings = RecordSettings.from_environment(folder)
            if first and settings.folder is not None:
                require_new_recording(Path(settings.folder), f"${RECORD}")
        except UserError as error:
            log.warning("not recording masks: %s", error)
            first = False
        return cls(settings, layers, active=settings.folder is not None and first)

    @property
    def counts_steps(self) -> bool:  # type: ignore[override]
        """True on every rank if masks are recorded."""
        return self.settings.folder is not None

    @_never_raises
    def begin(self, step: DenoisingStep, *_: Any, **__: Any) -> None:
        self._finish()
        self._moment = step

    @_never_raises
    def mask_made(self, key: Hashable, layer: int, mask: BlockMask, lasting: bool) -> None:
        self._names.pop(key, None)
        if lasting or (self._records_step() and self._records_layer(layer)):
            name = self._names[key] = f"{mask.fingerprint:016x}"
            if name not in self._written:
                grid = mask.grid.with_orders((CANONICAL,))
                layout = MaskLayout(grid, mask.heads, orders=(mask.grid.orders,))
                self._pending[name] = mask_file_bytes(layout, [mask.bits])

    @_never_raises
    def mask_used(self, layer: int, key: Hashable) -> None:
        name = self._names.get(key)
        if self._moment is not None and name is not None and (name in self._pending or name in self._written):
            self._used.add(name)
            if self._records_layer(layer):
                self._of_layers[layer] = name
        if layer == self.layers - 1:
            self._finish()

    def stop(self, why: str) -> None:
        """Stops the recording with a warning and an entry in the index."""
        self.active, self.stopped, self._moment = False, why, None
        self._pending.clear()
        log.warning("stopped recording masks to %s: %s; the run continues", self.settings.folder, why)
        with suppress(OSError):  # the warning is logged already
            if self._passes:
                self._write_index()
            elif self._claimed:
                (Path(self.settings.folder or ".") / INDEX).unlink()

    def _records_step(self) -> bool:
        return self._moment is not None and self._moment.step % self.settings.every == 0

    def _records_layer(self, layer: int) -> bool:
        return self.settings.layers is None or layer in self.settings.layers

    def _finish(self) -> None:
        """Writes the finished pass if it is recorded and had masks; keeps its other masks for later steps."""
        moment, recorded, masks, used = self._moment, self._records_step(), self._of_layers, self._used
        self._moment, self._of_layers, self._used = None, {}, set()
        if moment is None:
            return
        new_files = (
            {name: self._pending.pop(name) for name in {*masks.values()} & {*self._pending}} if recorded else {}
        )
        self._pending = {name: content for name, content in self._pending.items() if name in used}
        if not recorded or not masks:
            return
        size = sum(map(len, new_files.values()))
        if self.bytes_written + size > self.settings.limit:
            self.stop(f"the limit of {self.settings.limit} bytes was reached at step {moment.step}")
            return
        # 1. Claim the folder with an empty index: of several runs, only the first records to it
        folder = Path(self.settings.folder or ".")
        if not self._claimed:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                os.close(os.open(folder / INDEX, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            except FileExistsError:
                raise FileExistsError(f"{folder} {_TAKEN}") from None
            self._claimed = True
        # 2. Write masks that no earlier pass had
        for name, content in new_files.items():
            write_atomically(folder / f"{name}.safetensors", content)
        self.bytes_written += size
        self._written.update(new_files)
        # 3. Add the pass to the index; a new generation begins when steps start over
        position, generation = (moment.step, moment.cfg_branch), 0
        if self._passes:
            last = self._passes[-1]
            generation = last["generation"] + int(position <= (last["step"], last["cfg_branch"]))
        step = {"generation": generation, "step": moment.step, "cfg_branch": moment.cfg_branch}
        self._passes.append({**step, "masks": masks})
        self._write_index()

    def _write_index(self) -> None:
        content = {
            "format": "db-SP mask recording 2",
            "layers": self.layers,
            "every": self.settings.every,
            "bytes": self.bytes_written,
            "stopped": self.stopped,
            "passes": self._passes,
        }
        write_atomically(Path(self.settings.folder or ".") / INDEX, json.dumps(content) + "\n")
