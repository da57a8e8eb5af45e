"""Agreement of the ranks that make one video on the call that they are at, and on its inputs.

Collectives match by their order only. If the call of one rank fails, and that rank goes on with the next request,
attentions of two requests are mixed, in every later video too. So the ranks compare the number of their calls, and
their inputs, before the first attention of a generation. In every pass they take the first rank's inputs, so that
rounding in a text encoder or VAE, which may differ between ranks, is the same on all. What a rank had is compared with
what it took, on the device; what that shows is raised two passes later, or at the end of a pipeline's call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from dbsp_core.comm.consistency import agree, require_equal
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.utils.errors import UserError, fingerprint_of

_CALL, _PASS, _DECODING = range(3)
"""Why a rank takes part in an exchange."""
_FINGERPRINTS = 4
"""Number of fingerprints that the first rank sends at every exchange of any kind."""
_MOST_BITS = 61
"""Tensors that are distinguished in one number; those after them share the last bit."""
_ALIGNMENT = 16
"""Bytes to which tensors are aligned in the buffer that is broadcast; a multiple of every dtype's size."""
_NORM_TOLERANCE = 1e-2
_TOLERANCE = 2**-5
"""Largest distance of two tensors, relative to their norm, that rounding in a text encoder explains."""

CALLS_DIFFER = (
    "rank(s) {} are at a different pipeline call, probably because an earlier call failed there; abort a failed call "
    "on all ranks. The pipeline is usable: the next call that all ranks make together is compared afresh"
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
NOT_NUMBERS = (
    "the latents became NaN on rank(s) {}: the transformer has computed NaN, or, with `guidance=True`, the output of "
    "a step's first CFG pass was copied before the second one, when half of the ranks do not have it yet; leave "
    "`guidance` out, or use the outputs of both passes after the second"
)
LATENTS_DRIFT = (
    "the latents differ on rank(s) {} within a generation; every pass has computed with rank 0's. Draw noise, in "
    "callbacks and loops too, from torch's generators with the same seed on all ranks"
)
CONDITIONS_DRIFT = (
    "the timestep, text or another condition differs on rank(s) {} within a generation; every pass has computed with "
    "rank 0's. Change what the transformer is given in the same way on all ranks"
)
_DRIFTS = (NOT_NUMBERS, LATENTS_DRIFT, CONDITIONS_DRIFT)


class Drift:
    """Tells all ranks what the tensors of each have shown within a generation, without a host wait.

    Each pass notes it on the device, and gathers what all ranks have noted. Two passes later that has long arrived on
    the host, the same on all ranks, and is raised there.
    """

    def __init__(self, group: SequenceGroup) -> None:
        self._group = group
        self._on_host = 0
        """Bits by number in `_DRIFTS`."""
        self._on_device: torch.Tensor | None = None
        """Further bits, int64[1]."""
        self._passes = 0
        self._gathered: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()
        """By the number of a pass, the bits of all ranks, int64[P], and the event of their arrival on the host."""

    def note(self, message: str, shown: torch.Tensor) -> None:
        """Notes one of `_DRIFTS` where bool[] `shown` is True. Does not wait for its device."""
        number = _DRIFTS.index(message)
        if shown.device.type == "cpu":
            self._on_host |= int(shown) << number
            return
        bits = shown.long().reshape(1) << number
        self._on_device = bits if self._on_device is None else self._on_device | bits

    def compare(self, message: str, mine: torch.Tensor, first: torch.Tensor) -> None:
        """Notes `message` unless a tensor is the first rank's, up to rounding, and NaN that the first rank has not."""
        if mine.is_floating_point():
            self.note(NOT_NUMBERS, mine.isnan().any() & ~first.isnan().any())
        self.note(message, ~are_close(mine, first))

    def gather(self, device: torch.device) -> None:
        """Tells all ranks what this one has noted, by way of a device that is of one type on all. Collective."""
        bits = torch.zeros(1, dtype=torch.int64, device=device)
        if self._on_device is not None:
            bits = self._on_device.to(device)
        group = self._group.for_host_tensors() if device.type == "cpu" else self._group
        of_ranks = group.all_gather_along(bits | self._on_host)  # int64[P]
        self._on_host, self._on_device = 0, None
        copied = None
        if of_ranks.is_cuda:
            pinned = torch.empty(of_ranks.shape, dtype=of_ranks.dtype, device="cpu", pin_memory=True)
            of_ranks = pinned.copy_(of_ranks, non_blocking=True)
            copied = torch.cuda.current_stream(device).record_event()
        self._gathered.append((self._passes, of_ranks, copied))

    def begin_pass(self) -> None:
        """Raises UserError, on all ranks, for what any of them has shown until the pass before the last."""
        self._passes += 1
        self._raise_shown(self._passes - 2)

    def end_call(self) -> None:
        """Raises UserError, on all ranks, for what any of them has shown. Waits for the device."""
        self._raise_shown(self._passes)

    def _raise_shown(self, last: int) -> None:
        while self._gathered and self._gathered[0][0] <= last:
            _, of_ranks, copied = self._gathered.popleft()
            if copied is not None:
                copied.synchronize()
            for number, message in enumerate(_DRIFTS):
                ranks = [rank for rank, bits in enumerate(of_ranks.tolist()) if bits >> number & 1]
                if ranks:
                    self.forget()
                    raise UserError(message.format(ranks))

    def forget(self) -> None:
        """Begins anew, after a failure."""
        self._on_host, self._on_device = 0, None
        self._gathered.clear()


@dataclass(frozen=True, eq=False)
class Meeting:
    """Numbers that ranks compare of an exchange in which the first rank has sent its state and its tensors.

    Attributes:
        numbers: Kind of exchange, number of calls, and a bit for each tensor that differs from the first rank's.
        fingerprints: Fingerprints of what must be equal, by message.
        messages: By tensor.
    """

    checks: GenerationChecks
    numbers: tuple[int, int, int]
    fingerprints: Mapping[str, int]
    messages: Sequence[str] = ()

    def check(
        self, problem: Exception | None = None, more: Mapping[str, int] | None = None, free: int = 0
    ) -> list[tuple[int, ...]]:
        """Raises UserError on all ranks unless all are at the same exchange with the same inputs. Collective.

        Args:
            problem: This rank's, if any.
            more: Further fingerprints to compare, by message.
            free: A number that may differ.

        Returns:
            The numbers of each rank, that number last.
        """
        control, fingerprints = self.checks.group.control(), {**self.fingerprints, **(more or {})}
        numbers = agree(control, fingerprints, problem=problem, numbers=[*self.numbers, free], meet=self._meet)
        for number, message in enumerate(self.messages):
            ranks = [rank for rank, numbers in enumerate(numbers) if numbers[2] >> min(number, _MOST_BITS) & 1]
            if ranks:
                raise UserError(message.format(ranks))
        return numbers

    def _meet(self, numbers: Sequence[Sequence[int]]) -> None:
        """Takes the numbers of all ranks. Raises UserError unless they are at the same exchange of the same call."""
        kinds, calls, *_ = zip(*numbers, strict=True)
        self.checks.calls = max(calls)
        require_equal(CALLS_DIFFER, calls)
        require_equal(GENERATORS_DIFFER, kinds)


@dataclass
class GenerationChecks:
    """The ranks that make one video together, and the number of calls that this rank has begun."""

    group: SequenceGroup
    calls: int = field(default=0, init=False)
    drift: Drift = field(init=False)

    def __post_init__(self) -> None:
        self.drift = Drift(self.group)

    def check_call(self, generator: bool, problem: Exception | None, device: torch.device | None) -> None:
        """Begins a call of a pipeline on all ranks: they take the state of the first rank's random number generators.

        Collective. What is drawn from torch's global generators in the call is then the same on all ranks, and the
        same as in one process in the state of the first rank.

        Args:
            generator: True if the call is given a generator.
            problem: Reason why this rank cannot make the call, if so.
            device: The device that the pipeline computes on; None: ranks keep their states.

        Raises:
            UserError: On all ranks, unless they are at the same call, or if any of them has a problem.
        """
        self.calls += 1
        self.drift.forget()  # of a call that failed
        if self.group.size == 1:
            if problem is not None:
                raise problem
            return
        generators = [] if device is None else _generators(device)
        states, meeting = self._meet(_CALL, {GENERATORS_DIFFER: int(generator)}, [read() for read, _ in generators])
        meeting.check(problem)
        for (_, write), state in zip(generators, states, strict=True):
            write(state.clone())

    def compare(
        self,
        steps: object,
        plain: Mapping[str, object],
        latents: Mapping[str, torch.Tensor],
        conditions: Mapping[str, torch.Tensor],
        begins: bool = True,
    ) -> tuple[list[torch.Tensor], Meeting]:
        """Returns the first rank's latents and conditions, and what ranks still have to compare. Collective.

        Waits for the tensors' device.

        Args:
            steps: Number of steps, guidance and position in the generation, compared by `repr`.
            plain: Arguments that are not tensors, by name, compared by `repr`.
            latents: Tensors of the sample, by name. Integers must be equal, floating-point numbers up to rounding.
            conditions: All other tensors, by name, compared like latents.
            begins: True if a generation begins with these latents.

        Raises:
            UserError: On a rank that is at another call, or has other arguments or tensors of other shapes; on the
                others, when they compare.
        """
        names = ", ".join(plain) or "that are not tensors"
        fingerprints = {
            SIZES_DIFFER: [(tuple(tensor.shape), tensor.dtype, tensor.device.type) for tensor in latents.values()],
            STEPS_DIFFER: steps,
            LENGTHS_DIFFER: [
                (name, tuple(tensor.shape), tensor.dtype, tensor.device.type) for name, tensor in conditions.items()
            ],
            ARGUMENTS_DIFFER.format(names=names): sorted(plain.items()),
        }
        messages = [LATENTS_DIFFER if begins else LATENTS_DRIFT] * len(latents)
        messages += [CONDITION_DIFFERS.format(name=name) for name in conditions]
        tensors = [*latents.values(), *conditions.values()]
        return self._meet(
            _PASS, {name: fingerprint_of(tensor) for name, tensor in fingerprints.items()}, tensors, messages
        )

    def compare_decoding(self, tiles: object, latents: Sequence[torch.Tensor]) -> None:
        """Raises UserError on all ranks unless they decode the same latents, in `tiles` of one `repr`. Collective.

        Waits for the tensors' device, like `compare`. `tiles` include the shapes of latents.
        """
        fingerprints = {TILES_DIFFER: fingerprint_of((tiles, [tensor.device.type for tensor in latents]))}
        _, meeting = self._meet(_DECODING, fingerprints, latents, [DECODED_DIFFER] * len(latents))
        meeting.check()

    @torch.no_grad()
    def first_rank_values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the first rank's values of tensors whose shapes, dtypes and devices are the same on all ranks.

        Collective: one broadcast for the tensors on a device, on the group's backend, and one for those on the host.
        The first rank is returned its own tensors, other ranks new ones.
        """
        received = list(tensors)
        for on_host in (True, False):
            index = [number for number, tensor in enumerate(tensors) if (tensor.device.type == "cpu") == on_host]
            if index:
                group = self.group.control() if on_host else self.group
                for number, values in zip(
                    index, _broadcast([tensors[number] for number in index], group), strict=True
                ):
                    received[number] = values
        return received

    def _meet(
        self, kind: int, fingerprints: Mapping[str, int], tensors: Sequence[torch.Tensor], messages: Sequence[str] = ()
    ) -> tuple[list[torch.Tensor], Meeting]:
        """Returns the first rank's tensors, and what is to be compared. Collective: the first rank says where it is.

        A rank that is elsewhere receives what the first rank sends all the same, and compares at once.
        """
        sizes = [
            sum(map(_room, (tensor for tensor in tensors if (tensor.device.type == "cpu") == cpu)))
            for cpu in (True, False)
        ]
        mine = [kind, self.calls, *fingerprints.values(), *[0] * (_FINGERPRINTS - len(fingerprints)), *sizes]
        header = torch.tensor(mine, dtype=torch.int64, device="cpu")
        self.group.control().broadcast(header)
        if header.tolist() != mine:
            self._discard(*header[-2:].tolist())
            Meeting(self, (kind, self.calls, 0), fingerprints).check()
            raise RuntimeError("the first rank is at another exchange, and no rank has said so")
        first = self.first_rank_values(tensors)
        differ = [not bool(are_close(*pair)) for pair in zip(tensors, first, strict=True)] if messages else []
        bits = sum({1 << min(number, _MOST_BITS) for number, differs in enumerate(differ) if differs})
        return first, Meeting(self, (kind, self.calls, bits), fingerprints, messages)

    def _discard(self, on_host: int, on_device: int) -> None:
        """Receives as many bytes as the first rank broadcasts."""
        if on_host:
            self.group.control().broadcast(torch.empty(on_host, dtype=torch.uint8, device="cpu"))
        if on_device:
            device = torch.device("cuda", torch.cuda.current_device())
            self.group.broadcast(torch.empty(on_device, dtype=torch.uint8, device=device))


_Generator = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]
"""Reads and writes the state of a random number generator."""


def _generators(device: torch.device) -> list[_Generator]:
    """Returns torch's global generators that a pipeline on a device draws from."""
    generators: list[_Generator] = [(torch.get_rng_state, torch.set_rng_state)]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        generators.append((partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)))
    return generators


