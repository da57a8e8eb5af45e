"""The demonstration, whole, on 4 ranks and on 2: xfuser's own command in forked processes, and real files."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from scripts.training.trained_model.demo import Settings, run_demo
from tests.support.programs import children_forked


@pytest.mark.long
def test_demo(tmp_path):
    ranks, strategy = 4, "U2R2"
    with children_forked():
        run_demo(tmp_path, ranks, Console(quiet=True), Settings(num_frames=9, steps=2))

    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["framework"], report["world_size"], report["strategy"]) == ("xdit", ranks, strategy)
    assert report["max_abs_diff"] <= 1e-5, "in float64"
    calls = report["calls"]
    assert calls["layer"] == [0, 1, 2, 3] * 4, "CFG passes, steps"
    assert all(1 <= bound <= rho for bound, rho in zip(calls["rho_bound"], calls["rho"], strict=True))
    assert all(0.1 < density < 0.95 for density in calls["density"]), "learned masks, neither empty nor full"
    assert sum(calls["rho"]) < sum(calls["rho_before"])
    assert max(calls["rho_before"]) > 1.1, "there must be something to balance"

    assert report["totals"]["calls"] == 4 * 2 * 2, "layers, steps, CFG passes"
    assert calls["step"] == [step for step in range(2) for _ in range(8)]
    assert report["totals"]["strategies"] == {strategy: 16}
    assert len(report["ranks"]["attention_s"]) == len(report["environment"]["hardware"]) == ranks
    assert report["totals"]["attention_s"] > 0
    assert f"{report['totals']['rho']:.3f}" in (tmp_path / "report.html").read_text()

    video = imageio_ffmpeg.read_frames(str(tmp_path / "demo.mp4"))
    assert next(video)["size"] == (240, 144)
    assert sum(1 for _ in video) == 9
    for name, least in (("balance.png", (600, 400)), ("frames.png", (600, 200))):
        assert np.greater(Image.open(tmp_path / name).size, least).all(), name
    assert {path.name for path in tmp_path.iterdir()} == {
        "demo.mp4", "frames.png", "balance.png", "report.html", "report.json", "masks.safetensors", "xdit.log",
    }  # fmt: skip


def test_above_the_tolerance_it_fails_and_leaves_no_video(tmp_path):
    """Takes the settings for GPUs, here on the CPU: float32, whose rounding the trained model amplifies."""
    console = Console(file=io.StringIO())
    strict = replace(Settings.for_gpus(), num_frames=5, steps=1, tolerance=-1.0)
    message = r"the latents differ from one process by (\S+), more than -1e\+00"
    raises = pytest.raises(RuntimeError, match=message)
    with children_forked(), raises as raised:
        run_demo(tmp_path, 2, console, strict)
    assert {path.name for path in tmp_path.iterdir()} == {"xdit.log"}
    said = re.findall(r"^ +\d+ s +(\w+)", console.file.getvalue(), re.M)
    assert said == ["making", "xdit", "step", "the", "the"]
    assert float(re.match(message, str(raised.value)).group(1)) <= 1e-4 < Settings.for_gpus().tolerance
