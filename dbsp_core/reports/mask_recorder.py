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
from typing import Any, TypeVar

import torch.distributed as dist

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_writer import mask_file_bytes
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.runtime.session_state import SessionObserver
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


Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class RecordSettings:
    """Settings of a `MaskRecorder`; it writes nothing without a folder."""

    folder: str | None = None
    every: int = 1
    """Distance of the recorded steps."""
    layers: frozenset[int] | None = None
    """The recorded layers; None: all."""
    limit: int = 2 * 2**30
    """Most bytes on disk."""

    @classmethod
    def from_environment(cls, folder: str | None) -> RecordSettings:
        """Settings for a folder, from the environment; None: nothing is recorded."""
        if folder is None:
            return cls()
        every = environment_value(RECORD_EVERY) or "1"
        if not re.fullmatch(r"\d{1,9}", every.strip()):
            raise UserError(f"{RECORD_EVERY} must be a number of steps, got {every!r}; 1 keeps every step")
        layers = environment_value(RECORD_LAYERS)
        return cls(
            folder,
            every=max(1, int(every)),
            layers=parse_layers(layers) if layers else None,
            limit=parse_size(environment_value(RECORD_LIMIT) or "2GiB"),
        )


def parse_layers(text: str) -> frozenset[int]:
    """Reads "0,5,10-12". Raises UserError for anything else."""
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None:
            raise UserError(f"layers {text!r} are not of the form '0,5,10-12'")
        first, last = int(match[1]), int(match[2] or match[1])
        layers |= set(range(first, last + 1))
    return frozenset(layers)


def _never_raises(method: Method) -> Method:
    """Makes a method of the recorder stop the recording with a notice where it would raise."""

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
    """One forward pass: names of the masks of the recorded layers, and of all masks that it used."""

    moment: DenoisingStep
    layers: dict[int, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)


@dataclass
class MaskRecorder(SessionObserver):
    """Writes the masks of one session to a folder.

    A mask is written once for all layers and steps that have it, as a mask file named by its fingerprint. Memory holds
    the packed masks of one forward pass. index.json has the mask of each layer in each finished pass.
    """

    settings: RecordSettings
    layers: int  # Number of the model's layers
    active: bool = True  # False on all ranks but the first, and after `stop`
    bytes_written: int = 0
    stopped: str | None = None
    _claimed: bool = False
    _names: dict[Hashable, str] = field(default_factory=dict)
    _written: set[str] = field(default_factory=set)
    _passes: list[dict[str, Any]] = field(default_factory=list)
    _current: _Pass | None = None
    _pending: dict[str, bytes] = field(default_factory=dict)
    """Content of mask files that may have to be written."""

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
    def begin(
        self,
        step: DenoisingStep,
        timestep: object = None,
        cfg_branch: int | None = None,
        index: int | None = None,
    ) -> None:
        self._finish()
        self._current = _Pass(step)

    @_never_raises
    def mask_made(self, key: Hashable, layer: int, mask: BlockMask, lasting: bool) -> None:
        self._names.pop(key, None)
        if not (lasting or (self._wants_step() and self._wants_layer(layer))):
            return
        name = f"{mask.fingerprint:016x}"
        self._names[key] = name
        if name not in self._written:
            self._pending[name] = mask_file_bytes(mask)

    @_never_raises
    def mask_used(self, layer: int, key: Hashable) -> None:
        now, name = self._current, self._names.get(key)
        if now is None:
            return
        if name in self._pending or name in self._written:
            now.used.add(name)
            if self._wants_layer(layer):
                now.layers[layer] = name
        if layer == self.layers - 1:
            self._finish()

    def stop(self, why: str) -> None:
        """Ends the recording, with a notice and an entry in the index."""
        self.active, self.stopped, self._current = False, why, None
        self._pending.clear()
        log.warning("stopped recording masks to %s: %s; the run goes on", self.settings.folder, why)
        with suppress(OSError):  # the notice has been given
            if self._passes:
                self._write_index()
            elif self._claimed:
                (self._folder / INDEX).unlink()

    def _wants_step(self) -> bool:
        return self._current is not None and self._current.moment.step % self.settings.every == 0

    def _wants_layer(self, layer: int) -> bool:
        return self.settings.layers is None or layer in self.settings.layers

    def _finish(self) -> None:
        """Writes the pass that ended, if it is recorded and had masks; other masks it used may be recorded later."""
        now, wanted, self._current = self._current, self._wants_step(), None
        if now is None:
            return
        fresh = {name: self._pending.pop(name) for name in {*now.layers.values()} & {*self._pending}} if wanted else {}
        self._pending = {name: content for name, content in self._pending.items() if name in now.used}
        if wanted and now.layers:
            self._write(now, fresh)

    def _write(self, now: _Pass, fresh: dict[str, bytes]) -> None:
        size = sum(map(len, fresh.values()))
        if self.bytes_written + size > self.settings.limit:
            self.stop(f"the limit of {self.settings.limit} bytes was reached at step {now.moment.step}")
            return
        if not self._claimed:
            self._claim()
        for name, content in fresh.items():
            write_atomically(self._folder / f"{name}.safetensors", content)
        self.bytes_written += size
        self._written.update(fresh)
        moment = {"step": now.moment.step, "cfg_branch": now.moment.cfg_branch}
        self._passes.append({"generation": self._generation(now.moment), **moment, "masks": now.layers})
        self._write_index()

    @property
    def _folder(self) -> Path:
        return Path(self.settings.folder or ".")

    def _claim(self) -> None:
        """Makes the index, empty, so that of several runs that record to one folder only the first does."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(self._folder / INDEX, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            raise FileExistsError(f"{self._folder} {_TAKEN}") from None
        self._claimed = True

    def _generation(self, moment: DenoisingStep) -> int:
        """Returns the number of the generation: how often the steps have begun again."""
        if not self._passes:
            return 0
        last = self._passes[-1]
        again = (moment.step, moment.cfg_branch) <= (last["step"], last["cfg_branch"])
        return int(last["generation"]) + int(again)

    def _write_index(self) -> None:
        content = {
            "format": "db-SP mask recording 2",
            "layers": self.layers,
            "every": self.settings.every,
            "bytes": self.bytes_written,
            "stopped": self.stopped,
            "passes": self._passes,
        }
        write_atomically(self._folder / INDEX, json.dumps(content) + "\n")
