"""`dbsp generate`: from a configuration to an mp4."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dbsp_cli.generate.job import HOSTS, TIMEOUT_S, GenerateJob, GenerateRequest, resolve
from dbsp_cli.generate.launcher import Launch, LogFollower, RunFailed
from dbsp_cli.generate.running import GenerateResult, run_job
from dbsp_cli.generate.signals import end_cleanly_on_signals
from dbsp_cli.output import JsonFlag, options_for, print_json

__all__ = ["generate_command"]

_NO_REPORT = 3
"""Exit code: the video is there, the report that was asked for is not."""


def generate_command(
    config: Annotated[str | None, typer.Option(help="YAML file, or the name of one in configs/.")] = None,
    prompt: Annotated[str | None, typer.Option(help="What the video shows.")] = None,
    image: Annotated[Path | None, typer.Option(help="The first frame, for models that take one.")] = None,
    last_image: Annotated[Path | None, typer.Option(help="The last frame, likewise.")] = None,
    model: Annotated[str | None, typer.Option(help="Name or folder of the checkpoint; default: the file's.")] = None,
    out: Annotated[Path, typer.Option(help="The mp4 file to write.")] = Path("video.mp4"),
    report: Annotated[Path | None, typer.Option(help="Folder for the report.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the noise.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE over the file's, such as mask.cdf=0.9; repeatable."),
    ] = None,
    host: Annotated[str | None, typer.Option(help=f"{' or '.join(HOSTS)}; default: the first that is there.")] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "--nproc-per-node", help="Processes on this node; default: one per GPU.")
    ] = None,
    nnodes: Annotated[int, typer.Option(help="Nodes; torchrun's options below say how they meet.")] = 1,
    node_rank: Annotated[int | None, typer.Option(help="This node's, from 0.")] = None,
    master_addr: Annotated[str | None, typer.Option(help="Address of node 0.")] = None,
    master_port: Annotated[int | None, typer.Option(help="Port there.")] = None,
    rdzv_backend: Annotated[str | None, typer.Option(help="c10d needs no node ranks.")] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(help="HOST:PORT of one of the nodes.")] = None,
    rdzv_id: Annotated[str | None, typer.Option(help="The job's name, equal on all nodes.")] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a rank waits for others before the run fails.")
    ] = TIMEOUT_S,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and run nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Generate a video: from YAML to mp4, on all GPUs of this machine, or of several."""
    given = locals()
    launch = Launch(**options_for(Launch, given | {"nproc": 1}))
    request = GenerateRequest(**options_for(GenerateRequest, given | {"launch": launch, "changes": changes or ()}))
    job = resolve(request)
    if dry_run:
        _say_what_would_run(job, as_json)
        return
    end_cleanly_on_signals()
    start = time.perf_counter()
    try:
        result = _run(job)
    except RunFailed as error:
        print(f"dbsp: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    _say_what_was_made(job, result, time.perf_counter() - start, as_json)
    if result.lacking:
        raise typer.Exit(_NO_REPORT)


def _run(job: GenerateJob) -> GenerateResult:
    """Runs it with one progress bar, on standard error, that follows rank 0."""
    texts = TextColumn("{task.description}")
    columns = (SpinnerColumn(), texts, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    steps = job.config.generate.video.steps or 0
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{job.launch.world} × {job.host}", total=steps)
        follower = LogFollower(
            steps=steps,
            on_step=lambda done: progress.update(task, completed=done),
            on_notice=lambda line: progress.console.print(line, markup=False, highlight=False, soft_wrap=True),
        )
        return run_job(job, follower)


def _say_what_would_run(job: GenerateJob, as_json: bool) -> None:
    work = Path("WORK")
    settings = job.settings_in(work)
    if as_json:
        print_json(command=job.command(work), settings=settings, host=job.host, video=str(job.out))
        return
    print(shlex.join(job.command(work)))
    print("# WORK/dbsp.yaml:")
    print(yaml.safe_dump(settings, allow_unicode=True, sort_keys=False), end="")


def _say_what_was_made(job: GenerateJob, result: GenerateResult, seconds: float, as_json: bool) -> None:
    if result.lacking:
        print(f"dbsp: the video is {result.video}, but {result.lacking}", file=sys.stderr)
    if as_json:
        paths = {"video": result.video, "report": result.report, "log": job.log}
        texts = {name: None if path is None else str(path) for name, path in paths.items()}
        print_json(**texts, lacking=result.lacking, host=job.host, seconds=seconds)
        return
    what = f"wrote {result.video}" if result.video else "done; the video is on the node where rank 0 runs"
    print(what + (f" and {result.report}" if result.report else "") + f" in {seconds:.1f} s (log: {job.log})")
