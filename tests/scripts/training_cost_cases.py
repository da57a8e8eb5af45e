"""What the workers of test_training_cost run: one attention and its backward, with every byte counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest.mock import patch

import torch

from cases import Case, Inputs
from dbsp_core import DualBalancedAttention, SequenceGroup, make_plan
from dbsp_core.cost.latency import AttentionShape
from dbsp_core.layout.strategy import Strategy
from scripts.reproduce.training_cost import saved_bytes, sent_backward, sent_forward

Bytes = tuple[float, float]
"""Exchanged, and handed over."""


@dataclass
class _Counter:
    """Bytes that leave this rank."""

    exchanged: int = 0
    handed_over: int = 0
    saved: int = 0
    _stop: list = field(default_factory=list)

    def taken(self) -> Bytes:
        found = (float(self.exchanged), float(self.handed_over))
        self.exchanged = self.handed_over = 0
        return found

    def __enter__(self) -> _Counter:
        all_to_all, shift = SequenceGroup.all_to_all, SequenceGroup.shift

        def counted_exchange(group, sent, receive_splits, send_splits):
            token = sent[0].nbytes if len(sent) else 0
            self.exchanged += (sum(send_splits) - send_splits[group.rank]) * token
            return all_to_all(group, sent, receive_splits, send_splits)

        def counted_shift(group, sent, to, received_shape, source):
            self.handed_over += sent.nbytes
            return shift(group, sent, to, received_shape, source)

        def pack(tensor):
            self.saved += tensor.nbytes
            return tensor

        self._stop = [
            patch.object(SequenceGroup, "all_to_all", counted_exchange),
            patch.object(SequenceGroup, "shift", counted_shift),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ]
        for one in self._stop:
            one.__enter__()
        return self

    def __exit__(self, *error) -> None:
        for one in reversed(self._stop):
            one.__exit__(*error)


def counted_and_modelled(rank: int, world: int, case: Case) -> list[tuple[Bytes | float, Bytes | float]]:
    """Pairs of forward's bytes sent, backward's, and what is kept in between, of this rank."""
    given = Inputs.of(case, rank)
    plan = make_plan(given.mask, Strategy.parse(case.strategy), case.planner, layout=given.layout)
    attend = DualBalancedAttention.prepare(plan, given.mask, given.layout, SequenceGroup.of(), n_local=None)
    local = [t.to(case.dtype).requires_grad_(True) for t in given.local]
    with _Counter() as counter:
        out = attend(*local)
        forward, saved = counter.taken(), float(counter.saved)
        out.sum().backward()
        backward = counter.taken()
    shape = AttentionShape(case.batch, case.heads, case.tokens, case.width, case.dtype.itemsize)
    modelled = [
        (float(sent.exchanged[rank]), float(sent.handed_over[rank]))
        for sent in (sent_forward(plan, shape, given.layout), sent_backward(plan, shape, given.layout))
    ]
    kept = float(saved_bytes(plan, shape, given.layout)[rank])
    return [(forward, modelled[0]), (backward, modelled[1]), (saved, kept)]
