"""Makes a report and its files from all ranks' records, in one synchronization after a run."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from dbsp_core.comm.consistency import agree, gather_texts
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.cost.machine import device_class
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.planning.plan import Plan
from dbsp_core.reports.observer import NUMBERS, REPORTS, ObservedCall, RunObserver, run_observer, seconds_between
from dbsp_core.reports.page import balance_picture, report_page
from dbsp_core.reports.run_report import CallColumns, Environment, RankTotals, RunReport
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_core.utils.files import require_folder_path, user_path, write_atomically
from dbsp_core.utils.process import installed_version, package_versions

REPORT, PAGE, PICTURE, LATENTS = "report.json", "report.html", "balance.png", "latents.safetensors"
"""The files of a report."""


def require_report_folder(folder: Path, what: str) -> None:
    """Raises UserError unless a report can be written to the folder; `what` names it in the message."""
    require_folder_path(folder, what)
    for name in (REPORT, PAGE, PICTURE, LATENTS):
        if os.path.isdir(folder / name):
            raise UserError(f"{what} {folder}: its {name} is a folder; remove it, or give another path")


def is_writer(group: SequenceGroup) -> bool:
    """Returns True if this rank writes the files: rank 0 of its sequence group and of all ranks."""
    return group.rank == 0 and SequenceGroup.from_group().rank == 0


def make_report(session: AttentionSession, model: str, framework: str) -> RunReport:
    """Makes the report from the session's observer, on every rank. Collective; call it after a successful run."""
    observer = run_observer(session)
    if observer is None:
        raise UserError("nothing was collected for a report; set `report` to a folder in db-SP's settings")
    # 1. All ranks must have seen the same calls
    session.flush()
    observer.read_counts()
    calls, group = list(observer.calls), session.group.auxiliary(REPORTS)
    group.barrier()
    shared = [(c.layer, c.forward, c.strategy, c.replanned, c.numbers, c.work.tolist()) for c in calls]
    message = "the attentions collected for the report differ on rank(s) {}; run the same calls on all ranks"
    agree(group, {message: fingerprint_of(shared)})
    if not calls:
        raise UserError("nothing to report: no attention has run with db-SP; run the model first")
    # 2. Seconds and bytes of every rank, float64[P, calls, 4], exact to 2^53 bytes
    measured = [(seconds_between(c.started, c.ended), *c.sent[:3]) for c in calls]
    of_ranks = group.all_gather(torch.tensor(measured, device="cpu").double())
    by_rank = np.stack([rank_values.numpy() for rank_values in of_ranks])
    hardware = gather_texts(group, device_class(observer.device))
    # 3. Active blocks by layer and rank, before and after balancing
    work, before = {}, {}
    for layer in sorted({call.layer for call in calls}):
        of_layer = [call for call in calls if call.layer == layer]
        work[str(layer)] = np.sum([call.work for call in of_layer], axis=0).tolist()
        before[str(layer)] = np.sum([call.work_before for call in of_layer], axis=0).tolist()
    # 4. The strategy in words, such as "auto: 30 U4R2, 10 U8R1" if it was chosen per call
    used = [call.strategy for call in calls]
    chosen = ", ".join(f"{used.count(name)} {name}" for name in sorted(set(used)))
    return RunReport(
        model=model,
        framework=framework,
        world_size=group.size,
        strategy=f"auto: {chosen}" if session.strategy is None else str(session.strategy),
        planner=session.config.planner.name,
        max_abs_diff=None,
        seconds=seconds_between(calls[0].started, calls[-1].ended) if observer.seconds is None else observer.seconds,
        environment=_environment(session, observer, hardware, model),
        calls=_columns(calls, observer.moments(), by_rank),
        ranks=RankTotals(
            attention_s=by_rank[:, :, 0].sum(axis=1).round(9).tolist(),
            bytes_sent=by_rank[:, :, 1:].sum(axis=(1, 2)).astype(np.int64).tolist(),
            work=work,
            work_before=before,
        ),
    )


def write_report_files(
    report: RunReport, session: AttentionSession, folder: Path, records: Mapping[int, Plan]
) -> None:
    """Writes report.json, report.html, balance.png of plans by layer (with matplotlib) and a pipeline's latents."""
    folder = user_path(folder)
    with contextlib.suppress(ImportError):  # no picture without matplotlib
        write_atomically(folder / PICTURE, balance_picture(records))
    observer = run_observer(session)
    latents = None if observer is None else observer.latents
    if latents is not None:
        write_atomically(folder / LATENTS, save({"latents": latents.cpu().contiguous()}))
    write_page(report, folder)


def write_page(report: RunReport, folder: Path, frame: str = "") -> None:
    """Writes report.html and report.json, replacing those without the video; `frame` as in `report_page`."""
    write_atomically(folder / PAGE, report_page(report, frame))
    report.write(folder / REPORT)


def _columns(calls: list[ObservedCall], moments: list[DenoisingStep], by_rank: np.ndarray) -> CallColumns:
    seconds, sent = by_rank[:, :, 0], by_rank[:, :, 1:].astype(np.int64)
    kinds = sent.sum(axis=0)
    return CallColumns(
        layer=[c.layer for c in calls],
        step=[moments[c.forward].step for c in calls],
        branch=[moments[c.forward].cfg_branch for c in calls],
        strategy=[c.strategy for c in calls],
        replanned=[int(c.replanned) for c in calls],
        plan_ms=[round(c.plan_ms, 4) for c in calls],
        **{name: [c.numbers[name] for c in calls] for name in NUMBERS},
        row_share=[c.row_share for c in calls],
        slots=[c.slots for c in calls],
        seconds=seconds.max(axis=0).round(9).tolist(),
        seconds_mean=seconds.mean(axis=0).round(9).tolist(),
        bytes_to_owners=kinds[:, 0].tolist(),
        bytes_chunks=kinds[:, 1].tolist(),
        bytes_to_sources=kinds[:, 2].tolist(),
        bytes_usp=[c.sent[3] * len(by_rank) for c in calls],
    )


def _environment(session: AttentionSession, observer: RunObserver, hardware: list[str], model: str) -> Environment:
    version = installed_version("dbsp-attention") or "not installed"
    software = {"python": platform.python_version(), "dbsp-attention": version, "torch": str(torch.__version__)}
    if torch.version.cuda:
        software["cuda"] = torch.version.cuda
    software = package_versions() | software
    config = session.config
    settings = config.to_values() | {"model": model, "layout": config.layout, "keys": config.keys_sent}
    del settings["report"]  # this folder may be gone when the report is read
    return Environment(
        settings=settings | {"kernel": observer.kernel},
        software=software,
        hardware=hardware,
        kernel=observer.kernel,
        dtype=observer.dtype,
        date=datetime.now().astimezone().isoformat(timespec="minutes"),
    )
