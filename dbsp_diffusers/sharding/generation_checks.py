"""Checks that the ranks of one video are at the same pipeline call, with the same inputs.

Collectives match by order only: if a call fails on one rank and that rank continues with the next request, attentions
of two requests are mixed from then on. So at the first passes of a generation the first rank sends a header with the
number of its call and fingerprints of its arguments. In every pass all ranks use the first rank's inputs, so that
rounding in a text encoder or VAE does not differ. Each rank compares its own inputs with these on the device;
differences are raised at once with a header, else two passes later or at the end of the call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from dbsp_core.comm.consistency import agree
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.utils.errors import UserError, fingerprint_of

PASS, _DECODING, _CALL, _CALL_WITH_GENERATOR = range(4)  # kinds of exchanges with a header
_HEADER = 8  # length of a header
_LAST_BIT = 61  # of a drift mask; tensors beyond it share this bit
_ALIGNMENT = 16  # bytes, of tensors in the broadcast buffer; a multiple of every dtype's size
_NORM_TOLERANCE = 1e-2
_TOLERANCE = 2**-5  # largest relative distance of two tensors that rounding in a text encoder explains

CALLS_DIFFER = (
    "rank(s) {} are at a different pipeline call, probably because an earlier call failed there; abort a failed call "
    "on all ranks. The pipeline is usable: the next call that all ranks make together is compared afresh"
)
GENERATORS_DIFFER = (
    "some ranks passed a generator and others did not, or are at another call (rank(s) {}); pass generator= on all "
    "ranks with one seed, or on none"
)
TILES_DIFFER = (
    "the decoded latents differ in size, dtype or tiles on rank(s) {}, or cannot be decoded there; give all ranks the "
    "same latents and the same settings of the autoencoder's tiling and slicing"
)
DECODED_DIFFER = "the latents that are decoded differ on rank(s) {}; decode the same video on all ranks together"
NOT_NUMBERS = (
    "the latents became NaN on rank(s) {}: the transformer has computed NaN, or, with `guidance=True`, the output of "
    "a step's first CFG pass was copied before the second pass, when half of the ranks do not have it yet; remove "
    "`guidance`, or use the outputs of both passes after the second"
)
_DEVICES_DIFFER = "tensors differ in bytes or kind of device on rank(s) {}; load the pipeline alike on all ranks"


class Drift:
    """Detects tensors that differ from the first rank's, without waiting for the device.

    Each pass records differences as bits on the device and gathers all ranks' bits. Two passes later they have arrived
    on the host, equal on all ranks, and are raised.
    """

    def __init__(self, group: SequenceGroup) -> None:
        self._group = group
        self._messages: tuple[str, ...] = (NOT_NUMBERS,)  # by bit
        self._on_host = 0  # recorded bits that are not gathered yet
        self._on_device: torch.Tensor | None = None  # further bits, int64[1]
        self._passes = 0
        self._gathered: deque[tuple[int, tuple[str, ...], torch.Tensor, torch.cuda.Event | None]] = deque()
        """Pass number, messages, bits of all ranks int64[P], and the event of their copy to the host."""

    def compare(self, messages: Sequence[str], tensors: Sequence[torch.Tensor], first: Sequence[torch.Tensor]) -> None:
        """Records tensors that differ from the first rank's by more than rounding. Does not wait for the device.

        `messages` has each tensor's error message, equal on all ranks, with {} for the ranks.
        """
        self._messages = NOT_NUMBERS, *messages
        for number, (mine, values) in enumerate(zip(tensors, first, strict=True), 1):
            if mine is values:
                continue
            if mine.is_floating_point():
                self.note_not_numbers(mine.isnan().any() & ~values.isnan().any())
            self._note(min(number, _LAST_BIT), ~are_close(mine, values))

    def note_not_numbers(self, shown: torch.Tensor) -> None:
        """Records NaN in latents if bool[] `shown` is True. Does not wait for the device."""
        self._note(0, shown)

    def _note(self, bit: int, shown: torch.Tensor) -> None:
        if shown.device.type == "cpu":
            self._on_host |= int(shown) << bit
            return
        bits = shown.long().reshape(1) << bit
        self._on_device = bits if self._on_device is None else self._on_device | bits

    def gather(self, device: torch.device) -> None:
        """Gathers all ranks' recorded bits, on a device of the same type on all. Collective."""
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
        self._gathered.append((self._passes, self._messages, of_ranks, copied))

    def begin_pass(self) -> None:
        """Raises UserError on all ranks for bits gathered up to two passes ago."""
        self._passes += 1
        self.settle(self._passes - 2)

    def settle(self, last: int | None = None) -> None:
        """Raises UserError on all ranks for bits gathered up to pass `last`, or all. Waits for the device."""
        while self._gathered and (last is None or self._gathered[0][0] <= last):
            _, messages, of_ranks, copied = self._gathered.popleft()
            if copied is not None:
                copied.synchronize()
            self.raise_bits(messages, of_ranks.tolist())

    def raise_bits(self, messages: Sequence[str], bits_by_rank: Sequence[int]) -> None:
        """Raises UserError for the first bit that any rank has."""
        bit = next((bit for bit in range(_LAST_BIT + 1) if any(bits >> bit & 1 for bits in bits_by_rank)), None)
        if bit is not None:
            self.forget()
            ranks = [rank for rank, bits in enumerate(bits_by_rank) if bits >> bit & 1]
            raise UserError(messages[min(bit, len(messages) - 1)].format(ranks))

    def take(self) -> tuple[tuple[str, ...], int]:
        """Returns messages, and this rank's recorded bits that are not gathered. Waits for the device."""
        bits = self._on_host | (0 if self._on_device is None else int(self._on_device))
        self._on_host, self._on_device = 0, None
        return self._messages, bits

    def forget(self) -> None:
        """Resets after a failure."""
        self._on_host, self._on_device = 0, None
        self._gathered.clear()


