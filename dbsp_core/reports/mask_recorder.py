"""Records the masks of a run in a folder, as mask files. The run goes on if this fails."""

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
from dbsp_core.masks.mask_writer import mask_file_bytes
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.runtime.session_observer import SessionObserver
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import parse_size, require_folder_path, write_atomically
from dbsp_core.utils.process import RECORD, RECORD_EVERY, RECORD_LAYERS, RECORD_LIMIT, environment_value, log

INDEX = "index.json"
_TAKEN = "has a recording already, maybe of another run at this time; give another folder, or remove it"


def require_new_recording(folder: Path, what: str) -> None:
    """Raises UserError unless masks can be recorded to the folder, which has no recording yet, of one model or two."""
    require_folder_path(folder, what)
    if any(os.path.lexists(recording / INDEX) for recording in (folder, *folder.glob("transformer*"))):
        raise UserError(f"{what} {folder} {_TAKEN}")


@dataclass(frozen=True)
class RecordSettings:
    """Settings of a `MaskRecorder`; it writes nothing without a folder."""

    folder: str | None = None
    every: int = 1  # distance of the recorded steps
    layers: frozenset[int] | None = None  # the recorded layers; None: all
    limit: int = 2 * 2**30  # most bytes on disk

    @classmethod
    def from_environment(cls, folder: str | None) -> RecordSettings:
        """Settings for a folder, from the environment; None: nothing is recorded."""
        if folder is None:
            return cls()
        every = environment_value(RECORD_EVERY) or "1"
        if not re.fullmatch(r"\d{1,9}", every.strip()):
            raise UserError(f"{RECORD_EVERY} must be a number of steps, got {every!r}; 1 keeps every step")
        layers, limit = environment_value(RECORD_LAYERS), environment_value(RECORD_LIMIT) or "2GiB"
        return cls(folder, max(1, int(every)), parse_layers(layers) if layers else None, parse_size(limit))


def parse_layers(text: str) -> frozenset[int]:
    """Reads "0,5,10-12". Raises UserError for anything else."""
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None:
            raise UserError(f"layers {text!r} are not of the form '0,5,10-12'")
        layers |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(layers)


def _never_raises(method: Callable[..., None]) -> Callable[..., None]:
    """Makes a method of the recorder stop the recording with a notice where it would raise."""

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

    A mask is written once for all layers and steps that have it, as a mask file named by its fingerprint. Memory holds
    the packed masks of one forward pass. index.json has the mask of each layer in each finished pass.
    """

    settings: RecordSettings
    layers: int  # number of the model's layers
    active: bool = True  # False on all ranks but the first, and after `stop`
    bytes_written: int = 0
    stopped: str | None = None
    _names: dict[Hashable, str] = field(default_factory=dict)  # of masks, by the session's key
    _pending: dict[str, bytes] = field(default_factory=dict)  # mask files that may have to be written
    _written: set[str] = field(default_factory=set)
    _moment: DenoisingStep | None = None  # of the pass that runs
    _of_layers: dict[int, str] = field(default_factory=dict)  # the pass's masks of recorded layers
    _used: set[str] = field(default_factory=set)  # all masks of the pass
    _passes: list[dict[str, Any]] = field(default_factory=list)
    _claimed: bool = False

    @classmethod
    def from_environment(cls, folder: str | None, group: SequenceGroup, layers: int) -> MaskRecorder:
        """Creates the recorder that writes to `folder`, or none; see `RecordSettings.from_environment`."""
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
                self._pending[name] = mask_file_bytes(mask)

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
        """Ends the recording, with a notice and an entry in the index."""
        self.active, self.stopped, self._moment = False, why, None
        self._pending.clear()
        log.warning("stopped recording masks to %s: %s; the run goes on", self.settings.folder, why)
        with suppress(OSError):  # the notice has been given
            if self._passes:
                self._write_index()
            elif self._claimed:
                (Path(self.settings.folder or ".") / INDEX).unlink()

    def _records_step(self) -> bool:
        return self._moment is not None and self._moment.step % self.settings.every == 0

    def _records_layer(self, layer: int) -> bool:
        return self.settings.layers is None or layer in self.settings.layers

    def _finish(self) -> None:
        """Writes the pass that ended, if it is recorded and had masks; other masks it used may be recorded later."""
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
        # 1. An empty index claims the folder: of several runs that record to it, only the first does
        folder = Path(self.settings.folder or ".")
        if not self._claimed:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                os.close(os.open(folder / INDEX, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            except FileExistsError:
                raise FileExistsError(f"{folder} {_TAKEN}") from None
            self._claimed = True
        # 2. Masks that no earlier pass had
        for name, content in new_files.items():
            write_atomically(folder / f"{name}.safetensors", content)
        self.bytes_written += size
        self._written.update(new_files)
        # 3. The pass; a generation begins where steps begin again
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
