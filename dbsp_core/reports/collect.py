"""Makes one report, and its files, from the records of all ranks, which synchronise once after a run."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save

from dbsp_core.comm.consistency import check_consistent, gather_texts
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.cost.machine import device_class
from dbsp_core.layout.strategy import Strategy
from dbsp_core.reports.observer import REPORTS, ObservedCall, RunObserver, run_observer
from dbsp_core.reports.page import balance_picture, report_page
from dbsp_core.reports.run_report import CallColumns, Environment, RankTotals, RunReport
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_core.utils.files import require_folder_path, user_path, write_atomically
from dbsp_core.utils.process import installed_version, package_versions

if TYPE_CHECKING:
    from dbsp_core.planning.plan import Plan
    from dbsp_core.runtime.session import AttentionSession


REPORT, PAGE, PICTURE, LATENTS = "report.json", "report.html", "balance.png", "latents.safetensors"
"""The files of a report."""


def require_report_folder(folder: Path, what: str) -> None:
    """Raises UserError unless a report can be written to the folder; `what` names it in the message."""
    require_folder_path(folder, what)
    for name in (REPORT, PAGE, PICTURE, LATENTS):
        if os.path.isdir(folder / name):
            raise UserError(f"{what} {folder}: {name} there is a folder; remove it, or give another path")


def is_writer(group: SequenceGroup) -> bool:
    """Returns True if this rank writes the files: the first of all groups that share prompts or CFG passes."""
    return group.rank == 0 and SequenceGroup.from_group().rank == 0


def make_report(session: AttentionSession, model: str, framework: str) -> RunReport:
    """Makes the report of the session's observer on every rank. Collective, after a run that succeeded.

    Raises:
        UserError: If nothing was collected.
        RuntimeError: If a rank does not take part, or had other plans.
    """
    observer = run_observer(session)
    if observer is None:
        raise UserError("nothing was collected for a report; set `report` to a folder in db-SP's settings")
    session.flush()
    observer.read_counts()
    calls, group = list(observer.calls), session.group.auxiliary(REPORTS)
    group.barrier()
    message = "what was collected for the report differs on rank(s) {}; all ranks must take part in the same runs"
    check_consistent(group, None, {message: fingerprint_of([_shared(call) for call in calls])}, RuntimeError)
    if not calls:
        raise UserError("there is nothing to report: no attention of db-SP has run; run the model first")
    measured = [(c.seconds, c.sent.dispatch, c.sent.chunks, c.sent.combine) for c in calls]
    mine = torch.tensor(measured, device="cpu").double()
    by_rank = np.stack(
        [rank_values.numpy() for rank_values in group.all_gather(mine)]
    )  # float64[P, calls, 4], exact to 2^53 bytes
    hardware = gather_texts(group, device_class(observer.device))
    columns = _columns(calls, observer, by_rank)
    return RunReport(
        model=model,
        framework=framework,
        world_size=group.size,
        strategy=_in_words(session.strategy, columns),
        planner=session.config.planner,
        max_abs_diff=None,
        seconds=_seconds(observer, calls),
        environment=_environment(session, observer, hardware, model),
        calls=columns,
        ranks=_by_rank(calls, by_rank),
    )


def write_report_files(
    report: RunReport, session: AttentionSession, folder: Path, records: Mapping[int, Plan] | None = None
) -> None:
    """Writes report.json, report.html, balance.png and a pipeline's final latents, each whole or not at all.

    `records` are the plans in balance.png by layer, by default the session's. It is left out without matplotlib.
    """
    folder = user_path(folder)
    with contextlib.suppress(ImportError):  # the page has it too
        write_atomically(folder / PICTURE, balance_picture(session.records if records is None else records))
    observer = run_observer(session)
    latents = None if observer is None else observer.latents
    if latents is not None:
        write_atomically(folder / LATENTS, save({"latents": latents.cpu().contiguous()}))
    write_atomically(folder / PAGE, report_page(report))
    report.write(folder / REPORT)


def _shared(call: ObservedCall) -> tuple[object, ...]:
    """Returns the values that must be the same on every rank."""
    numbers = call.density, call.rho_before, call.rho, call.rho_bound
    return call.layer, call.forward, call.strategy, call.replanned, *numbers, call.work.tolist()


def _columns(calls: list[ObservedCall], observer: RunObserver, by_rank: np.ndarray) -> CallColumns:
    moments = observer.moments()
    seconds, sent = by_rank[:, :, 0], by_rank[:, :, 1:].astype(np.int64)
    kinds = sent.sum(axis=0)
    return CallColumns(
        layer=[c.layer for c in calls],
        step=[moments[c.forward].step for c in calls],
        branch=[moments[c.forward].cfg_branch for c in calls],
        strategy=[c.strategy for c in calls],
        replanned=[int(c.replanned) for c in calls],
        plan_ms=[round(c.plan_ms, 4) for c in calls],
        density=[c.density for c in calls],
        rho_before=[c.rho_before for c in calls],
        rho=[c.rho for c in calls],
        rho_bound=[c.rho_bound for c in calls],
        seconds=seconds.max(axis=0).round(9).tolist(),
        seconds_mean=seconds.mean(axis=0).round(9).tolist(),
        bytes_to_owners=kinds[:, 0].tolist(),
        bytes_chunks=kinds[:, 1].tolist(),
        bytes_to_sources=kinds[:, 2].tolist(),
        bytes_busiest=sent.sum(axis=2).max(axis=0).tolist(),
        bytes_usp=[c.sent.usp * len(by_rank) for c in calls],
    )


def _by_rank(calls: list[ObservedCall], by_rank: np.ndarray) -> RankTotals:
    work: dict[str, np.ndarray] = {}
    before: dict[str, np.ndarray] = {}
    for call in calls:
        layer = str(call.layer)
        work[layer] = work.get(layer, 0) + call.work
        before[layer] = before.get(layer, 0) + call.work_before
    return RankTotals(
        attention_s=by_rank[:, :, 0].sum(axis=1).round(9).tolist(),
        bytes_sent=by_rank[:, :, 1:].sum(axis=(1, 2)).astype(np.int64).tolist(),
        work={layer: total.tolist() for layer, total in sorted(work.items(), key=lambda item: int(item[0]))},
        work_before={layer: total.tolist() for layer, total in sorted(before.items(), key=lambda item: int(item[0]))},
    )


def _in_words(strategy: Strategy | None, columns: CallColumns) -> str:
    """Returns the strategy as text: "U4R2", or "auto: 30 U4R2, 10 U8R1" if it was chosen automatically."""
    if strategy is not None:
        return str(strategy)
    used = sorted(set(columns.strategy))
    return "auto: " + ", ".join(f"{columns.strategy.count(name)} {name}" for name in used)


def _seconds(observer: RunObserver, calls: list[ObservedCall]) -> float:
    if observer.seconds is not None:
        return observer.seconds
    first, last = calls[0].started, calls[-1].ended
    if isinstance(first, float) or isinstance(last, float):
        return float(last) - float(first)  # type: ignore[arg-type]
    return first.elapsed_time(last) / 1e3


def _environment(session: AttentionSession, observer: RunObserver, hardware: list[str], model: str) -> Environment:
    installed = installed_version("dbsp-attention") or "not installed"
    software = {"python": platform.python_version(), "dbsp-attention": installed, "torch": str(torch.__version__)}
    if torch.version.cuda:
        software["cuda"] = torch.version.cuda
    software |= {name: installed for name, installed in package_versions().items() if name not in software}
    settings = session.config.to_values()
    settings |= {
        "model": model,
        "layout": session.config.layout,
        "keys": session.config.keys,
        "kernel": observer.kernel,
    }
    del settings["report"]  # this folder may be gone when the report is read
    date = datetime.now().astimezone().isoformat(timespec="minutes")
    return Environment(settings, software, hardware, observer.kernel, observer.dtype, date)
