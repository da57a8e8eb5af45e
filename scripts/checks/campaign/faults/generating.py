"""`dbsp generate` on a tiny model, with its own torchrun and ranks; what it was asked for, and what must be left."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.checks.campaign.faults.acts import CHECKPOINT, FILLER, RESULTS, Injection
from scripts.checks.campaign.faults.nursery import Ended, Task
from scripts.checks.campaign.faults.rank import variables

TIMEOUT_S = 25.0
"""That ranks wait for one another: more than the time between the first and the last of them to have started."""
SPARE_S = 5.0
"""Within the group's timeout and these seconds all must have ended."""
REST_S = 60.0
"""Of a run that goes on to its end."""
OLDER = {"ball.mp4": b"an older video", "report/report.json": b'"an older report"'}
SIZES = {"height": 64, "width": 64, "num_frames": 5, "steps": 2, "guidance_scale": 1.0}
MASK = '{"source": "sparge", "cdf": 0.6, "similarity": -1.0, "block_q": 8, "block_k": 8}'
PARENT = -1
RUNNING, IN_RANK = "dbsp_cli.generate.running", "diffusers.utils"
PHASES = {
    "starting": (PARENT, f"{RUNNING}.run_watched", 1),
    "making the checkpoint": (PARENT, f"{RUNNING}.make_tiny", 1),
    "loading": (0, "diffusers.DiffusionPipeline.from_pretrained", 1),
    "mask exchange": (0, "dbsp_core.sources.head_shares.gather_bits", 3),
    "denoising": (0, "dbsp_core.runtime.chunk_attention.block_attention", 3),
    "decoding": (0, "diffusers.AutoencoderKLWan.decode", 1),
    "report": (0, "dbsp_core.reports.collect.report_page", 1),
    "mp4": (0, f"{IN_RANK}.export_to_video", 1),
    "mp4: a frame": (0, "imageio.core.format.Format.Writer.append_data", 2),
    "placing the video": (PARENT, f"{RUNNING}._put_in_place", 1),
    "placing the report": (PARENT, f"{RUNNING}.put_folder", 1),
}
"""Where it happens (a rank, or the command's own process), the function, and in which of its calls."""


@dataclass(frozen=True)
class Generation:
    """code: of exit, or `or_code`;  says: a pattern of its words;  new: which of OLDER have been replaced

    nproc: ranks, of which the fault is in the last, but for what rank 0 alone does
    told:  what the command's process is sent;  own: whether the checkpoint is a folder of the user's
    kept:  whether a hidden folder with what was made may be left
    """

    act: str
    phase: str
    code: int
    says: str
    new: tuple[str, ...] = ()
    nproc: int = 1
    told: signal.Signals | None = None
    own: bool = False
    host: str = "diffusers"
    kept: bool = False
    or_code: int | None = None

    @property
    def injection(self) -> Injection:
        where, target, nth = PHASES[self.phase]
        shared = self.phase in ("loading", "mask exchange", "denoising", "decoding")
        return Injection(self.act, self.nproc - 1 if shared else where, target, nth)

    @property
    def task(self) -> Task:
        limit = REST_S if self.code in (0, 3) else TIMEOUT_S + SPARE_S
        return Task(be_dbsp, self, 1, limit, told=self.told, check=Generation.complaint)

    def complaint(self, folder: Path, ended: Ended) -> str | None:
        """What is wrong with what is left, or None."""
        (code,), (text,) = ended.codes, ended.errors
        said = " ".join(text.split())
        results, wrong = folder / "results", []
        if not ended.fired:
            wrong.append(f"it ended with {code} before anything went wrong: {said[-300:]}")
        if code not in (self.code, self.or_code):
            wrong.append(f"exit code {code}: {said[-300:]}")
        if not re.search(self.says, said):
            wrong.append(f"it says {said[-300:]!r}")
        for name, older in OLDER.items():
            path = results / name
            if not path.is_file():
                wrong.append(f"{name} is gone")
            elif (path.read_bytes() != older) is not (name in self.new):
                wrong.append(f"{name} is {'new' if name not in self.new else 'the older one'}")
        expected = {"ball.mp4", "ball.log", "report", FILLER}
        more = [path.name for path in results.iterdir() if path.name not in expected]
        if self.told is signal.SIGKILL:  # the next run removes it
            more = [name for name in more if name != ".ball.lock" and not name.startswith(".ball.dbsp-")]
        wrong += [f"left behind: {name}" for name in more if not self.kept]
        wrong += [f"half-written: {path}" for path in (results / "report").iterdir() if path.name.startswith(".")]
        return "; ".join(wrong) or None


