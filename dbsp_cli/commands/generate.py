"""`dbsp generate`: from a configuration to an mp4."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dbsp_cli.generate.endings import end_cleanly_on_signals
from dbsp_cli.generate.job import HOSTS, TIMEOUT_S, GenerateJob, GenerateRequest, prepare
from dbsp_cli.generate.launcher import Launch, LogFollower, RunFailed
from dbsp_cli.generate.running import Made, run_job

__all__ = ["generate_command"]

_NO_REPORT = 3
"""Exit code: the video is there, the report that was asked for is not."""


def generate_command(
    config: Annotated[str | None, typer.Option(help="YAML file, or the name of one in configs/.")] = None,
    prompt: Annotated[str | None, typer.Option(help="What the video shows.")] = None,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Generate a video: from YAML to mp4, on all GPUs of this machine, or of several."""
    launch = Launch(
        nproc=1 if nproc is None else nproc,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
    )
    job = prepare(
        GenerateRequest(
            config=config,
            model=model,
            prompt=prompt,
            seed=seed,
            changes=tuple(changes or ()),
            host=host,
            launch=launch,
            nproc_given=nproc is not None,
            out=out,
            report=report,
            timeout=timeout,
        )
    )
    if dry_run:
        _say_what_would_run(job, as_json)
        return
    end_cleanly_on_signals()
    start = time.perf_counter()
    try:
        made = _run(job)
    except RunFailed as error:
        print(f"dbsp: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    _say_what_was_made(job, made, time.perf_counter() - start, as_json)
    if made.lacking:
        raise typer.Exit(_NO_REPORT)


def _run(job: GenerateJob) -> Made:
    """Runs it with one progress bar, on standard error, that follows rank 0."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    steps = job.config.generate.video.steps or 0
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{job.launch.world} × {job.host}", total=steps)
        watcher = LogFollower(
            steps=steps,
            on_step=lambda done: progress.update(task, completed=done),
            on_notice=lambda line: progress.console.print(line, markup=False, highlight=False, soft_wrap=True),
        )
        return run_job(job, watcher)


def _say_what_would_run(job: GenerateJob, as_json: bool) -> None:
    work = Path("WORK")
    settings = job.settings_in(work)
    if as_json:
        _print_json(command=job.command(work), settings=settings, host=job.host, video=str(job.out))
        return
    print(shlex.join(job.command(work)))
    print("# WORK/dbsp.yaml:")
    print(yaml.safe_dump(settings, allow_unicode=True, sort_keys=False), end="")


def _say_what_was_made(job: GenerateJob, made: Made, seconds: float, as_json: bool) -> None:
    if made.lacking:
        print(f"dbsp: the video is {made.video}, but {made.lacking}", file=sys.stderr)
    if as_json:
        paths = {"video": made.video, "report": made.report, "log": job.log}
        texts = {name: None if path is None else str(path) for name, path in paths.items()}
        _print_json(**texts, lacking=made.lacking, host=job.host, seconds=seconds)
        return
    what = f"wrote {made.video}" if made.video else "done; the video is on the node where rank 0 runs"
    print(what + (f" and {made.report}" if made.report else "") + f" in {seconds:.1f} s (log: {job.log})")


def _print_json(**values: Any) -> None:
    print(json.dumps(values))
