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
from rich.table import Column

from dbsp_cli.generate.hosts import HOSTS
from dbsp_cli.generate.job import TIMEOUT_S, GenerateJob, GenerateRequest, resolve
from dbsp_cli.generate.launch import Launch
from dbsp_cli.generate.pace import Pace, PaceColumn
from dbsp_cli.generate.rank_output import LogFollower, RunFailed
from dbsp_cli.generate.running import GenerateResult, require_runnable, run_job
from dbsp_cli.generate.supervisor import end_cleanly_on_signals
from dbsp_cli.output import PATH, JsonFlag, options_for, print_json
from dbsp_core.reports.page import in_a_line
from dbsp_core.utils.process import NOTICE

__all__ = ["generate_command"]

_NO_REPORT = 3
"""Exit code: the video is there, the report that was asked for is not."""
_NUMBERS = ("density", "rho_before", "rho", "attention_s", "attention_share", "saved_s")
"""What `--json` says of a run's attention, by the names of `Totals`."""


def generate_command(
    config: Annotated[str | None, typer.Option(help="YAML file, or a shipped one's name.")] = None,
    prompt: Annotated[str | None, typer.Option(help="What the video shows.")] = None,
    image: Annotated[Path | None, typer.Option(help="The first frame, for models that take one.", **PATH)] = None,
    last_image: Annotated[Path | None, typer.Option(help="The last frame, likewise.", **PATH)] = None,
    model: Annotated[str | None, typer.Option(help="Name or folder of the checkpoint; default: the file's.")] = None,
    out: Annotated[Path, typer.Option(help="The mp4 file to write.", **PATH)] = Path("video.mp4"),
    report: Annotated[Path | None, typer.Option(help="Folder for the report.", **PATH)] = None,
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
    master_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port there.")] = None,
    rdzv_backend: Annotated[str | None, typer.Option(help="c10d needs no node ranks.")] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(help="HOST:PORT of one of the nodes.")] = None,
    rdzv_id: Annotated[str | None, typer.Option(help="The job's name, equal on all nodes.")] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a rank waits for others before the run fails.")
    ] = TIMEOUT_S,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and run nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Generate a video: from YAML to mp4, on all GPUs of this machine, or of several.

    Started by srun, MPI or torchrun, it joins the ranks that are there.
    """
    given = locals()
    launch = Launch(**options_for(Launch, given | {"nproc": 1}))
    request = GenerateRequest(**options_for(GenerateRequest, given | {"launch": launch, "changes": changes or ()}))
    job = resolve(request)
    if dry_run:
        _say_what_would_run(request, job, as_json)
        return
    end_cleanly_on_signals()
    start = time.perf_counter()
    for line in job.warnings if job.launch.leads is not False else ():
        print(f"{NOTICE}{line}", file=sys.stderr)
    require_runnable(job)
    try:
        result = _run(job)
    except RunFailed as error:
        print(f"dbsp: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if not job.launch.joined or job.launch.leads:
        _say_what_was_made(job, result, time.perf_counter() - start, as_json)
    if result.lacking:
        raise typer.Exit(_NO_REPORT)


def _run(job: GenerateJob) -> GenerateResult:
    """Runs it with one progress bar, on standard error, that follows rank 0; a log gets a line for each stage."""
    texts = TextColumn("{task.description}", table_column=Column(no_wrap=True))
    steps, joined = job.config.generate.steps or 0, job.launch.joined
    pace = Pace(steps)
    columns = (SpinnerColumn(), texts, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), PaceColumn(pace))
    if joined and joined.rank:
        return run_job(job, LogFollower(steps, rank=str(joined.rank)))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        what = f"{job.launch.world} × {job.host}"
        task = progress.add_task(what, total=steps)

        def say(line: str) -> None:
            progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

        def show(stage: str) -> None:
            progress.update(task, description=f"{what}: {stage}")
            if not progress.console.is_terminal:
                say(f"{NOTICE}{stage}")

        def step(done: int) -> None:
            pace.step(done)
            progress.update(task, completed=done)

        follower = LogFollower(
            steps,
            on_step=step,
            on_notice=say,
            on_stage=show,
            rank="0" if joined else "",
        )
        return run_job(job, follower)


def _say_what_would_run(request: GenerateRequest, job: GenerateJob, as_json: bool) -> None:
    work = Path("WORK")
    effective, again = job.effective, _same_again(request, job)
    if as_json:
        settings = {"settings": job.settings_in(work), "effective": effective}
        print_json(command=job.command(work), **settings, again=again, host=job.host, video=str(job.out))
        return
    print(f"# {job.launch.world} × {job.host} would make {job.out} with these settings:")
    print(yaml.safe_dump(effective, allow_unicode=True, sort_keys=False), end="")
    print("# A complete command for the same run:")
    print(shlex.join(again))


def _same_again(request: GenerateRequest, job: GenerateJob) -> list[str]:
    """The command that asks for this job, with what was found named."""
    options = {name: getattr(request, name) for name in ("config", "model", "prompt", "seed")}
    options |= {"host": job.host, "nproc": None if job.launch.joined else job.launch.nproc}
    options |= {name: value for name, value in vars(request.launch).items() if value != getattr(Launch(), name)}
    options |= {"out": job.out, "report": job.report, "timeout": f"{job.timeout:g}"}
    changes = [part for change in request.changes for part in ("--set", change)]
    named = {f"--{name.replace('_', '-')}": value for name, value in options.items() if value is not None}
    return ["dbsp", "generate", *(str(part) for pair in named.items() for part in pair), *changes]


def _say_what_was_made(job: GenerateJob, result: GenerateResult, seconds: float, as_json: bool) -> None:
    if result.lacking:
        print(f"dbsp: the video is {result.video}, but {result.lacking}", file=sys.stderr)
    if as_json:
        paths = {"video": result.video, "report": result.report, "log": job.log}
        texts = {name: None if path is None else str(path) for name, path in paths.items()}
        did = result.attention
        numbers = {} if did is None else {name: getattr(did.totals, name) for name in _NUMBERS}
        print_json(**texts, lacking=result.lacking, host=job.host, seconds=seconds, attention=numbers or None)
        return
    if result.attention is not None:
        print(in_a_line(result.attention))
    what = f"wrote {result.video}" if result.video else "done; the video is on the node where rank 0 runs"
    page = f" and {result.report / 'report.html'}" if result.report else ""
    print(f"{what}{page} in {seconds:.1f} s (log: {job.log})")
