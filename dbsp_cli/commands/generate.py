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

_NO_REPORT = 3  # exit code: the videos were made, but a requested report was not


def generate_command(
    context: typer.Context,
    config: Annotated[str | None, typer.Option(help="Settings file (YAML), or a shipped file's name.")] = None,
    model: Annotated[str | None, typer.Option(help="Checkpoint name or folder. Default: from --config.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt, or @FILE with one prompt per line.")] = None,
    images: Annotated[
        list[Path] | None, typer.Option("--image", help="First frame; repeat for the last frame.", **PATH)
    ] = None,
    video: Annotated[Path | None, typer.Option(help="Video to start from.", **PATH)] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What to avoid.")] = None,
    height: Annotated[
        int | None, typer.Option(help="Height in pixels. Default: the model's, as for the next three.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Width in pixels.")] = None,
    num_frames: Annotated[int | None, typer.Option(help="Number of frames.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of denoising steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first video of each prompt.")] = None,
    videos: Annotated[int, typer.Option(help="Videos per prompt.")] = 1,
    lora: Annotated[list[str] | None, typer.Option(help="LoRA, PATH[:transformer_2][=WEIGHT]; repeatable.")] = None,
    offload: Annotated[str | None, typer.Option(help=f"Save GPU memory: {' or '.join(OFFLOADS)}.")] = None,
    quantize: Annotated[str | None, typer.Option(help=f"Quantize weights: {', '.join(QUANTIZATIONS)}.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the transformer's blocks.")] = False,
    cache: Annotated[str | None, typer.Option(help="Skip steps: first-block, or first-block=0.1.")] = None,
    out: Annotated[str, typer.Option(help="Output (.mp4); may contain {index} and {seed}.")] = "video.mp4",
    resume: Annotated[bool, typer.Option("--resume", help="Skip existing videos.")] = False,
    report: Annotated[Path | None, typer.Option(help="Folder for the report.", **PATH)] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Setting, KEY=VALUE; repeatable.")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes on this machine. Default: one per GPU.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be generated, and exit.")] = False,
) -> None:
    """Generate videos from prompts, on all GPUs.

    Under torchrun, srun or MPI, each process is one rank.
    """
    options = context.params | {name: tuple(context.params[name] or ()) for name in ("images", "lora", "changes")}
    features = Features(**options_for(Features, options))
    request = GenerationRequest(**options_for(GenerationRequest, options | {"features": features}))
    joined = RankInfo.from_environment(os.environ)
    count = 1 if joined else processes_here(nproc)
    rank_info = joined or RankInfo(world=count, local_world=count)
    generation = resolve(request, rank_info)
    all_is_there = not joined and not generation.left  # joined ranks decide together
    if count > 1 and not (dry_run or all_is_there):
        raise typer.Exit(run_ranks(count, sys.argv[1:]))  # their rank 0 prints the warnings
    if rank_info.rank == 0:
        for line in generation.warnings:
            print(f"{NOTICE}{line}", file=sys.stderr)
    if dry_run:
        print(f"# {rank_info.world} rank{'s' if rank_info.world > 1 else ''} would make, with these settings:")
        for output in generation.left:
            print(f"# {output.path}: seed {output.seed}, {output.prompt!r}")
        print(yaml.safe_dump(generation.effective, allow_unicode=True, sort_keys=False), end="")
    elif all_is_there:
        _say_what_was_made(generation, {}, 0.0)
    else:
        _make(generation, rank_info)


def _make(generation: Generation, rank_info: RankInfo) -> None:
    from dbsp_cli.generate.videos import make_videos  # takes seconds to import

    rank_info.export()
    start = time.perf_counter()
    reports = make_videos(generation)
    if rank_info.rank == 0:
        on = f" on {socket.gethostname()}" if rank_info.nodes > 1 else ""
        _say_what_was_made(generation, reports, time.perf_counter() - start, on)
    if generation.report is not None and rank_info.rank == 0 and not all(reports.values()):
        raise typer.Exit(_NO_REPORT)


def _say_what_was_made(
    generation: Generation, reports: Mapping[Output, RunReport | None], seconds: float, on: str = ""
) -> None:
    """Prints a summary, and the host (`on`) if ranks are on several."""
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
