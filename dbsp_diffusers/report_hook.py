"""A report after each call of a pipeline while db-SP is enabled."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dbsp_core.models.table import find_model_spec
from dbsp_core.reports.collect import is_writer, make_report, write_report_files
from dbsp_core.reports.observer import RunObserver, run_observer
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import DenseSource
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import log
from dbsp_diffusers.patching import PatchSet, around_calls
from dbsp_kernels.errors import page


def report_calls(pipe: Any, sessions: Sequence[AttentionSession], patches: PatchSet, framework: str) -> None:
    """Writes a report after each successful call of `pipe`, if the session's settings name a folder.

    Also logs a line if all masks were dense without being asked for, and notes on `plan: current` and on layers that
    ran dense because it is faster. A failed call writes nothing and does not wait. Transformers are in order of layer
    numbers in the report.
    """
    observer = run_observer(sessions[0])
    sparse = [session for session in sessions if not isinstance(session.config.mask, DenseSource)]
    if not callable(pipe) or (observer is None and not sparse):
        return

    def call_and_report(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = [replace(session.reuse) for session in sparse]
        with nullcontext() if observer is None else _observed(pipe, observer):
            output = call(*args, **kwargs)
        for session, earlier in zip(sparse, before, strict=True):
            counted = session.reuse.counted - earlier.counted
            if is_writer(session.group) and 0 < counted == session.reuse.dense - earlier.dense:
                source = session.config.to_values()["mask"]["source"]
                log.warning(
                    session.config.dense_schedule.message(vars(pipe).get("_num_timesteps"))
                    or f"mask {source} skipped no blocks (density 1.000), so db-SP could not speed up attention; "
                    f"{page('masks')} has its settings, and other sources"
                )
            for note in session.reuse.notes() if is_writer(session.group) else ():
                log.info(note)
        if observer is not None:
            report_or_say_why_not(sessions, model_name(pipe), framework)
        return output

    around_calls(pipe, call_and_report, patches)


@contextmanager
def _observed(pipe: Any, observer: RunObserver) -> Iterator[None]:
    """Observes the time of one pipeline call and the final latents (result of the scheduler's last step)."""

    def step_and_keep(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        observer.latents = output[0]
        return output

    patches = PatchSet()
    around_calls(pipe.scheduler, step_and_keep, patches, "step")
    observer.restart()
    start = time.perf_counter()
    try:
        yield
    except BaseException:
        observer.restart()
        raise
    finally:
        patches.detach()
    if observer.device.type == "cuda":
        torch.cuda.synchronize(observer.device)
    observer.seconds = time.perf_counter() - start


def report_or_say_why_not(sessions: Sequence[AttentionSession], model: str, framework: str) -> None:
    """Makes the report and writes it on the first rank. Collective.

    Errors are only logged (with a traceback if they are bugs), so that they do not fail a successful generation.
    """
    observer = run_observer(sessions[0])
    folder = Path(observer.folder if observer is not None else ".")
    try:
        write_run_report(sessions, model, framework, folder)
    except Exception as error:
        if not isinstance(error, (UserError, RuntimeError, OSError)):
            traceback.print_exc()
        text = " ".join(str(error).split()) or type(error).__name__
        log.warning("no report in %s: %s", folder, text)


def write_run_report(
    sessions: Sequence[AttentionSession], model: str, framework: str, folder: str | os.PathLike[str] | None = None
) -> None:
    """Writes one report of all sessions on the first rank, to `folder` or the settings' folder. See `make_report`."""
    first, *others = sessions
    for session in others:
        session.flush()
    layers, records, names = first.layers, dict(first.records), ["transformer"]
    for number, session in enumerate(others, 2):
        names.append(f"transformer_{number}")
        last = layers + session.layers - 1
        model += f", layers {layers} to {last}: transformer_{number}"
        records |= {layers + layer: plan for layer, plan in session.records.items()}
        layers = last + 1
    report, observer = make_report(first, model, framework), run_observer(first)
    if observer is not None:
        by_name = zip(names, (observer.skipped.get(session.first_layer) for session in sessions), strict=True)
        report = replace(report, skipped={name: counts for name, counts in by_name if counts})
    if is_writer(first.group) and observer is not None:
        write_report_files(report, first, Path(folder or observer.folder), records)
        observer.report = report


def model_name(pipe: Any) -> str:
    """Returns the short name of a pipeline's known model or path, else its class."""
    config = getattr(pipe, "config", None)
    name = config.get("_name_or_path") if isinstance(config, Mapping) else None
    if not name:
        return type(pipe.transformer or pipe.transformer_2).__name__
    spec = find_model_spec(name)
    return spec.name if spec is not None else Path(name).name if Path(name).is_dir() else name