class GenerationChecks:
    """Checks among the ranks of one video; counts the calls that this rank has begun."""

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self.calls = 0
        self.drift = Drift(group)

    def check_call(self, generator: bool, problem: Exception | None, device: torch.device | None) -> None:
        """Begins a pipeline call on all ranks with the state of the first rank's random number generators. Collective.

        Draws from torch's global generators are then equal on all ranks, and equal to a single process in that state.
        Without `device`, ranks keep their states. Raises UserError on all ranks if they are at different calls or one
        has a problem.
        """
        self.calls += 1
        self.drift.forget()  # from a failed call
        if self.group.size == 1:
            if problem is not None:
                raise problem
            return
        # torch's global generators that a pipeline on the device may use: functions that read and write their states
        generators: list[tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]] = []
        if device is not None:
            generators.append((torch.get_rng_state, torch.set_rng_state))
            if device.type != "cpu":
                gpu = torch.get_device_module(device)
                generators.append((partial(gpu.get_rng_state, device), partial(gpu.set_rng_state, device=device)))
        kind = _CALL_WITH_GENERATOR if generator else _CALL
        states = self.meet(kind, {}, [read() for read, _ in generators], problem=problem)
        for (_, write), state in zip(generators, states, strict=True):
            write(state.clone())

    def check_decoding(self, tiles: object, latents: Sequence[torch.Tensor]) -> None:
        """Raises UserError on all ranks unless they decode the same latents in equal `tiles` (by `repr`). Collective.

        Waits for the tensors' device. `tiles` include the shapes of latents.
        """
        described = tiles, [tensor.device.type for tensor in latents]
        self.meet(_DECODING, {TILES_DIFFER: fingerprint_of(described)}, latents, [DECODED_DIFFER] * len(latents))

    def meet(
        self,
        kind: int,
        fingerprints: Mapping[str, int],
        tensors: Sequence[torch.Tensor],
        messages: Sequence[str] = (),
        problem: Exception | None = None,
    ) -> list[torch.Tensor]:
        """Checks that all ranks are at the same exchange, and returns the first rank's tensors. Collective.

        A rank at another exchange receives the data all the same, so that collectives match, and adopts the first
        rank's call number. Waits for the device if tensors are compared. Raises UserError on all ranks if they are at
        different exchanges, anything differs, or one has a problem.

        Args:
            fingerprints: Fingerprints to compare by error message; their number depends on `kind` only.
            tensors: Tensors; shapes, dtypes and device types must be in the fingerprints.
            messages: Error message of each tensor that differs by more than rounding; empty: they may differ.
        """
        # 1. The first rank's header: [calls, kind, *fingerprints, 0, …, bytes on the host, bytes on the device]
        on_host, on_device = (
            sum(_room(tensor) for tensor in tensors if (tensor.device.type == "cpu") == is_host)
            for is_host in (True, False)
        )
        compared = {CALLS_DIFFER: self.calls, GENERATORS_DIFFER: kind, **fingerprints}
        mine = [*compared.values(), *[0] * (_HEADER - 2 - len(compared)), on_host, on_device]
        header = torch.tensor(mine, dtype=torch.int64, device="cpu")
        self.group.control().broadcast(header)
        of_first = header.tolist()
        self.calls = of_first[0]
        # 2. Its tensors; a rank at another exchange receives and discards the bytes
        first = self.first_rank_values(tensors) if of_first == mine else self._discarded(*of_first[-2:])
        # 3. Raise differences on all ranks
        if first and messages:
            self.drift.compare(messages, tensors, first)
        known, bits = self.drift.take()
        compared[_DEVICES_DIFFER] = fingerprint_of((on_host, on_device))
        numbers = agree(self.group.control(), compared, problem=problem, numbers=[bits])
        self.drift.raise_bits(known, [bits for (bits,) in numbers])
        return first

    @torch.no_grad()
    def first_rank_values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the first rank's tensors; shapes, dtypes and devices must be equal on all ranks. Collective.

        One broadcast for tensors on the device, and one for tensors on the host. The first rank gets its own tensors,
        other ranks new ones.
        """
        received = list(tensors)
        for is_host in (True, False):
            numbers = [number for number, tensor in enumerate(tensors) if (tensor.device.type == "cpu") == is_host]
            if numbers:
                group = self.group.control() if is_host else self.group
                values = _broadcast([tensors[number] for number in numbers], group)
                for number, value in zip(numbers, values, strict=True):
                    received[number] = value
        return received

    def _discarded(self, on_host: int, on_device: int) -> list[torch.Tensor]:
        """Receives the bytes that the first rank broadcasts, and returns no tensors."""
        if on_host:
            self.group.control().broadcast(torch.empty(on_host, dtype=torch.uint8, device="cpu"))
        if on_device:
            device = torch.device("cuda", torch.cuda.current_device())
            self.group.broadcast(torch.empty(on_device, dtype=torch.uint8, device=device))
        return []


def are_close(mine: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Returns bool[], True if a tensor equals the first rank's up to rounding. Does not wait for the device."""
    if not (mine.is_floating_point() or mine.is_complex()):
        return (mine == first).all()
    parts = [torch.view_as_real(part) if part.is_complex() else part.float() for part in (mine.detach(), first)]
    mine, first = (torch.nan_to_num(part, 0.0, 0.0, 0.0) for part in parts)
    norm, of_first = torch.linalg.vector_norm(mine), torch.linalg.vector_norm(first)
    largest, apart = torch.maximum(norm, of_first), torch.linalg.vector_norm(mine - first)
    return (apart <= _TOLERANCE * largest) & ((norm - of_first).abs() <= _NORM_TOLERANCE * largest)


def _broadcast(tensors: Sequence[torch.Tensor], group: SequenceGroup) -> list[torch.Tensor]:
    """Broadcasts the first rank's tensors on one device; other ranks get views of a buffer. Collective."""
    rooms = [_room(tensor) for tensor in tensors]
    buffer = torch.empty(sum(rooms), dtype=torch.uint8, device=tensors[0].device)
    parts = [
        room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for room, tensor in zip(buffer.split(rooms), tensors, strict=True)
    ]
    if group.rank == 0:
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor)
    group.broadcast(buffer)
    return list(tensors) if group.rank == 0 else parts


def _room(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor in the broadcast buffer."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
