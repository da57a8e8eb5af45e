"""Cross-rank checks of a forward pass: kept from its beginning to its first attention, where ranks compare once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dbsp_core.comm.consistency import agree
from dbsp_core.comm.groups import SequenceGroup
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


@dataclass(frozen=True, eq=False)
class PassChecks:
    """What ranks compare of a forward pass, at its first attention.

    Attributes:
        meeting: Checks of the transformer's inputs, if any.
        compared: What must be equal, in the order of `_FINGERPRINTS`; Nones on a rank that has a problem.
        calls: Calls with predicted masks of this size so far, which differ if a rank has left a pass.
    """

    group: SequenceGroup
    meeting: Meeting | None = None
    compared: Sequence[object] = (None,) * len(_FINGERPRINTS)
    calls: int = 0

    def check(self, problem: Exception | None, more: Mapping[str, int]) -> bool:
        """Raises UserError on all ranks where one has a problem, or something differs, `more` included. Collective.

        Returns:
            True if all ranks have made equal numbers of calls.
        """
        fingerprints = {**dict(zip(_FINGERPRINTS, map(fingerprint_of, self.compared), strict=True)), **more}
        if self.meeting is None:
            # One number more than a framework's: where only some ranks compare inputs, all see a difference.
            numbers = agree(self.group.control(), fingerprints, problem=problem, numbers=[0, 0, 0, 0, self.calls])
        else:
            numbers = self.meeting.check(problem, fingerprints, self.calls)
        return len({of_rank[-1] for of_rank in numbers}) == 1
