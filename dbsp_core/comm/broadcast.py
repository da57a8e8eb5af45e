"""Agreement of the ranks that make one video: which call they are at, and what they are given.

Collectives match by their order only. If the call of one rank fails, and that rank goes on with the next request,
attentions of two requests are mixed, in every later video too. So the ranks compare the number of their calls, and
their inputs, before the first attention of a generation. In every pass they take the first rank's inputs, so that
rounding in a text encoder or VAE, which may differ between ranks, is the same on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from dbsp_core.comm.consistency import check_consistent, require_equal
from dbsp_core.comm.failures import FailureBoard
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.utils.errors import UserError, fingerprint_of

__all__ = ["GenerationAgreement", "PassInputs"]

_CPU = torch.device("cpu")
_CALL, _PASS, _DECODING = range(3)
"""Why a rank takes part in an exchange."""
_MARKS = 4
_BUCKETS = 32
_ALIGNMENT = 16
"""Bytes to which tensors are aligned in the buffer that is broadcast; a multiple of every dtype's size."""
_MAGNITUDE_TOLERANCE = 1e-2
_TOLERANCE = 2**-5
"""Largest distance of two tensors, relative to their length, that rounding in a text encoder explains."""

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


@dataclass(frozen=True)
class PassInputs:
    """The inputs of a forward pass that must be the same on all ranks.

    Attributes:
        size: Shapes and dtypes of the sample, compared by `repr`.
        steps: Number of steps, guidance and place in the generation, compared by `repr`.
        plain: Arguments that are not tensors, by name, compared by `repr`.
        latents: Tensors of the sample, by name. Integers must be equal, floating-point numbers up to rounding.
        conditions: All other tensors, by name, compared like latents.
    """

    size: object = None
    steps: object = None
    plain: Mapping[str, object] = field(default_factory=dict)
    latents: Mapping[str, torch.Tensor] = field(default_factory=dict)
    conditions: Mapping[str, torch.Tensor] = field(default_factory=dict)


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
        rows = self._exchange(_CALL, [int(generator)])
        require_equal(GENERATORS_DIFFER, [row[0] for row in rows])
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

    def compare(self, inputs: PassInputs) -> None:
        """Raises UserError on all ranks unless they are at the same call with the same inputs. Collective.

        Waits for the tensors' device, to read a sketch of 33 numbers of each.
        """
        names = ", ".join(inputs.plain) or "that are not tensors"
        marks = {
            SIZES_DIFFER: inputs.size,
            STEPS_DIFFER: inputs.steps,
            LENGTHS_DIFFER: [(name, tuple(one.shape), one.dtype) for name, one in inputs.conditions.items()],
            ARGUMENTS_DIFFER.format(names=names): sorted(inputs.plain.items()),
        }
        tensors = [(LATENTS_DIFFER, one) for one in inputs.latents.values()]
        tensors += [(CONDITION_DIFFERS.format(name=name), one) for name, one in inputs.conditions.items()]
        self._compare(_PASS, marks, tensors)

    def compare_decoding(self, tiles: object, latents: Sequence[torch.Tensor]) -> None:
        """Raises UserError on all ranks unless they decode the same latents, in `tiles` of one `repr`. Collective.

        Waits for the tensors' device, like `compare`.
        """
        self._compare(_DECODING, {TILES_DIFFER: tiles}, [(DECODED_DIFFER, one) for one in latents])

    def first_rank_values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the first rank's values of tensors whose shapes, dtypes and devices are the same on all ranks.

        Collective: one broadcast for the tensors on a device, on the group's backend, and one for those on the host.
        The first rank is returned its own tensors, other ranks new ones.
        """
        found = list(tensors)
        for on_host in (True, False):
            places = [place for place, one in enumerate(tensors) if (one.device.type == "cpu") == on_host]
            if places:
                group = self.group.control() if on_host else self.group
                for place, values in zip(places, _broadcast([tensors[place] for place in places], group), strict=True):
                    found[place] = values
        return found

    def _compare(self, kind: int, marks: Mapping[str, object], tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Raises one of the complaints on all ranks where the inputs differ. Collective."""
        rows = self._exchange(kind, [fingerprint_of(value) for value in marks.values()])
        for column, complaint in enumerate(marks):
            require_equal(complaint, [row[column] for row in rows])
        if not tensors:
            return
        bits = _sketches([one for _, one in tensors]).view(torch.int64).flatten().tolist()
        gathered = self.group.control().gather_integers(bits)
        values = torch.tensor(gathered, device=_CPU).view(torch.float64).unflatten(1, (-1, 1 + _BUCKETS))
        for (complaint, one), of_ranks in zip(tensors, values.unbind(1), strict=True):
            close = _are_close(of_ranks, exact=not (one.is_floating_point() or one.is_complex()))
            far = (~close[int(close.sum(dim=1).argmax())]).nonzero().flatten().tolist()
            if far:
                raise UserError(complaint.format(far))

    def _exchange(self, kind: int, marks: Sequence[int]) -> list[list[int]]:
        """Gathers the marks of each rank. Collective.

        Rows have one length, so that ranks at different exchanges receive each other's kind and number of calls.
        """
        passes = 0 if self.board is None else self.board.passes
        row = [kind, self.calls, passes, *marks, *[0] * (_MARKS - len(marks))]
        rows = self.group.control().gather_integers(row)
        calls = [row[1] for row in rows]
        self.calls = max(calls)
        if self.board is not None:
            self.board.passes = max(row[2] for row in rows)
        require_equal(CALLS_DIFFER, calls)
        if self.board is not None:
            self.board.met()
        require_equal(GENERATORS_DIFFER, [row[0] for row in rows])
        return [row[3:] for row in rows]


def _are_close(of_ranks: torch.Tensor, *, exact: bool) -> torch.Tensor:
    """bool[ranks, ranks], which ranks have the same tensor, by their sketches [ranks, 1 + 32]."""
    lengths, sums = of_ranks[:, 0], of_ranks[:, 1:]
    apart = torch.cdist(sums, sums, compute_mode="donot_use_mm_for_euclid_dist")
    largest = 0.0 if exact else lengths.max()
    longer = (lengths[:, None] - lengths).abs()
    return (apart <= _TOLERANCE * largest) & (longer <= _MAGNITUDE_TOLERANCE * largest)


def _sketches(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """float64[tensors, 1 + 32] on the CPU: each tensor's length and count sketch; waits once for each device."""
    rows = [_sketch(one) for one in tensors]
    found = torch.empty(len(rows), 1 + _BUCKETS, dtype=torch.float64, device=_CPU)
    for device in {row.device for row in rows}:
        places = [place for place, row in enumerate(rows) if row.device == device]
        found[places] = torch.stack([rows[place] for place in places]).to(_CPU)
    return found


def _sketch(tensor: torch.Tensor) -> torch.Tensor:
    """float64[1 + 32]: a tensor's length, and 32 sums of its values with pseudo-random signs.

    In expectation sums keep squared distances (Charikar, Chen and Farach-Colton, 2002). Those of integers are exact.
    """
    flat = (torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()).reshape(-1)
    flat = torch.nan_to_num(flat.float(), 0.0, 0.0, 0.0) if flat.is_floating_point() else flat.double()
    index = torch.arange(len(flat), device=flat.device)
    signs = ((index * 0x9E3779B1 >> 28) & 1) * 2 - 1
    sums = F.pad(flat * signs, (0, -len(flat) % _BUCKETS)).view(-1, _BUCKETS).sum(dim=0)
    return torch.cat([torch.linalg.vector_norm(flat)[None], sums]).double()


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
