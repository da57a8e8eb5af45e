"""`dbsp generate` on a tiny model, alone or with ranks; what it was asked for, and what must be left."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.checks.stress.faults import fault_injection
from scripts.checks.stress.faults.fault_injection import CHECKPOINT, FILLER, RESULTS, Injection
from scripts.checks.stress.faults.keeper import Ended, Fault
from scripts.checks.stress.faults.rank_fault import SPARE_S

TIMEOUT_S = 25.0
"""In which the last rank has ended after the first: torchrun looks at them every tenth of a second."""
REST_S = 60.0
"""Of a run that goes on to its end."""
OLDER = {"ball.mp4": b"an older video", "report/report.json": b'"an older report"'}
SIZES = {"height": 64, "width": 64, "num_frames": 5, "steps": 2, "guidance_scale": 1.0}
MASK = '{"source": "sparge", "cdf": 0.6, "similarity": -1.0, "block_q": 8, "block_k": 8}'
PARENT = -1
PHASES = {
    "starting": (PARENT, "dbsp_cli.commands.generate.run_ranks", 1),
    "making the checkpoint": (0, "dbsp_cli.generate.videos.make_tiny", 1),
    "loading": (0, "diffusers.DiffusionPipeline.from_pretrained", 1),
    "mask exchange": (0, "dbsp_core.sources.head_shares.gather_bits", 3),
    "denoising": (0, "dbsp_core.runtime.chunk_attention.block_attention", 3),
    "decoding": (0, "diffusers.AutoencoderKLWan.decode", 1),
    "report": (0, "dbsp_core.reports.collect.report_page", 1),
    "mp4": (0, "diffusers.utils.export_to_video", 1),
    "mp4: a frame": (0, "imageio.core.format.Format.Writer.append_data", 2),
    "placing the video": (0, "pathlib.Path.replace", 1),
}
"""Where it happens (a rank, or the command that starts ranks), the function, and in which of its calls."""


@dataclass(frozen=True)
class Generation(Fault):
    """One run. code: of exit, or `or_code`;  says: a pattern of its words;  new: which of OLDER have been replaced

    nproc: ranks, of which the fault is in the last, but for what rank 0 alone does
    sent:  signal to the command's process;  own: whether the checkpoint is a folder of the user's
    kept:  whether a hidden file with what was made may be left
    """

    act: str
    phase: str
    code: int
    says: str
    new: tuple[str, ...] = ()
    nproc: int = 1
    sent: signal.Signals | None = None
    own: bool = False
    kept: bool = False
    or_code: int | None = None

    processes, odd = 1, 0

    def __str__(self) -> str:
        return f"dbsp generate on {self.nproc}: {self.sent.name if self.sent else self.act} in {self.phase}"

    @property
    def limit_s(self) -> float:  # type: ignore[override]
        return REST_S if self.code in (0, 3) else TIMEOUT_S + SPARE_S

    @property
    def injection(self) -> Injection:
        where, target, nth = PHASES[self.phase]
        shared = self.phase in ("loading", "mask exchange", "denoising", "decoding")
        return Injection(self.act, self.nproc - 1 if shared else where, target, nth)

    def message_about(self, ended: Ended, folder: Path) -> str | None:
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
        expected = {"ball.mp4", "report", FILLER}
        more = [path.name for path in results.iterdir() if path.name not in expected]
        wrong += [f"left behind: {name}" for name in more if not self.kept]
        wrong += [f"half-written: {path}" for path in (results / "report").iterdir() if path.name.startswith(".")]
        return "; ".join(wrong) or None

    def main(self, number: int, folder: Path) -> None:
        """Runs the command, as it is installed."""
        from dbsp_cli.entry import dbsp
        from dbsp_cli.generate import ranks
        from dbsp_cli.tiny_models import make_tiny

        results = folder / "results"
        results.mkdir()
        if self.act == "disk fills":
            ctypes.CDLL(None).mount(b"tmpfs", str(results).encode(), b"tmpfs", 0, b"size=64m")
        for name, older in OLDER.items():
            (results / name).parent.mkdir(exist_ok=True)
            (results / name).write_bytes(older)
        model = ["--config", "tiny-wan"]
        if self.own:
            model += ["--model", str(make_tiny("wan", folder / "checkpoint"))]
        injection = self.injection
        os.environ.update(fault_injection.variables(folder, injection))
        os.environ.update({RESULTS: str(results), CHECKPOINT: str(folder / "checkpoint")})
        ranks._PROGRAM = Path(fault_injection.__file__)
        injection.arm(PARENT if self.nproc > 1 else 0, folder)
        sizes = [part for name, value in SIZES.items() for part in ("--set", f"generate.{name}={value}")]
        paths = ["--out", str(results / "ball.mp4"), "--report", str(results / "report")]
        asked = ["--prompt", "x", "--nproc", str(self.nproc), "--set", f"mask={MASK}"]
        sys.argv = ["dbsp", "generate", *model, *asked, *sizes, *paths]
        os.chdir(folder)
        dbsp()


BOTH = tuple(OLDER)
VIDEO = ("ball.mp4",)
KILLED = r"rank 1 failed \(exit code -9: killed"
FIRST_KILLED = r"rank 0 failed \(exit code -9: killed"
RAISED = r"rank 1 failed \(exit code 1\); the end of its output:.*injected"
SENT = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def _generations() -> tuple[Generation, ...]:
    found: list[Generation] = []
    for phase in ("loading", "denoising"):
        found.append(Generation("kill", phase, 1, KILLED, nproc=2))
        found.append(Generation("raise", phase, 1, RAISED, nproc=2))
    found.append(Generation("slow", "denoising", 0, "", BOTH, nproc=2))
    found.append(Generation("out of memory", "decoding", 1, RAISED, nproc=2))
    for phase in ("mp4", "mp4: a frame"):
        found.append(Generation("kill", phase, 1, FIRST_KILLED, ("report/report.json",), nproc=2, kept=True))
        found.append(Generation("raise", phase, 1, "injected: a fault", new=("report/report.json",)))
        found.append(Generation("slow", phase, 0, "", BOTH))
    # not while frames are written: so small a video may have all of its room by then
    full = r"dbsp: error: .*(No space left|could not be written whole; ffmpeg says why)"
    found.append(Generation("disk fills", "mp4", 2, full, new=("report/report.json",)))
    found.append(Generation("raise", "report", 3, "no report in .*injected", VIDEO))
    found.append(Generation("disk full", "report", 3, "no report in .*No space left", VIDEO))
    found.append(Generation("kill", "report", 1, FIRST_KILLED, nproc=2))
    found.append(Generation("raise", "making the checkpoint", 1, "injected: a fault"))
    lost = "cannot be moved to its path .*it is kept: "
    found.append(Generation("read-only", "placing the video", 2, lost, ("report/report.json",), kept=True))
    for act in ("weights vanish", "weights are truncated"):
        found.append(Generation(act, "loading", 1, "Error|dbsp: error: ", own=True, or_code=2))
    for sent, code in SENT.items():
        for phase in ("starting", "loading", "denoising"):
            # before torchrun listens, a signal is the system's
            early = -sent if phase == "starting" else None
            found.append(Generation("go on", phase, code, "", sent=sent, nproc=2, or_code=early))
        found.append(Generation("go on", "mp4: a frame", code, "", sent=sent, new=("report/report.json",)))
    return tuple(found)


GENERATIONS = _generations()
