"""Makes sessions with the observers that a configuration asks for: a recording of masks, a report of the run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace

import torch

from dbsp_core.comm.consistency import gather_texts
from dbsp_core.comm.groups import SequenceGroup, report_group
from dbsp_core.config.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.schedule import DenoisingStep, StepClock
from dbsp_core.planning.plan import Plan
from dbsp_core.reports.mask_recorder import MaskRecorder
from dbsp_core.reports.observer import RunObserver, run_observer
from dbsp_core.runtime.session.observer import AttentionEnded, SessionObserver
from dbsp_core.runtime.session.session import AttentionSession

__all__ = ["observed_session"]


def observed_session(
    config: DbspConfig,
    group: SequenceGroup,
    strategy: Strategy | None,
    heads: int,
    layers: int,
    steps: Callable[[], int | None] = lambda: None,
    clock: StepClock | None = None,
    before: AttentionSession | None = None,
) -> AttentionSession:
    """An `AttentionSession` with observers. Collective: if one rank wants a report, all take part in it.

    `before` is the session of a transformer that takes turns with this one. Its report is about both, with this one's
    layers after its own.
    """
    observers: list[SessionObserver] = [MaskRecorder.of(config.record, group, layers)]
    folder, control = config.report, group.control()
    if not control.alone:
        folder = next(filter(None, gather_texts(control, folder or "")), None)
    first = None if before is None else run_observer(before)
    if before is not None and first is not None:
        observers.append(_LayersAfter(first, before.layers))
    elif folder is not None and before is None:
        report_group(group)  # collective at the first call: now, before a rank can have failed
        observers.append(RunObserver(folder))
    return AttentionSession(config, group, strategy, heads, layers, steps, clock or StepClock(), observers)


@dataclass
class _LayersAfter(SessionObserver):
    """Passes a second session's events to an observer, with its layers numbered after those of the first."""

    inner: SessionObserver
    layers: int

    @property
    def compares(self) -> bool:  # type: ignore[override]
        return self.inner.compares

    def begin(
        self, step: DenoisingStep, timestep: torch.Tensor | float | None, cfg_branch: int | None, index: int | None
    ) -> None:
        self.inner.begin(step, timestep, cfg_branch, index)

    def attention_begins(self, device: torch.device) -> None:
        self.inner.attention_begins(device)

    def attention_ends(self, ended: AttentionEnded) -> None:
        key, latest = (self.layers, ended.key), ended.latest
        named: dict[Hashable, Plan] = {key: latest[ended.key]} if ended.key in latest else {}
        self.inner.attention_ends(replace(ended, layer=ended.layer + self.layers, key=key, latest=named))

    def flush(self, latest: Mapping[Hashable, Plan]) -> None:
        self.inner.flush({(self.layers, key): plan for key, plan in latest.items()})
