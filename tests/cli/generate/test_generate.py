"""`dbsp generate`, whole: real torchrun, real hosts, real files; one node and two.

One video and one interrupt start as users start them; the other processes are forked."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file

from dbsp_cli.generate.job import GenerateRequest, resolve
from dbsp_cli.generate.rank_output import _root_cause
from dbsp_cli.tiny_models import make_tiny
from dbsp_core.config import DbspConfig
from dbsp_core.reports.run_report import RunReport
from dbsp_diffusers.attached import transformers_of
from tests.support.nodes import two_nodes
from tests.support.ports import free_port
from tests.support.programs import Program, run
from tests.support.single_process import attach_single_process

TOLERANCE = 1e-5
PROMPT = "a red ball bounces over a blue floor"
SIZES = {"height": 64, "width": 96, "num_frames": 17, "steps": 2, "guidance_scale": 2.0}
SMALL = [part for name, value in SIZES.items() for part in ("--set", f"generate.{name}={value}")]
SUMMARY = r"attention \d+% of [\d.]+ m?s, density 0\.\d{3}, ρ_s \d\.\d{3} → \d\.\d{3}, (saved|lost) .*s \(modelled\)"
CAPTURED = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
DBSP = [sys.executable, "-c", "from dbsp_cli.cli import main; main()"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """expected(model): latents of stock diffusers in this process, with the same masks and without parallelism."""
    made: dict[str, torch.Tensor] = {}

    def latents(model: str) -> torch.Tensor:
        if model not in made:
            import diffusers

            folder = make_tiny(model, tmp_path_factory.mktemp("tiny") / model)
            pipe = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True)
            pipe.set_progress_bar_config(disable=True)
            config = DbspConfig.load(f"tiny-{model}")
            attach_single_process(pipe.transformer, config)
            names = {"steps": "num_inference_steps"}
            size = {names.get(name, name): value for name, value in SIZES.items()}
            generator = torch.Generator().manual_seed(7)
            made[model] = pipe(PROMPT, negative_prompt="", generator=generator, output_type="latent", **size).frames
        return made[model]

    return latents


def command(config: str, out: Path, *arguments: object) -> list[str]:
    asked = ["generate", "--config", config, "--prompt", PROMPT, "--seed", "7", *SMALL, "--out", out, *arguments]
    return [*DBSP, *map(str, asked)]


def movie(path: Path) -> tuple[tuple[int, int], int]:
    """((width, height), frames) of an mp4, read back."""
    import imageio.v2 as imageio

    with imageio.get_reader(path, "ffmpeg") as reader:
        frames = [frame.shape[:2] for frame in reader]
    assert len(set(frames)) == 1
    return (frames[0][1], frames[0][0]), len(frames)


def check_video(folder: Path, latents: torch.Tensor, ranks: int, host: str) -> None:
    assert movie(folder / "ball.mp4") == ((SIZES["width"], SIZES["height"]), SIZES["num_frames"])
    report = RunReport.read(folder / "report" / "report.json")
    assert (report.world_size, report.host, report.model[:5]) == (ranks, host, "tiny-")
    assert (folder / "report" / "report.html").is_file()
    made = load_file(folder / "report" / "latents.safetensors")["latents"]
    assert made.shape == latents.shape
    assert float((made - latents).abs().max()) <= TOLERANCE


@pytest.mark.parametrize(
    ("host", "model", "ranks"),
    [
        ("diffusers", "wan", 1),
        ("diffusers", "cogvideox", 2),
    ],
)  # Wan on two ranks: over two nodes, and by srun in ParaAttention
def test_from_yaml_to_mp4(tmp_path, expected, host, model, ranks):
    """On two ranks it is the real start: an interpreter for the command, for torchrun, and for each rank."""
    if importlib.util.find_spec(host) is None:
        pytest.skip(f"host {host} is not installed")
    # CogVideoX's other size has heads enough: 6 on 2 ranks. In Wan's, blocks of 32 leave ragged ends.
    line = command(f"tiny-{model}", tmp_path / "ball.mp4", "--host", host, "--nproc", ranks, "--json")
    start = subprocess.run if ranks == 2 else run
    done = start([*line, "--report", str(tmp_path / "report")], **CAPTURED)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["video"] == str(tmp_path / "ball.mp4")
    check_video(tmp_path, expected(model), ranks, host)
    assert {path.name for path in tmp_path.iterdir()} == {"ball.mp4", "ball.log", "report"}
    lines = done.stderr.splitlines()
    in_force = [line for line in lines if line.startswith(f"dbsp: tiny-{model} on {ranks} rank")]
    assert len(in_force) == 1, done.stderr
    assert f"strategy U{ranks}R1, planner dbsp, layout contiguous, kernel cpu" in in_force[0]
    source = next(line for line in lines if line.startswith("dbsp: mask synthetic (block_q"))
    assert f"; from tiny-{model}, but for generate.height" in source
    bars = [line for line in lines if f"{ranks} × {host}" in line]
    assert len(bars) == 1, done.stderr
    assert "2/2" in bars[0]
    assert "Warning" not in done.stderr


@pytest.mark.parametrize(
    ("host", "model", "frames"),
    [("diffusers", "wan-vace", 2), ("diffusers", "wan-i2v", 1), ("diffusers", "wan2.2", 0)],
)
def test_from_an_image_and_with_two_transformers(tmp_path, host, model, frames):
    if importlib.util.find_spec(host) is None:
        pytest.skip(f"host {host} is not installed")
    import diffusers

    mask = {"source": "synthetic", "density": 0.4, "block_q": 16, "block_k": 16}
    images, options = [], []
    for number, name in enumerate(("image", "last-image")[:frames]):
        pixels = np.random.RandomState(number).rand(70, 110, 3) * 255
        Image.fromarray(pixels.astype("uint8")).save(tmp_path / f"{name}.png")
        images.append(ImageOps.fit(Image.open(tmp_path / f"{name}.png"), (96, 64), Image.Resampling.LANCZOS))
        options += [f"--{name}", str(tmp_path / f"{name}.png")]
    arguments = ["generate", "--model", f"tiny-{model}", "--prompt", PROMPT, "--seed", "7", *SMALL, *options]
    mask_set = [
        "--set",
        f"mask={json.dumps(mask)}",
        "--set",
        "generate.dtype=float32",
        "--set",
        "generate.flow_shift=3.0",
    ]
    settings = [*mask_set, "--nproc", "2", "--host", host]
    to = ["--out", str(tmp_path / "ball.mp4"), "--report", str(tmp_path / "report")]
    done = run([*DBSP, *arguments, *settings, *to])
    assert done.returncode == 0, done.stderr
    pipe = diffusers.DiffusionPipeline.from_pretrained(make_tiny(model, tmp_path / "tiny"), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    for transformer in transformers_of(pipe).values():
        attach_single_process(transformer, {"mask": mask})
    size = {{"steps": "num_inference_steps"}.get(name, name): value for name, value in SIZES.items()}
    given = dict(zip(("image", "last_image"), images, strict=False))
    if model == "wan-vace":
        between = [Image.new("RGB", (96, 64), (128, 128, 128))] * 15
        gray = [Image.new("L", (96, 64), level) for level in (0, *[255] * 15, 0)]
        given = {"video": [images[0], *between, images[1]], "mask": gray}
    generator = torch.Generator().manual_seed(7)
    size |= {"prompt": PROMPT, "negative_prompt": "", "output_type": "latent"}
    expected = pipe(generator=generator, **size, **given).frames
    check_video(tmp_path, expected, 2, host)


@pytest.mark.parametrize(
    ("model", "frame", "said"),
    [
        (
            "tiny-wan-i2v",
            None,
            "^tiny-wan-i2v needs an image, and maybe the last frame's, got 0; give one with --image FILE$",
        ),
        ("tiny-wan-i2v", "none", "nope.png does not exist; name a file such as a PNG or JPEG"),
        ("tiny-wan", (96, 64), "tiny-wan makes videos from text alone; leave the image out"),
        ("tiny-wan-i2v", (64, 160), "64×160: more than half of it would be cut off in a video of 96×64"),
        ("tiny-wan-i2v", "text", "cannot be read as an image"),
        ("tiny-wan-vace", (96, 64), "of the first frame and of the last, got 1; give one with --last-image FILE$"),
    ],
)
def test_images_that_do_not_fit_are_refused_before_a_process_is_launched(tmp_path, model, frame, said):
    file = None if frame is None else tmp_path / "frame.png"
    if frame == "none":
        file = tmp_path / "nope.png"
    elif frame == "text":
        file.write_text("no picture")
    elif frame is not None:
        Image.new("RGB", frame).save(file)
    request = GenerateRequest(
        model=model, prompt=PROMPT, image=file, out=tmp_path / "ball.mp4", changes=[c for c in SMALL if c != "--set"]
    )
    with pytest.raises(ValueError, match=said) as caught:
        resolve(request)
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_two_nodes_make_the_video_of_one_process(tmp_path, expected, record_property, capsys):
    with two_nodes() as (nodes, what):
        record_property("nodes", what)
        with capsys.disabled():
            print(f"\ntwo nodes: {what}")
        runs = []
        for index, node in enumerate(nodes):
            folder = tmp_path / f"node{index}"
            meeting = ["--master-addr", node.address, "--master-port", node.port]
            options = [*meeting, "--nproc", 1, "--nnodes", 2, "--node-rank", index, "--report", folder / "report"]
            line = command("tiny-wan", folder / "ball.mp4", *options)
            runs.append(
                Program(
                    [*node.prefix, *line],
                    env={**os.environ, **node.environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = [one.communicate(timeout=300)[0] for one in runs]
    assert [one.returncode for one in runs] == [0, 0], "\n".join(said)
    check_video(tmp_path / "node0", expected("wan"), 2, "diffusers")
    assert "strategy U1R2" in said[0], "heads are shared out within a node, blocks between nodes"
    assert "the video is on the node where rank 0 runs" in said[1]
    assert [path.suffix for path in (tmp_path / "node1").iterdir()] == [".log"]


def test_ranks_that_srun_has_started_are_joined(tmp_path, expected):
    """No Slurm here: its variables are set by hand, for two real processes as on two nodes."""
    shared = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    shared |= {"SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    line = command("tiny-wan", tmp_path / "ball.mp4", "--host", "para", "--report", tmp_path / "report")
    runs = [
        Program(
            line,
            env={**os.environ, **shared, "SLURM_PROCID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [one.communicate(timeout=300) for one in runs]
    assert [one.returncode for one in runs] == [0, 0], said
    check_video(tmp_path, expected("wan"), 2, "diffusers")
    assert "strategy U1R2" in said[0][1], "heads are shared out within a node, blocks between nodes"
    summary, wrote = said[0][0].splitlines()
    assert re.fullmatch(SUMMARY, summary), summary
    assert wrote.startswith(f"wrote {tmp_path / 'ball.mp4'} and {tmp_path / 'report' / 'report.html'} in ")
    assert said[1] == ("", "")
    stages = ("making the tiny checkpoint", "starting ranks", "loading the model", "denoising", "decoding and writing")
    places = [said[0][1].index(f"dbsp: {stage}") for stage in stages]
    assert places == sorted(places)
    assert {path.name for path in tmp_path.iterdir()} == {"ball.mp4", "ball.log", "ball.rank1.log", "report"}
    settings = RunReport.read(tmp_path / "report").environment.settings
    assert settings["model"] == "tiny-wan"
    assert str(tmp_path) not in json.dumps(settings)


def test_a_rank_that_dies_is_named_and_leaves_nothing_half_written(tmp_path):
    """Rank 1 is killed in the second step, as for want of memory: the other would wait for it."""
    mask = "{source: callable, function: 'tests.support.user_masks:dies_in_the_second_step', depends_on: step}"
    out, report = tmp_path / "ball.mp4", tmp_path / "report"
    out.write_text("an older video")
    options = ["--host", "para", "--nproc", 2, "--report", report, "--set", f"mask={mask}"]
    line = command("tiny-wan", out, *options)
    done = run(line)
    assert done.returncode == 1, done.stderr
    assert (
        "dbsp: rank 1 failed (exit code -9: killed; out of memory? see dmesg); the end of its output:" in done.stderr
    )
    assert "the memory ran out" in done.stderr
    assert f"all of it is in {tmp_path / 'ball.log'}" in done.stderr
    assert out.read_text() == "an older video"
    assert {path.name for path in tmp_path.iterdir()} == {"ball.mp4", "ball.log"}


@pytest.mark.parametrize("first", [0, 1])
def test_the_rank_that_others_missed_is_named_whichever_torchrun_saw_first(first):
    words = {"0": ["CommunicationError: communication between the ranks of the sequence broke off: one of the other"]}
    failed = [
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 9) \n"
        for rank, code in ((0, 1), (1, -9), (2, -15))
    ]
    root = failed.pop(first)
    summary = "Failures:\n" + "\n".join(failed) + "\nRoot Cause (first observed failure):\n" + root
    assert _root_cause(summary, words) == ("1", -9)
    assert _root_cause(summary, {}) == (str(first), (1, -9)[first]), "torchrun's, where words tell nothing"
    assert _root_cause("", words) is None


@pytest.mark.long
def test_an_interrupt_ends_all_ranks_and_leaves_nothing_half_written(tmp_path):
    """A real start, whose processes are found by their command lines."""
    log = tmp_path / "ball.log"
    options = ["--host", "para", "--nproc", 2, "--set", "generate.steps=1000"]
    started = subprocess.Popen(
        command("tiny-wan", tmp_path / "ball.mp4", *options),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test in the background ignores it
    )
    try:
        while started.poll() is None and not (log.is_file() and "/1000 [" in log.read_text()):
            time.sleep(0.2)
        assert len(processes_with(tmp_path)) == 3 + 1, "this one, torchrun and two ranks"
        started.send_signal(signal.SIGINT)
        _, said = started.communicate(timeout=120)
    finally:
        started.terminate()  # which ends the ranks, should the interrupt not have done so
    assert started.returncode == 130, said
    assert "Traceback" not in said
    assert processes_with(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["ball.log"]


def processes_with(folder: Path) -> list[str]:
    """Command lines that name a folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it ended meanwhile
            continue
    return [line for line in lines if str(folder) in line]
