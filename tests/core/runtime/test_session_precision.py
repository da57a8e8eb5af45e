"""Sessions whose exchanges are int8: results, bytes, and masks that don't see any of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from dbsp_core.masks.grid import Video
from dbsp_core.reports.observer import run_observer
from tests.core.runtime.session_cases import PREDICTED, Session
from tests.support.oracle import rounded_to_int8
from tests.support.thread_group import Meeting

INT8 = {"precision": "int8"}
WINDOW = {"mask": {"source": "window", "window": [3, 5, 7], "block_q": 16, "block_k": 16}}
ONE, TWO = (), (Video((2, 5, 9), 3),)
"""Videos in addition to the first one."""


class Int8Session(Session):
    """A session compared with attention to rounded numbers, under the mask of those that are not rounded."""

    @staticmethod
    def as_sent(full: list[torch.Tensor]) -> list[torch.Tensor]:
        return rounded_to_int8(*full)


@dataclass
class Transport:
    """Bytes that ranks send to others while they are watched."""

    watched: set[int] = field(default_factory=set)
    sent: Counter[int] = field(default_factory=Counter)


def attended(
    rank: int, world: int, settings: dict[str, Any], strategy: str, more: tuple[Video, ...], transport: Transport
) -> tuple[float, int, int]:
    """Runs two passes. Returns the error of the second, its bytes as reported, and its bytes as sent."""
    session = Int8Session(settings | {"report": "nowhere"}, strategy)
    for timestep in (900.0, 800.0):
        if timestep == 800.0:
            transport.watched.add(rank)
        error = session.attend(timestep, thw=(4, 6, 10), text_tokens=7, more=more)
    transport.watched.discard(rank)
    observer = run_observer(session.inner)
    assert observer is not None
    sent = observer.calls[-1].sent
    return error, sent.dispatch + sent.chunks + sent.combine, transport.sent[rank]


@contextmanager
def transported() -> Iterator[Transport]:
    """Counts what watched ranks send within the block."""
    transport, post = Transport(), Meeting.post

    def counted(meeting: Meeting, rank: int, kind: str, parcels: dict[int, torch.Tensor]) -> int:
        if rank in transport.watched:
            transport.sent[rank] += sum(parcel.nbytes for to, parcel in parcels.items() if to != rank)
        return post(meeting, rank, kind, parcels)

    with mock.patch.object(Meeting, "post", counted):
        yield transport


WAYS = [
    (2, "U2R1", WINDOW, ONE), (2, "U1R2", WINDOW, TWO), (4, "U2R2", WINDOW, ONE), (3, "U1R3", WINDOW, ONE),
    (4, "U2R2", WINDOW, TWO), (3, "U1R3", PREDICTED, TWO),
    (2, "U1R2", PREDICTED, ONE), (4, "U4R1", PREDICTED, TWO), (1, "U1R1", WINDOW, ONE),
]  # fmt: skip


@pytest.mark.parametrize(("world", "strategy", "settings", "more"), WAYS)
def test_equals_one_process_and_sends_what_is_reported(threads, world, strategy, settings, more):
    """Predicts masks from queries and keys that are not rounded."""
    with transported() as transport:
        found = threads(world).run(attended, settings | INT8, strategy, more, transport)
    for error, reported, sent in found:
        assert error <= 1e-5
        assert reported < sent if settings is PREDICTED else reported == sent, "predicting sends, too"


def test_int8_sends_less(threads):
    def sent(settings: dict[str, Any]) -> list[int]:
        with transported() as transport:
            return [sent for _, _, sent in threads(2).run(attended, settings, "U1R2", ONE, transport)]

    for less, more in zip(sent(WINDOW | INT8), sent(WINDOW), strict=True):
        assert 0 < less < 0.4 * more
