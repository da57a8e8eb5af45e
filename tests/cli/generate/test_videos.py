"""Videos of one rank, made in this process: shipped configurations, images, a video, LoRA, a cache, reports."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import diffusers.utils
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file

from dbsp_cli.generate import videos
from dbsp_cli.generate.inputs import Features
from dbsp_cli.generate.ranks import ENDING, RankInfo
from dbsp_cli.generate.request import Generation, GenerationRequest, resolve
from dbsp_cli.generate.videos import _quantization, load_pipeline, make_videos
from dbsp_cli.tiny_models import make_tiny
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.models.table import TINY_MODELS
from dbsp_core.utils.yaml_file import read_settings, shipped_configs
from dbsp_diffusers import session_of
from dbsp_diffusers.models.transformers import transformers_of
from tests.cli.generate.test_requests import save_video
from tests.support.single_process import attach_single_process

FILES = {path.stem: path for path in sorted(shipped_configs().glob("tiny-*.yaml"))}
USUAL = ("tiny-cogvideox-paro",)
"""Masks of a file, next to the plain ones of other tests."""
PROMPT = "a red ball bounces over a blue floor"
SIZES = {"height": 64, "width": 96, "num_frames": 9, "steps": 2, "guidance_scale": 2.0}
SMALL = tuple(f"generate.{name}={value}" for name, value in SIZES.items())
ONE_PASS = ("generate.steps=1", "generate.guidance_scale=1.0")
LORA = {"A": (4, 12 * 24), "B": (12 * 24, 4)}
MASK = {"source": "synthetic", "density": 0.4, "block_q": 16, "block_k": 16}

pytestmark = pytest.mark.usefixtures("one_rank", "no_picture")


@pytest.fixture
def no_picture(monkeypatch):
    """Leaves balance.png of reports empty, since matplotlib takes longer than the video."""
    monkeypatch.setattr("dbsp_core.reports.collect.balance_picture", lambda records: b"")


def decided(folder: Path, **given: object) -> Generation:
    usual = {"config": "tiny-wan", "prompt": PROMPT, "seed": 7, "out": str(folder / "ball.mp4"), "changes": SMALL}
    return resolve(GenerationRequest(**usual | given), RankInfo())


def movie(path: Path) -> tuple[tuple[int, int], int]:
    """Returns ((width, height), frames) of an mp4."""
    with imageio.get_reader(path, "ffmpeg") as reader:
        frames = [frame.shape[:2] for frame in reader]
    assert len(set(frames)) == 1
    return (frames[0][1], frames[0][0]), len(frames)


def latents_of(report: Path) -> torch.Tensor:
    return load_file(report / "latents.safetensors")["latents"]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.long) for name in FILES]
)
def test_every_shipped_tiny_configuration_makes_a_video(tmp_path, name):
    settings = read_settings(FILES[name], "configuration file").values
    changes, frames = [*ONE_PASS, "generate.num_frames=9"], 9
    if settings["mask"]["source"] == "paro":  # the file's size, and a step after the dense one
        changes, frames = ["generate.steps=2", "generate.guidance_scale=1.0"], settings["generate"]["num_frames"]
    (did,) = make_videos(decided(tmp_path, config=name, prompt="a red ball", changes=changes)).values()
    video = settings["generate"]
    assert movie(tmp_path / "ball.mp4") == ((video["width"], video["height"]), frames)
    assert did.world_size == 1


@pytest.mark.parametrize(
    "model",
    [
        "wan-vace",
        pytest.param("wan-i2v", marks=pytest.mark.long),
        pytest.param("wan2.2", marks=pytest.mark.long),
        "wan from a video",
    ],
)
def test_what_it_starts_from_is_what_one_process_starts_from(tmp_path, model):
    """Compares with stock diffusers and the same masks in this process."""
    # 1. As the command makes it.
    pictures = []
    for number in range({"wan-vace": 2, "wan-i2v": 1}.get(model, 0)):
        pixels = np.random.RandomState(number).rand(70, 110, 3) * 255
        Image.fromarray(pixels.astype("uint8")).save(tmp_path / f"{number}.png")
        pictures.append(tmp_path / f"{number}.png")
    video = tmp_path / "from.mp4" if model == "wan from a video" else None
    if video is not None:
        save_video(video, frames=SIZES["num_frames"])
    settings = tuple(f"mask.{key}={value}" for key, value in MASK.items())
    settings += (*SMALL, "generate.dtype=float32", "generate.flow_shift=3.0")
    name = model.partition(" ")[0]
    asked = {"config": None, "model": f"tiny-{name}", "images": pictures, "video": video, "changes": settings}
    (did,) = make_videos(decided(tmp_path, report=tmp_path / "report", **asked)).values()
    assert movie(tmp_path / "ball.mp4") == ((SIZES["width"], SIZES["height"]), SIZES["num_frames"])
    assert did.model == f"tiny-{name}" or did.model.startswith(f"tiny-{name}, layers")
    # 2. As diffusers does.
    cls = diffusers.DiffusionPipeline if video is None else diffusers.WanVideoToVideoPipeline
    pipe = cls.from_pretrained(make_tiny(name, tmp_path / "tiny"), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    for transformer in transformers_of(pipe).values():
        attach_single_process(transformer, {"mask": MASK})
    call = {{"steps": "num_inference_steps"}.get(key, key): value for key, value in SIZES.items()}
    fitted = [ImageOps.fit(Image.open(one), (96, 64), Image.Resampling.LANCZOS) for one in pictures]
    call |= dict(zip(("image", "last_image"), fitted, strict=False))
    if model == "wan-vace":
        count = SIZES["num_frames"] - 2
        between = [Image.new("RGB", (96, 64), (128, 128, 128))] * count
        call |= {"video": [fitted[0], *between, fitted[1]]}
        call |= {"mask": [Image.new("L", (96, 64), level) for level in (0, *[255] * count, 0)]}
        del call["image"], call["last_image"]
    if video is not None:
        call |= {"video": diffusers.utils.load_video(str(video))}
        del call["num_frames"]
    generator = torch.Generator().manual_seed(7)
    expected = pipe(prompt=PROMPT, negative_prompt="", output_type="latent", generator=generator, **call).frames
    assert float((latents_of(tmp_path / "report") - expected).abs().max()) <= 1e-5


def test_several_videos_are_those_of_their_seeds_and_resuming_makes_what_is_missing(tmp_path):
    asked = {"out": str(tmp_path / "{seed}.mp4"), "report": tmp_path / "report", "videos": 2}
    asked["changes"] = (*SMALL, *ONE_PASS)
    first, second = make_videos(decided(tmp_path, **asked)).values()
    assert names(tmp_path) == {"7.mp4", "8.mp4", "report"}
    assert names(tmp_path / "report") == {"7", "8"}
    kept = (tmp_path / "report" / "8" / "video.mp4").read_bytes()
    assert kept == (tmp_path / "8.mp4").read_bytes(), "for dbsp report A B"
    assert first.calls.layer == second.calls.layer
    made = [latents_of(tmp_path / "report" / seed) for seed in ("7", "8")]
    assert not torch.equal(*made)
    (tmp_path / "7.mp4").write_bytes(b"made before")
    (tmp_path / "8.mp4").unlink()
    resumed = make_videos(decided(tmp_path, **asked, resume=True))
    assert [output.seed for output in resumed] == [8]
    assert (tmp_path / "7.mp4").read_bytes() == b"made before"
    assert torch.equal(latents_of(tmp_path / "report" / "8"), made[1]), "the video of its seed alone"
    assert make_videos(decided(tmp_path, **asked, resume=True)) == {}


def test_lora_weights_change_the_video_and_reach_the_transformer_that_is_named(tmp_path):
    pytest.importorskip("peft")
    folder = str(make_tiny("wan2.2", tmp_path / "tiny"))
    weights = {
        f"transformer.blocks.0.attn1.to_q.lora_{side}.weight": torch.ones(shape) for side, shape in LORA.items()
    }
    save_file(weights, tmp_path / "lora.safetensors")
    lora = str(tmp_path / "lora.safetensors")
    features = Features(lora=(f"{lora}:transformer_2=0.5", f"{lora}:transformer=2", f"{lora}:transformer_2"))
    pipe = load_pipeline(folder, TINY_MODELS["wan2.2"], GenerateSettings(), features, torch.device("cpu"))
    queries = {name: getattr(pipe, name).blocks[0].attn1.to_q for name in ("transformer", "transformer_2")}
    scales = {name: query.scaling for name, query in queries.items()}
    assert scales == {"transformer": {"lora_1": 2.0}, "transformer_2": {"lora_0": 0.5, "lora_2": 1.0}}
    active = {name: getattr(pipe, name).active_adapters() for name in scales}
    assert active == {"transformer": ["lora_1"], "transformer_2": ["lora_0", "lora_2"]}
    x = torch.ones(1, 12 * 24)
    assert not torch.equal(queries["transformer"](x), queries["transformer"].base_layer(x))


def test_a_cache_computes_the_first_step_and_blocks_are_compiled_after_db_sp_is_enabled(tmp_path, monkeypatch):
    """Takes every step for the same as the first."""
    seen, speed_up = [], videos.speed_up

    def seen_enabled(transformers, features):
        seen.extend(session_of(transformer) is not None for transformer in transformers.values())
        speed_up(transformers, features)

    monkeypatch.setattr(videos, "speed_up", seen_enabled)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block: seen.append(type(block).__name__))
    features = Features(cache="first-block=1000", compile=True)
    (cached,) = make_videos(decided(tmp_path, changes=(*SMALL, "generate.steps=3"), features=features)).values()
    assert cached.totals.calls == (4 + 2) * 2, "4 layers of the first step, then the first block, in two passes"
    assert seen == [True, *["WanTransformerBlock"] * 4]


def test_quantized_weights_are_asked_for_by_transformer(monkeypatch):
    """Loads no weights: torchao is a stub."""
    stub = SimpleNamespace(Int8WeightOnlyConfig=object, Float8WeightOnlyConfig=object)
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(quantization=stub))
    monkeypatch.setitem(sys.modules, "torchao.quantization", stub)
    monkeypatch.setattr("diffusers.TorchAoConfig", lambda kind: {"quant_type": kind})
    monkeypatch.setattr("diffusers.PipelineQuantizationConfig", lambda quant_mapping: quant_mapping)
    assert set(_quantization("int8", TINY_MODELS["wan"])) == {"transformer"}
    assert set(_quantization("fp8", TINY_MODELS["wan2.2"])) == {"transformer", "transformer_2"}


class TestPaths:
    @pytest.fixture
    def pictures(self):
        return list(np.zeros((3, 16, 16, 3), dtype=np.float32))

    def test_a_video_that_ffmpeg_could_not_finish_leaves_the_older_one(self, tmp_path, monkeypatch, pictures):
        export = diffusers.utils.export_to_video

        def cut_short(frames, path, fps):
            export(frames, path, fps=fps)
            Path(path).write_bytes(Path(path).read_bytes()[:-100])

        monkeypatch.setattr(diffusers.utils, "export_to_video", cut_short)
        (tmp_path / "ball.mp4").write_bytes(b"an older video")
        with pytest.raises(OSError, match=r"ball.mp4 could not be written completely; see ffmpeg's error above"):
            videos._write(pictures, tmp_path / "ball.mp4", 16)
        assert (tmp_path / "ball.mp4").read_bytes() == b"an older video"
        assert names(tmp_path) == {"ball.mp4"}

    @pytest.mark.parametrize("number", ENDING)
    def test_a_signal_that_ends_it_while_writing_leaves_the_older_one(self, tmp_path, monkeypatch, pictures, number):
        before = signal.signal(number, signal.SIG_DFL)
        monkeypatch.setattr(diffusers.utils, "export_to_video", lambda *_, **__: os.kill(os.getpid(), number))
        (tmp_path / "ball.mp4").write_bytes(b"an older video")
        with pytest.raises(SystemExit) as ended:
            videos._write(pictures, tmp_path / "ball.mp4", 16)
        assert ended.value.code == 128 + number
        assert signal.signal(number, before) is signal.SIG_DFL, "the handler before is back"
        assert names(tmp_path) == {"ball.mp4"}

    def test_a_report_that_cannot_be_written_is_lacking_and_the_command_exits_with_3(
        self, tmp_path, dbsp, monkeypatch
    ):
        older = tmp_path / "report" / "report.json"
        older.parent.mkdir()
        older.write_text('"an older report"')

        def page_becomes_a_folder(_):
            older.with_name("report.html").mkdir()
            return b""

        monkeypatch.setattr("dbsp_core.reports.collect.balance_picture", page_becomes_a_folder)
        sizes = [part for change in (*SMALL, *ONE_PASS) for part in ("--set", change)]
        paths = ["--out", tmp_path / "ball.mp4", "--report", tmp_path / "report"]
        code, out, err = dbsp("generate", "--config", "tiny-wan", "--prompt", "x", "--nproc", 1, *sizes, *paths)
        assert code == 3
        assert f"dbsp: no report in {tmp_path / 'report'}: " in err
        assert out.startswith(f"wrote {tmp_path / 'ball.mp4'}, but no report\n1 video in ")
        assert older.read_text() == '"an older report"'
        assert movie(tmp_path / "ball.mp4") == ((96, 64), SIZES["num_frames"])