def are_close(mine: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Returns bool[]: whether a tensor is the first rank's, up to rounding. Does not wait for the device."""
    if not (mine.is_floating_point() or mine.is_complex()):
        return (mine == first).all()
    parts = [torch.view_as_real(part) if part.is_complex() else part.float() for part in (mine.detach(), first)]
    mine, first = (torch.nan_to_num(part, 0.0, 0.0, 0.0) for part in parts)
    norm, of_first = torch.linalg.vector_norm(mine), torch.linalg.vector_norm(first)
    largest, apart = torch.maximum(norm, of_first), torch.linalg.vector_norm(mine - first)
    return (apart <= _TOLERANCE * largest) & ((norm - of_first).abs() <= _NORM_TOLERANCE * largest)


def _broadcast(tensors: Sequence[torch.Tensor], group: SequenceGroup) -> list[torch.Tensor]:
    """Returns the first rank's tensors, of one device: its own, or views of a buffer. Collective."""
    first, ends = [], 0
    for tensor in tensors:
        first.append(ends)
        ends += _room(tensor)
    buffer = torch.empty(ends, dtype=torch.uint8, device=tensors[0].device)
    parts = [
        buffer[begin : begin + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        for begin, tensor in zip(first, tensors, strict=True)
    ]
    if group.rank == 0:
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor)
    group.broadcast(buffer)
    return list(tensors) if group.rank == 0 else parts


def _room(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor in the buffer that is broadcast."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
