"""A session with what its configuration wants beside it: a recording of its masks, a report of its run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dbsp_core.comm.consistency import gather_texts
from dbsp_core.comm.groups import SequenceGroup, report_group
from dbsp_core.config.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.reports.mask_recorder import MaskRecorder
from dbsp_core.reports.observer import RunObserver
from dbsp_core.runtime.observer import SessionObserver
from dbsp_core.runtime.session import AttentionSession

__all__ = ["observed_session"]


def observed_session(
    config: DbspConfig,
    group: SequenceGroup,
    strategy: Strategy | None,
    heads: int,
    layers: int,
    steps: Callable[[], int | None] = lambda: None,
    generation: Callable[[], object] = lambda: None,
) -> AttentionSession:
    """An `AttentionSession` with observers. Collective: where one rank wants a report, all take part in it."""
    observers: list[SessionObserver] = [MaskRecorder.of(config.record, group, layers)]
    folder, control = config.report, group.control()
    if control.group is not None:
        folder = next(filter(None, gather_texts(control, folder or "", torch.device("cpu"))), None)
    if folder is not None:
        report_group(group)  # while no rank can have failed yet: making its process group is a collective
        observers.append(RunObserver(folder))
    return AttentionSession(config, group, strategy, heads, layers, steps, generation, observers)