def be_dbsp(generation: Generation, number: int, folder: Path) -> None:
    """The command, as it is installed."""
    from dbsp_cli.entry import dbsp
    from dbsp_cli.generate.hosts import HOSTS
    from dbsp_cli.tiny_models import make_tiny

    results, host = folder / "results", HOSTS[generation.host]
    results.mkdir()
    if generation.act == "disk fills":
        ctypes.CDLL(None).mount(b"tmpfs", str(results).encode(), b"tmpfs", 0, b"size=64m")
    for name, older in OLDER.items():
        (results / name).parent.mkdir(exist_ok=True)
        (results / name).write_bytes(older)
    model = ["--config", "tiny-wan"]
    if generation.own:
        model += ["--model", str(make_tiny("wan", folder / "checkpoint"))]
    injection = generation.injection
    os.environ.update(variables(host.module, folder, injection))
    os.environ.update({RESULTS: str(results), CHECKPOINT: str(folder / "checkpoint")})
    HOSTS[generation.host] = replace(host, module="scripts.checks.campaign.faults.rank")
    injection.arm(PARENT, folder)
    sizes = [part for name, value in SIZES.items() for part in ("--set", f"generate.{name}={value}")]
    places = ["--out", str(results / "ball.mp4"), "--report", str(results / "report")]
    ranks = ["--host", generation.host, "--nproc", str(generation.nproc), "--timeout", f"{TIMEOUT_S:g}"]
    sys.argv = ["dbsp", "generate", *model, "--prompt", "x", *ranks, *sizes, "--set", f"mask={MASK}", *places]
    os.chdir(folder)
    dbsp()


BOTH = tuple(OLDER)
VIDEO = ("ball.mp4",)
KILLED = r"rank {} failed \(exit code -9: killed"
RAISED = r"rank {} failed \(exit code 1\); the end of its output:.*injected"
BROKEN = r"rank 0 failed \(exit code 1\).*one of the other ranks may have died, or was too late"
SENT = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def _generations() -> dict[str, Generation]:
    found: list[Generation] = []
    for phase in ("loading", "denoising"):
        found.append(Generation("kill", phase, 1, KILLED.format(1), nproc=2))
        found.append(Generation("raise", phase, 1, RAISED.format(1), nproc=2))
    found.append(Generation("stop", "denoising", 1, BROKEN, nproc=2))
    found.append(Generation("slow", "denoising", 0, "", BOTH, nproc=2))
    found.append(Generation("out of memory", "decoding", 1, RAISED.format(1), nproc=2))
    for phase in ("mp4", "mp4: a frame"):
        found.append(Generation("kill", phase, 1, KILLED.format(0)))
        found.append(Generation("raise", phase, 1, RAISED.format(0)))
        found.append(Generation("slow", phase, 0, "", BOTH))
        # the log has no room either, unless what is still to be said fits in its last page
        full = r"dbsp: error: .*No space left|could not be written whole; ffmpeg says why"
        found.append(Generation("disk fills", phase, 1, full, or_code=2))
    found.append(Generation("raise", "report", 3, "the ranks made no report", VIDEO))
    found.append(Generation("disk full", "report", 3, "the ranks made no report", VIDEO))
    found.append(Generation("kill", "report", 1, KILLED.format(0)))
    found.append(Generation("disk fills", "making the checkpoint", 2, "dbsp: error: .*No space left"))
    found.append(
        Generation("read-only", "placing the report", 3, "the report cannot be put in its place", VIDEO, kept=True)
    )
    found.append(Generation("weights vanish", "loading", 1, "rank 0 failed", own=True))
    found.append(Generation("weights are truncated", "loading", 1, "rank 0 failed", own=True))
    for told in SENT:
        for phase in ("starting", "loading", "denoising", "mp4: a frame"):
            found.append(Generation("go on", phase, SENT[told], "", told=told))
    found.append(Generation("go on", "denoising", -9, "", told=signal.SIGKILL))
    found.append(
        Generation("kill torchrun", "denoising", 1, "torchrun, which runs the ranks, was ended from outside", nproc=2)
    )
    return {f"dbsp generate, {g.nproc} × {g.host}: {g.told.name if g.told else g.act} in {g.phase}": g for g in found}


GENERATIONS = _generations()
