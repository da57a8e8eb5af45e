"""Agreement of the ranks that make one video on the call that they are at, and on its inputs.

Collectives match by their order only. If the call of one rank fails, and that rank goes on with the next request,
attentions of two requests are mixed, in every later video too. So the ranks compare the number of their calls, and
their inputs, before the first attention of a generation. In every pass they take the first rank's inputs, so that
rounding in a text encoder or VAE, which may differ between ranks, is the same on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dbsp_core.comm.consistency import check_consistent, require_equal
from dbsp_core.comm.failures import FailureBoard
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.utils.errors import UserError, fingerprint_of

__all__ = ["GenerationAgreement"]

_CALL, _PASS, _DECODING = range(3)
"""Why a rank takes part in an exchange."""
_MARKS = 4
"""Number of fingerprints in every exchange, so that ranks at different exchanges receive each other's."""
_ALIGNMENT = 16
"""Bytes to which tensors are aligned in the buffer that is broadcast; a multiple of every dtype's size."""
_NORM_TOLERANCE = 1e-2
_TOLERANCE = 2**-5
"""Largest distance of two tensors, relative to their norm, that rounding in a text encoder explains."""

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
ARGUMENTS_DIFFER = "the transformer's arguments {names} differ on rank(s) {{}}; give all ranks the same"
LATENTS_DIFFER = (
    "the latents that a generation begins with differ on rank(s) {}; give all ranks the same seed, or leave "
    "generator= out of calls of the pipeline that db-SP was enabled on"
)
CONDITION_DIFFERS = (
    "the text or another condition differs on rank(s) {{}} ({name}); give all ranks the same prompt, images and "
    "guidance"
)
TILES_DIFFER = (
    "what is decoded differs in size, dtype or tiles on rank(s) {}, or cannot be decoded there; give all ranks the "
    "same latents, with one setting of the autoencoder's tiling and slicing"
)
DECODED_DIFFER = "the latents that are decoded differ on rank(s) {}; decode the same video on all ranks together"


