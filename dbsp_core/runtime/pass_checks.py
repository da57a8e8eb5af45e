"""Cross-rank checks of a forward pass: kept from its beginning to its first attention, where ranks compare once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dbsp_core.comm.consistency import agree
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.runtime.size_context import SizeContext
from dbsp_core.utils.errors import fingerprint_of

SIZES_DIFFER = "the size of the video differs on rank(s) {}; give all ranks the same input"
STEPS_DIFFER = "the denoising step or CFG pass differs on rank(s) {}; give all ranks the same timesteps"
GRIDS_DIFFER = "the video's block grid differs on rank(s) {}; it must be the same on every rank"
HARDWARE_DIFFERS = "the hardware file differs on rank(s) {}; it must be the same on every rank"
NEW_MASKS_DIFFER = "which masks are new differs on rank(s) {}; it must be the same on every rank"

_FINGERPRINTS = SIZES_DIFFER, STEPS_DIFFER, GRIDS_DIFFER, HARDWARE_DIFFERS, NEW_MASKS_DIFFER
"""Error messages about what ranks compare when a forward pass begins."""


class Meeting(Protocol):
    """Checks of a pass's inputs in a framework."""

    def check(self, problem: Exception | None, more: Mapping[str, int], free: int) -> list[tuple[int, ...]]:
        """Compares the inputs and the fingerprints in `more` (error message → number) across ranks. Collective.

        Returns:
            Each rank's four numbers, and `free`, which may differ.
        """


@dataclass(eq=False)
class PassChecks:
    """Checks of a forward pass, which run with its first attention.

    Attributes:
        size: The size of its videos, by which the session keeps what it knows of it; None until that is known.
        meeting: Checks of the transformer's inputs, if any.
        names: Cache keys of its masks.
        fingerprints: Fingerprints, by message.
    """

    group: SequenceGroup
    meeting: Meeting | None = None
    size: SizeContext | None = None
    names: dict[int, Hashable] = field(default_factory=dict)
    fingerprints: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_FINGERPRINTS, 0))

    def take(self, size: SizeContext, compared_under_debug: tuple[object, object] | None) -> None:
        """Takes what is known of the pass on this rank: its size, and under debug the arguments that it began with."""
        self.size, masks = size, size.masks
        self.names = masks.names or masks.ask_names()
        of_debug = [0, 0] if compared_under_debug is None else map(fingerprint_of, compared_under_debug)
        compared = *of_debug, fingerprint_of(size.grid), size.hardware_fingerprint, masks.fingerprint(self.names)
        self.fingerprints = dict(zip(_FINGERPRINTS, compared, strict=True))

    def check(self, problem: Exception | None, more: Mapping[str, int]) -> None:
        """Raises UserError on all ranks where one has a problem, or something differs, `more` included. Collective."""
        calls = 0 if self.size is None else self.size.keeper.calls
        control, fingerprints = self.group.control(), {**self.fingerprints, **more}
        if self.meeting is None:
            numbers = agree(
                control, fingerprints, problem=problem, numbers=[0, 0, 0, 0, calls]
            )  # as a meeting returns
        else:
            numbers = self.meeting.check(problem, fingerprints, calls)
        if self.size is not None and len({numbers[-1] for numbers in numbers}) > 1:
            self.size.keeper.restart()  # a rank has left a pass that others went on with
