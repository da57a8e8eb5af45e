"""Facts after a run: effects of cache, quantization and compiling, and the report with its video."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import torch
from PIL import Image
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dbsp_cli.generate.inputs import Features
from dbsp_cli.generate.ranks import RankInfo
from dbsp_cli.generate.request import GenerationRequest, resolve
from dbsp_cli.generate.videos import _make_videos, quantized_weights
from dbsp_cli.tiny_models import make_tiny
from dbsp_core.reports.run_report import RunReport

STEPS, LAYERS, PASSES = 3, 4, 2
MASK = tuple(f"mask.{name}={value}" for name, value in {"source": "sparge", "block_q": 16, "block_k": 16}.items())
SIZE = {"height": 64, "width": 96, "num_frames": 5, "steps": STEPS}


def request_for(folder: Path, **features: object) -> GenerationRequest:
    return GenerationRequest(
        model=str(folder / "tiny"),
        prompt="a red ball",
        changes=(*MASK, "generate.guidance_scale=2.0"),
        out=str(folder / "ball.mp4"),
        report=folder / "report",
        features=Features(**features),
        **SIZE,
    )


def make_on_ranks(rank: int, world: int, folder: str, features: dict[str, object]) -> None:
    generation = resolve(request_for(Path(folder), **features), RankInfo(rank, world, rank, world))
    device = torch.device("cpu")
    _make_videos(generation, generation.left, str(Path(folder, "tiny")), device, Path(folder, "unwanted"))


def test_two_ranks_count_what_the_cache_skips_and_the_page_has_the_video(tmp_path, pool, dbsp):
    """Wan2.2, whose cache takes every step for the first one of its transformer: it computes the first block alone."""
    make_tiny("wan2.2", tmp_path / "tiny")
    pool(2).run(make_on_ranks, str(tmp_path), {"cache": "first-block=1000"})
    report = RunReport.read(tmp_path / "report")
    # 1. One pass over each transformer computes all of its layers, every other one its first layer
    assert set(report.skipped) == {"transformer", "transformer_2"}
    blocks = {name: counts[1] for name, counts in report.skipped.items()}
    assert sum(blocks.values()) == STEPS * PASSES * LAYERS
    computed = {name: all_blocks - report.skipped[name][0] for name, all_blocks in blocks.items()}
    for name, all_blocks in blocks.items():
        passes = all_blocks // LAYERS
        assert computed[name] == PASSES * LAYERS + (passes - PASSES)
    assert report.totals.calls == sum(computed.values())
    assert (report.quantized, report.compile_s) == ({}, 0)
    # 2. The page, and the command
    html = (tmp_path / "report" / "report.html").read_text()
    assert (tmp_path / "report" / "video.mp4").read_bytes() == (tmp_path / "ball.mp4").read_bytes()
    assert '<a href="video.mp4">' in html
    (frame,) = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', html)
    assert Image.open(BytesIO(b64decode(frame))).size == (96, 64)
    skipped = sum(counts[0] for counts in report.skipped.values())
    code, out, _ = dbsp("report", tmp_path / "report")
    assert code == 0
    assert f"{skipped} of {STEPS * PASSES * LAYERS} blocks" in out
    _, out, _ = dbsp("report", tmp_path / "report", "--json")
    assert json.loads(out)["skipped"] == {name: list(counts) for name, counts in report.skipped.items()}


def test_quantized_weights_are_counted_as_both_libraries_keep_them():
    """torchao keeps a tensor of several, bitsandbytes packed numbers; plain layers count nothing."""
    of_torchao, of_bitsandbytes, plain = (nn.Linear(6, 4) for _ in range(3))
    parts = torch.zeros(4, 6), torch.zeros(4, 6)
    of_torchao.weight = nn.Parameter(TwoTensor(*parts), requires_grad=False)
    of_bitsandbytes.weight = nn.Parameter(torch.zeros(12, 1, dtype=torch.uint8), requires_grad=False)
    scales = torch.zeros(1)
    state = SimpleNamespace(shape=torch.Size([4, 6]), dtype=torch.bfloat16, absmax=scales)
    of_bitsandbytes.weight.quant_state = state
    whole = {"transformer": nn.Sequential(of_torchao, plain, of_bitsandbytes), "transformer_2": plain}
    assert quantized_weights(whole) == {"transformer": (2, 24 * 4 + 24 * 2, 2 * 24 * 4 + 12 + 4)}
