"""`dbsp generate`: from prompts to mp4 files."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
import yaml

from dbsp_cli.generate.inputs import OFFLOADS, QUANTIZATIONS, Features
from dbsp_cli.generate.outputs import Output
from dbsp_cli.generate.ranks import RankInfo, processes_here, run_ranks
from dbsp_cli.generate.request import Generation, GenerationRequest, resolve
from dbsp_cli.output import PATH, options_for
from dbsp_core.reports.page import features, in_a_line
from dbsp_core.reports.run_report import RunReport
from dbsp_core.utils.process import NOTICE

_NO_REPORT = 3
"""Exit code: the videos are there, a report that was asked for is not."""


def generate_command(
    context: typer.Context,
    config: Annotated[str | None, typer.Option(help="YAML file, or a shipped one's name.")] = None,
    model: Annotated[str | None, typer.Option(help="Name or folder of the checkpoint; default: the file's.")] = None,
    prompt: Annotated[str | None, typer.Option(help="What it shows; @FILE: one prompt a line.")] = None,
    images: Annotated[
        list[Path] | None, typer.Option("--image", help="The first frame; given again, the last.", **PATH)
    ] = None,
    video: Annotated[Path | None, typer.Option(help="A video to start from.", **PATH)] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What it does not show.")] = None,
    height: Annotated[
        int | None, typer.Option(help="Pixels; default: the model's usual, as for the next three.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Pixels.")] = None,
    num_frames: Annotated[int | None, typer.Option(help="Frames of the video.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of a prompt's first video.")] = None,
    videos: Annotated[int, typer.Option(help="Videos for each prompt.")] = 1,
    lora: Annotated[list[str] | None, typer.Option(help="LoRA, PATH[:transformer_2][=WEIGHT]; repeatable.")] = None,
    offload: Annotated[str | None, typer.Option(help=f"{' or '.join(OFFLOADS)}: less GPU memory.")] = None,
    quantize: Annotated[str | None, typer.Option(help=f"Weights: {', '.join(QUANTIZATIONS)}.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the transformer's blocks.")] = False,
    cache: Annotated[str | None, typer.Option(help="first-block, or first-block=0.1: skip steps.")] = None,
    out: Annotated[str, typer.Option(help="mp4; {index} and {seed} are filled in.")] = "video.mp4",
    resume: Annotated[bool, typer.Option("--resume", help="Leave out videos that are there.")] = False,
    report: Annotated[Path | None, typer.Option(help="Folder for the report.", **PATH)] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE over the file's; repeatable.")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes here; default: one per GPU.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be made, and stop.")] = False,
) -> None:
    """Generate videos, on all GPUs: from prompts to mp4 files.

    Started by torchrun, srun or MPI, it joins the ranks that are there.
    """
    options = context.params | {name: tuple(context.params[name] or ()) for name in ("images", "lora", "changes")}
    features = Features(**options_for(Features, options))
    request = GenerationRequest(**options_for(GenerationRequest, options | {"features": features}))
    joined = RankInfo.from_environment(os.environ)
    count = 1 if joined else processes_here(nproc)
    rank_info = joined or RankInfo(world=count, local_world=count)
    generation = resolve(request, rank_info)
    all_is_there = not joined and not generation.left  # ranks that are there decide together
    if count > 1 and not (dry_run or all_is_there):
        raise typer.Exit(run_ranks(count, sys.argv[1:]))  # whose rank 0 says the warnings
    if rank_info.rank == 0:
        for line in generation.warnings:
            print(f"{NOTICE}{line}", file=sys.stderr)
    if dry_run:
        _say_what_would_be_made(generation, rank_info)
    elif all_is_there:
        _say_what_was_made(generation, {}, 0.0)
    else:
        _make(generation, rank_info)


def _make(generation: Generation, rank_info: RankInfo) -> None:
    """Makes the videos as one of the ranks; rank 0 says what was made."""
    from dbsp_cli.generate.videos import make_videos  # here: it takes seconds to import

    rank_info.export()
    start = time.perf_counter()
    reports = make_videos(generation)
    if rank_info.rank == 0:
        on = f" on {socket.gethostname()}" if rank_info.nodes > 1 else ""
        _say_what_was_made(generation, reports, time.perf_counter() - start, on)
    if generation.report is not None and rank_info.rank == 0 and not all(reports.values()):
        raise typer.Exit(_NO_REPORT)


def _say_what_would_be_made(generation: Generation, rank_info: RankInfo) -> None:
    print(f"# {rank_info.world} rank{'s' if rank_info.world > 1 else ''} would make, with these settings:")
    for output in generation.left:
        print(f"# {output.path}: seed {output.seed}, {output.prompt!r}")
    print(yaml.safe_dump(generation.effective, allow_unicode=True, sort_keys=False), end="")


def _say_what_was_made(
    generation: Generation, reports: Mapping[Output, RunReport | None], seconds: float, on: str = ""
) -> None:
    """Prints what was made, `on` which host if ranks are on several."""
    if not reports:
        count = len(generation.outputs)
        print(f"nothing to make: {count} of {count} videos are there")
        return
    for output, report in reports.items():
        if report is not None:
            print(in_a_line(report))
            for what, value, note in features(report):
                print(f"{what}: {value} ({note})")
        folder = generation.report_of(output)
        page = f" and {folder / 'report.html'}" if folder and report else ""
        lacking = ", but no report" if folder and not report else ""
        print(f"wrote {output.path}{page}{lacking}{on}")
    print(f"{len(reports)} video{'s' if len(reports) > 1 else ''} in {seconds:.1f} s")
