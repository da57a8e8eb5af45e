"""The ranks' agreement that they run the same generation.

Collectives match by their order only. If one rank's call fails, and the rank goes on with the next request, attentions
of two requests are mixed, in every later video too. So before the first attention of a generation the ranks compare,
over a group of their own, which call they are at and what they were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from dbsp_core.comm.consistency import require_equal
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.fingerprint import fingerprint_of

__all__ = ["GenerationAgreement", "PassInputs"]

_CPU = torch.device("cpu")
_SEED, _PASS, _DECODING = range(3)
"""Why a rank takes part in an exchange."""
_BUCKETS = 32
_TOLERANCE = 2**-5
"""Largest distance of two unit-length sketches that rounding in a text encoder explains; other prompts differ more."""

CALLS_DIFFER = (
    "the ranks are not at the same call: rank(s) {} have begun another number of them; a call that fails on one rank "
    "must be given up on all. The pipeline is usable: the next call that all ranks make together is compared afresh"
)
GENERATORS_DIFFER = (
    "some ranks were given a generator and others not, or are at another call (rank(s) {}); give generator= to all "
    "ranks, with one seed, or to none"
)
SIZES_DIFFER = "the size of the video differs on rank(s) {}, or its batch or dtype; give all ranks the same input"
STEPS_DIFFER = "the denoising steps, timestep or guidance differ on rank(s) {}; give all ranks the same"
LENGTHS_DIFFER = "the text or another condition differs in length on rank(s) {}; give all ranks the same prompt"
LATENTS_DIFFER = (
    "the latents that a generation begins with differ on rank(s) {}; give all ranks the same seed, or leave "
    "generator= out of calls of the pipeline that db-SP was enabled on"
)
CONDITIONS_DIFFER = "the text or another condition differs on rank(s) {}; give all ranks the same prompt and images"
TILES_DIFFER = (
    "what is decoded differs in size, dtype or tiles on rank(s) {}, or cannot be decoded there; give all ranks the "
    "same latents, with one setting of the autoencoder's tiling and slicing"
)
DECODED_DIFFER = "the latents that are decoded differ on rank(s) {}; decode the same video on all ranks together"


@dataclass(frozen=True)
class PassInputs:
    """The inputs of a forward pass that must be the same on all ranks.

    `size` (shapes and dtypes of the latents) and `steps` (timestep, guidance) are compared by `repr`, tensors up to
    rounding. These are whole on every rank, or left out.
    """

    size: object = None
    steps: object = None
    latents: Sequence[torch.Tensor] = ()
    conditions: Sequence[torch.Tensor] = ()


@dataclass
class GenerationAgreement:
    """The ranks that make one video together, and the number of calls that this rank has begun.

    Its collectives run on the group's control group and have one length: ranks at different ones receive each other's
    numbers, and raise.
    """

    group: SequenceGroup
    calls: int = field(default=0, init=False)

    def begin_call(self) -> None:
        """Counts a call of a pipeline, or a generation that begins outside one. Not collective."""
        self.calls += 1

    def seed(self, mine: int) -> int:
        """The first rank's seed. Raises UserError on all ranks unless they are at the same call. Collective."""
        return self._exchange(_SEED, mine, (0, 0, 0), torch.zeros(2 * _BUCKETS, device=_CPU))[0][2]

    def compare(self, inputs: PassInputs) -> None:
        """Raises UserError on all ranks unless they are at the same call with the same inputs. Collective.

        Waits for the tensors' device, to read two sketches of 32 numbers.
        """
        complaints = (SIZES_DIFFER, STEPS_DIFFER, LENGTHS_DIFFER)
        self._compare(_PASS, inputs, complaints, (LATENTS_DIFFER, CONDITIONS_DIFFER))

    def compare_decoding(self, tiles: object, latents: Sequence[torch.Tensor]) -> None:
        """Raises UserError on all ranks unless they decode the same latents, in `tiles` of one `repr`. Collective.

        Waits for the tensors' device, like `compare`.
        """
        inputs = PassInputs(tiles, latents=latents)
        self._compare(_DECODING, inputs, (TILES_DIFFER,) * 3, (DECODED_DIFFER,) * 2)

    def _compare(self, kind: int, inputs: PassInputs, of_marks: Sequence[str], of_tensors: Sequence[str]) -> None:
        """Raises one of the complaints on all ranks where the inputs differ. Collective."""
        lengths = [(tuple(one.shape), one.dtype) for one in inputs.conditions]
        marks = fingerprint_of(inputs.size), fingerprint_of(inputs.steps), fingerprint_of(lengths)
        sketches = torch.cat([_sketch(inputs.latents), _sketch(inputs.conditions)])
        rows = self._exchange(kind, 0, marks, sketches)
        for column, complaint in enumerate(of_marks, 3):
            require_equal(complaint, [row[column] for row in rows])
        bits = torch.tensor([row[3 + len(marks) :] for row in rows], device=_CPU)
        values = bits.view(torch.float64).unflatten(1, (2, _BUCKETS))
        for complaint, of_ranks in zip(of_tensors, values.unbind(1), strict=True):
            close = torch.cdist(of_ranks, of_ranks, compute_mode="donot_use_mm_for_euclid_dist") <= _TOLERANCE
            far = (~close[int(close.sum(dim=1).argmax())]).nonzero().flatten().tolist()
            if far:
                raise UserError(complaint.format(far))

    def _exchange(self, kind: int, seed: int, marks: Sequence[int], sketches: torch.Tensor) -> list[list[int]]:
        """Gathers from each rank: `kind`, its number of calls, seed, marks, and sketches as bits. Collective."""
        bits = sketches.to(torch.float64).view(torch.int64).tolist()
        rows = self.group.control().gather_integers([kind, self.calls, seed, *marks, *bits], _CPU)
        calls = [row[1] for row in rows]
        self.calls = max(calls)
        require_equal(CALLS_DIFFER, calls)
        require_equal(GENERATORS_DIFFER, [row[0] for row in rows])
        return rows


def _sketch(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """float64[32] on the CPU: a count sketch of tensors that are scaled to unit length.

    Values are added up with pseudo-random signs in 32 sums, which in expectation keeps squared distances (Charikar,
    Chen and Farach-Colton, 2002).
    """
    total: torch.Tensor | None = None
    for tensor in tensors:
        flat = torch.nan_to_num(tensor.detach().reshape(-1).float(), 0.0, 0.0, 0.0)
        index = torch.arange(len(flat), device=flat.device)
        signs = ((index * 0x9E3779B1 >> 28) & 1) * 2 - 1
        sums = F.pad(flat * signs, (0, -len(flat) % _BUCKETS)).view(-1, _BUCKETS).sum(dim=0)
        sums = sums / torch.linalg.vector_norm(flat).clamp_min(1e-30)
        total = sums if total is None else total + sums.to(total.device)
    return torch.zeros(_BUCKETS, dtype=torch.float64, device=_CPU) if total is None else total.to(_CPU, torch.float64)
