"""Sessions whose exchanges are int8: results, bytes, rejected gradients, and masks that don't see any of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from dbsp_core import SequenceGroup, Strategy
from dbsp_core.config import DbspConfig
from dbsp_core.masks.grid import Video
from dbsp_core.reports.observer import observed_session, run_observer
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.sources import LocalQK
from tests.support.oracle import rounded_to_int8
from tests.support.single_process import masked_attention
from tests.support.thread_group import Meeting
from tests.support.thread_ranks import once

HEADS, WIDTH = 5, 24
INT8 = {"precision": "int8"}
BLOCKS = {"block_q": 16, "block_k": 16}
WINDOW = {"mask": {"source": "window", "window": [3, 5, 7], **BLOCKS}}
PREDICTED = {"mask": {"source": "sparge", "cdf": 0.6, "similarity": -1.0, **BLOCKS}}
ONE, TWO = (Video((4, 6, 10), 7),), (Video((4, 6, 10), 7), Video((2, 5, 9), 3))


@dataclass
class Transport:
    """Bytes that ranks send to others, of those that are watched."""

    watched: set[int] = field(default_factory=set)
    sent: dict[int, int] = field(default_factory=dict)

    def post(self, post: Any, meeting: Meeting, rank: int, kind: str, parcels: dict[int, torch.Tensor]) -> int:
        if rank in self.watched:
            others = sum(parcel.nbytes for to, parcel in parcels.items() if to != rank)
            self.sent[rank] = self.sent.get(rank, 0) + others
        return post(meeting, rank, kind, parcels)


def attended(
    rank: int, world: int, settings: dict[str, Any], strategy: str, videos: tuple[Video, ...], transport: Transport
) -> tuple[float, int, int]:
    """Runs two passes. Returns the error of the second, its bytes as reported, and its bytes as sent."""
    config = DbspConfig.load(settings | {"report": "nowhere"})
    session = observed_session(config, SequenceGroup.from_group(), Strategy.parse(strategy), HEADS, 1)
    for timestep in (900.0, 800.0):
        layout = session.begin(*videos, timestep=timestep)
        full, expected = once(partial(alone, config, videos, timestep, layout.tokens))
        token, slot = (torch.from_numpy(one) for one in layout.tokens_at(rank))
        local = [torch.full((1, HEADS, layout.shard, WIDTH), 50.0) for _ in full]
        for shard, whole in zip(local, full, strict=True):
            shard[:, :, slot] = whole[:, :, token]
        if timestep == 800.0:
            transport.watched.add(rank)
        out = session.attend(0, *local)
        transport.watched.discard(rank)
    observer = run_observer(session)
    assert observer is not None
    sent = observer.calls[-1].sent
    error = float((out[:, :, slot] - expected[:, :, token]).abs().max())
    return error, sent.dispatch + sent.chunks + sent.combine, transport.sent.get(rank, 0)


def alone(
    config: DbspConfig, videos: tuple[Video, ...], timestep: float, tokens: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns q, k and v of all tokens, and attention to them as rounded, under the mask of them unrounded."""
    generator = torch.Generator().manual_seed(int(timestep))
    full = [torch.randn(1, HEADS, tokens, WIDTH, generator=generator) for _ in range(3)]
    full[1] += 3 * torch.randn(1, HEADS, 1, WIDTH, generator=generator)
    provider = MaskProvider(config.mask, config.dense_schedule, HEADS, 1, lambda: None)
    provider.begin(videos, timestep)
    mask = provider.mask(0, LocalQK.alone(full[0], full[1]))
    sent = rounded_to_int8(*full) if config.precision == "int8" else full
    return full, masked_attention(*sent, mask)


@contextmanager
def transported() -> Iterator[Transport]:
    """Counts what is sent from rank to rank within the block."""
    transport, post = Transport(), Meeting.post

    def counted(meeting: Meeting, *args: Any) -> int:
        return transport.post(post, meeting, *args)

    with mock.patch.object(Meeting, "post", counted):
        yield transport


WAYS = [
    (2, "U2R1", WINDOW, ONE), (2, "U1R2", WINDOW, TWO), (4, "U2R2", WINDOW, ONE), (3, "U1R3", WINDOW, ONE),
    (4, "U2R2", WINDOW, TWO), (3, "U1R3", PREDICTED, TWO),
    (2, "U1R2", PREDICTED, ONE), (4, "U4R1", PREDICTED, TWO), (1, "U1R1", WINDOW, ONE),
]  # fmt: skip


@pytest.mark.parametrize(("world", "strategy", "settings", "videos"), WAYS)
def test_equals_one_process_and_sends_what_is_reported(threads, world, strategy, settings, videos):
    """Predicts masks from queries and keys that are not rounded."""
    with transported() as transport:
        found = threads(world).run(attended, settings | INT8, strategy, videos, transport)
    for error, reported, sent in found:
        assert error <= 1e-5
        assert reported < sent if settings is PREDICTED else reported == sent, "predicting sends, too"


def test_int8_sends_less(threads):
    def sent(settings: dict[str, Any]) -> list[int]:
        with transported() as transport:
            return [sent for _, _, sent in threads(2).run(attended, settings, "U1R2", ONE, transport)]

    for less, more in zip(sent(WINDOW | INT8), sent(WINDOW), strict=True):
        assert 0 < less < 0.4 * more