@dataclass
class GenerationAgreement:
    """The ranks that make one video together, and the number of calls that this rank has begun.

    Attributes:
        board: Where these ranks post failures, if anywhere. Its number of passes is made equal with that of calls.
    """

    group: SequenceGroup
    calls: int = field(default=0, init=False)
    board: FailureBoard | None = None

    def begin_call(self) -> None:
        """Counts a generation that begins outside a pipeline's calls. Not collective."""
        self.calls += 1

    def agree_on_call(self, generator: bool, problem: Exception | None, device: torch.device | None) -> None:
        """Begins a call of a pipeline on all ranks: they take the state of the first rank's random number generators.

        Collective. What is drawn from torch's global generators in the call is then the same on all ranks, and the
        same as in one process in the state of the first rank.

        Args:
            generator: Whether the call is given a generator.
            problem: Why this rank cannot make the call, if so.
            device: The device that the pipeline computes on; None: ranks keep their states.

        Raises:
            UserError: On all ranks, unless they are at the same call, or if any of them has a problem.
        """
        self.calls += 1
        if self.group.size == 1:
            if problem is not None:
                raise problem
            return
        self._exchange(_CALL, {GENERATORS_DIFFER: int(generator)})
        check_consistent(self.group.control(), problem, {})
        if device is None:
            return
        self._share_state(torch.get_rng_state, torch.set_rng_state)
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self._share_state(lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device))

    def _share_state(self, read: Callable[[], torch.Tensor], write: Callable[[torch.Tensor], None]) -> None:
        state = read()
        self.group.control().broadcast(state)
        write(state)

    def compare(
        self,
        steps: object,
        plain: Mapping[str, object],
        latents: Mapping[str, torch.Tensor],
        conditions: Mapping[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        """Returns the first rank's latents and conditions, once all ranks have found theirs the same. Collective.

        Waits for the tensors' device.

        Args:
            steps: Number of steps, guidance and position in the generation, compared by `repr`.
            plain: Arguments that are not tensors, by name, compared by `repr`.
            latents: Tensors of the sample, by name. Integers must be equal, floating-point numbers up to rounding.
            conditions: All other tensors, by name, compared like latents.

        Raises:
            UserError: On all ranks, unless they are at the same call with the same inputs.
        """
        names = ", ".join(plain) or "that are not tensors"
        values = {
            SIZES_DIFFER: [(tuple(one.shape), one.dtype) for one in latents.values()],
            STEPS_DIFFER: steps,
            LENGTHS_DIFFER: [(name, tuple(one.shape), one.dtype) for name, one in conditions.items()],
            ARGUMENTS_DIFFER.format(names=names): sorted(plain.items()),
        }
        tensors = [(LATENTS_DIFFER, one) for one in latents.values()]
        tensors += [(CONDITION_DIFFERS.format(name=name), one) for name, one in conditions.items()]
        return self._compare(_PASS, values, tensors)

    def compare_decoding(self, tiles: object, latents: Sequence[torch.Tensor]) -> None:
        """Raises UserError on all ranks unless they decode the same latents, in `tiles` of one `repr`. Collective.

        Waits for the tensors' device, like `compare`. `tiles` include the shapes of latents.
        """
        self._compare(_DECODING, {TILES_DIFFER: tiles}, [(DECODED_DIFFER, one) for one in latents])

    @torch.no_grad()
    def first_rank_values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the first rank's values of tensors whose shapes, dtypes and devices are the same on all ranks.

        Collective: one broadcast for the tensors on a device, on the group's backend, and one for those on the host.
        The first rank is returned its own tensors, other ranks new ones.
        """
        found = list(tensors)
        for on_host in (True, False):
            index = [place for place, one in enumerate(tensors) if (one.device.type == "cpu") == on_host]
            if index:
                group = self.group.control() if on_host else self.group
                for place, values in zip(index, _broadcast([tensors[place] for place in index], group), strict=True):
                    found[place] = values
        return found

    def _compare(
        self, kind: int, values: Mapping[str, object], tensors: Sequence[tuple[str, torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Returns the first rank's tensors. Raises one of the errors on all ranks where inputs differ. Collective."""
        self._exchange(kind, {complaint: fingerprint_of(value) for complaint, value in values.items()})
        own = [one for _, one in tensors]
        first = self.first_rank_values(own)
        differ = [int(not _are_close(*pair)) for pair in zip(own, first, strict=True)]
        for (complaint, _), of_ranks in zip(
            tensors, zip(*self.group.control().gather_integers(differ), strict=True), strict=True
        ):
            ranks = [rank for rank, differs in enumerate(of_ranks) if differs]
            if ranks:
                raise UserError(complaint.format(ranks))
        return first

    def _exchange(self, kind: int, marks: Mapping[str, int]) -> None:
        """Raises one of the errors on all ranks unless all are at the same call with the same marks. Collective."""
        passes = 0 if self.board is None else self.board.passes
        row = [kind, self.calls, passes, *marks.values(), *[0] * (_MARKS - len(marks))]
        kinds, calls, passed, *columns = zip(*self.group.control().gather_integers(row), strict=True)
        self.calls = max(calls)
        if self.board is not None:
            self.board.passes = max(passed)
        require_equal(CALLS_DIFFER, calls)
        if self.board is not None:
            self.board.met()
        require_equal(GENERATORS_DIFFER, kinds)
        for complaint, column in zip(marks, columns, strict=False):
            require_equal(complaint, column)


def _are_close(own: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Returns bool[]: whether a tensor is the first rank's, up to rounding."""
    if not (own.is_floating_point() or own.is_complex()):
        return (own == first).all()
    flat = [torch.view_as_real(one) if one.is_complex() else one.float() for one in (own.detach(), first)]
    one, other = (torch.nan_to_num(values, 0.0, 0.0, 0.0) for values in flat)
    norm, of_first = torch.linalg.vector_norm(one), torch.linalg.vector_norm(other)
    largest, apart = torch.maximum(norm, of_first), torch.linalg.vector_norm(one - other)
    return (apart <= _TOLERANCE * largest) & ((norm - of_first).abs() <= _NORM_TOLERANCE * largest)


def _broadcast(tensors: Sequence[torch.Tensor], group: SequenceGroup) -> list[torch.Tensor]:
    """Returns the first rank's tensors, of one device: its own, or views of a buffer. Collective."""
    first, ends = [], 0
    for one in tensors:
        first.append(ends)
        ends += -(-one.numel() * one.element_size() // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(ends, dtype=torch.uint8, device=tensors[0].device)
    parts = [
        buffer[begin : begin + one.numel() * one.element_size()].view(one.dtype).view(one.shape)
        for begin, one in zip(first, tensors, strict=True)
    ]
    if group.rank == 0:
        for part, one in zip(parts, tensors, strict=True):
            part.copy_(one)
    group.broadcast(buffer)
    return list(tensors) if group.rank == 0 else parts
