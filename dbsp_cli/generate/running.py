"""Runs a job, and puts its results in place when they are complete. Results are never lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from dbsp_cli.generate.exclusive_run import exclusive_run
from dbsp_cli.generate.images import fitted
from dbsp_cli.generate.job import GenerateJob
from dbsp_cli.generate.rank_output import LogFollower, RunFailed
from dbsp_cli.generate.resources import memory_complaint
from dbsp_cli.generate.supervisor import run_watched
from dbsp_cli.generate.work_folder import WorkFolder, folder_at, put_file, put_folder, remove_left_over, work_folder
from dbsp_cli.tiny_models import make_tiny, silence_libraries
from dbsp_core.models.table import TINY
from dbsp_core.reports.run_report import RunReport
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import NOTICE
from dbsp_core.utils.yaml_file import Settings, read_settings

__all__ = ["GenerateResult", "require_runnable", "run_job"]


@dataclass(frozen=True)
class GenerateResult:
    """What a run has left on this node.

    Attributes:
        video: None where rank 0 runs on another node.
        report: Folder of the report, or None.
        lacking: Why there is no report although one was asked for, and what became of it; else None.
        attention: What the run's attention did, asked for or not; None where no report was made.
    """

    video: Path | None = None
    report: Path | None = None
    lacking: str | None = None
    attention: RunReport | None = None


def require_runnable(job: GenerateJob) -> None:
    """Raises UserError where this machine lacks the memory for the checkpoint, or the checkpoint is not whole."""
    from dbsp_diffusers.preflight import require_checkpoint  # here: it takes seconds to import

    if job.model is None:
        return
    complaint = memory_complaint(job.model, job.config.generate.torch_dtype, job.launch.nproc)
    if complaint is not None:
        raise UserError(f"{complaint}; take a smaller model, fewer --nproc, or --set generate.dtype=bfloat16")
    require_checkpoint(job.model)


def run_job(job: GenerateJob, follower: LogFollower) -> GenerateResult:
    """Makes the video, which appears when it is complete, and then the report's files. A failure leaves only the log.

    Results that cannot be moved to their place stay in the work folder, and the message says where.

    Raises:
        UserError: A mistake of the user's that could be found only now.
        RunFailed: A rank failed, or the video could not be put in its place.
    """
    job.out.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as locks:
        known = locks.enter_context(exclusive_run(job.lock, str(job.out), "--out"))
        if job.report is not None and job.launch.leads:
            locks.enter_context(folder_at(job.report))
            locks.enter_context(exclusive_run(job.report / ".lock", f"the report in {job.report}", "--report"))
        for result in remove_left_over(job.out.parent, job.name) if known else []:
            follower.on_notice(f"{NOTICE}an earlier run was cut off; what it had made is still in {result}")
        with work_folder(job.out.parent, job.name) as work:
            if job.tiny is not None:
                follower.stage("making the tiny checkpoint")
                silence_libraries()
                make_tiny(job.tiny, work.path / f"{TINY}{job.tiny}")
            for name, path in job.images.items():
                fitted(path, job.config.generate).save(work.path / f"{name}.png")
            settings = work.path / "dbsp.yaml"
            settings.write_text(yaml.safe_dump(job.settings_in(work.path), allow_unicode=True), encoding="utf-8")
            follower.reword = in_the_users_names(job, work.path, read_settings(settings, "configuration file"))
            joined = job.launch.joined
            variables = joined.variables(torch.cuda.device_count()) if joined else None
            run_watched(job.command(work.path), job.log, work.path / "ranks", follower, variables, job.rendezvous)
            return _put_in_place(job, work)


def in_the_users_names(job: GenerateJob, work: Path, written: Settings) -> Callable[[str], str]:
    """Returns a function that replaces paths in the work folder, which is gone afterwards, by the user's names.

    Args:
        written: The ranks' configuration file, read back.
    """
    file, named = str(work / "dbsp.yaml"), job.given.origin or "the configuration"
    places = {place: job.given.place_of(path) for path, place in written.places.items()}
    line = re.compile(re.escape(file) + r":\d+")

    def reword(text: str) -> str:
        text = line.sub(lambda found: places.get(found[0]) or named, text.replace(f"from {file}", job.origin))
        return text.replace(file, named).replace(str(work / "report"), str(job.report or "the work folder"))

    return reword


def _put_in_place(job: GenerateJob, work: WorkFolder) -> GenerateResult:
    """Puts the video in place first: it must not be lost with a report that cannot be."""
    video, report = work.path / "video.mp4", work.path / "report"
    if not video.is_file():
        if not job.launch.leads:
            return GenerateResult()
        raise RunFailed(f"the ranks ended well but left no video; their output is in {job.log}")
    if not _whole(video):
        raise RunFailed(f"the video could not be written whole; ffmpeg says why in {job.log} (is the disk full?)")
    try:
        put_file(video, job.out)
    except OSError as error:
        wanted = (video,) if job.report is None else (video, report)
        kept = [str(work.keep(path.name)) for path in wanted if path.exists()]
        raise RunFailed(
            f"the video is made, but cannot be put in its place ({error}); it is kept: {' and '.join(kept)}"
        ) from error
    attention = _report_in(report)
    if job.report is None:
        return GenerateResult(job.out, attention=attention)
    if not (report / "report.json").is_file():
        return GenerateResult(job.out, lacking=f"the ranks made no report; they say why in {job.log}")
    try:
        put_folder(report, job.report)
    except OSError as error:
        lacking = f"the report cannot be put in its place ({error}); it is kept: {work.keep(report.name)}"
        return GenerateResult(job.out, lacking=lacking, attention=attention)
    return GenerateResult(job.out, job.report, attention=attention)


def _whole(video: Path) -> bool:
    """Returns whether ffmpeg came to the file's end, where it writes the index. diffusers does not ask it."""
    import imageio_ffmpeg

    try:
        with closing(imageio_ffmpeg.read_frames(str(video))) as frames:
            next(frames)
    except (OSError, RuntimeError):
        return False
    return True


def _report_in(folder: Path) -> RunReport | None:
    """The report that ranks have left, or None."""
    with suppress(UserError):
        return RunReport.read(folder)
    return None
