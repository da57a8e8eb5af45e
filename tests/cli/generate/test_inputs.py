"""Files that a video is made from, opened before weights are loaded: images, videos, LoRA weights, checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from dbsp_cli.generate.inputs import Features, fitted, source_frames
from dbsp_cli.generate.videos import make_videos
from dbsp_cli.tiny_models import make_tiny
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.models.table import MODEL_SPECS, TINY_MODELS
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.checkpoint import load_stock_pipeline, require_checkpoint
from tests.cli.generate.test_requests import decided, save_video

VIDEO = GenerateSettings(width=96, height=64)
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
GREY = np.linspace(0, 255, 96 * 64).reshape(64, 96).round().astype(np.uint8)


@pytest.mark.parametrize(
    ("mode", "suffix", "most"),
    [("P", "png", 0), ("CMYK", "jpg", 16), ("1", "png", 0)],
)
def test_an_image_of_any_colours_is_read_in_rgb(tmp_path, mode, suffix, most):
    grey = Image.fromarray(GREY)
    is_mapped = mode in ("P", "1")
    image = grey.convert(mode, dither=Image.Dither.NONE) if is_mapped else grey.convert("RGB").convert(mode)
    image.save(tmp_path / f"first.{suffix}")
    frame = fitted(tmp_path / f"first.{suffix}", VIDEO)
    assert (frame.mode, frame.size) == ("RGB", (96, 64))
    expected = np.where(GREY > 127, 255, 0) if mode == "1" else GREY
    assert abs(np.asarray(frame).astype(int) - expected[..., None]).max() <= most


def transparent(mode):
    image = Image.fromarray(GREY).convert(mode)
    image.putalpha(Image.fromarray(GREY))
    return image


@pytest.mark.parametrize(
    ("image", "options", "message"),
    [
        (Image.fromarray(GREY.astype(np.uint16) * 257), {}, "has values of more than 8 bits, .*; save it with 8 bits"),
        (transparent("RGB"), {}, "has transparent parts, .*; save it on a background"),
        (Image.fromarray(GREY).convert("P"), {"transparency": 0}, "has transparent parts"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 60, {}, "cannot be read as an image; name a file such as a PNG"),
    ],
)
def test_an_image_that_is_not_one_plain_picture_is_rejected(tmp_path, image, options, message):
    path = tmp_path / ("first.png" if options else "first.tiff")
    if isinstance(image, bytes):
        path.write_bytes(image)
    else:
        image.save(path, **options)
    with pytest.raises(UserError, match=rf"{path.name} {message}"):
        fitted(path, VIDEO)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
WIDTH = 12 * 24


def lora(name="transformer.blocks.{}.attn1.to_q.lora_{}.weight", down=WIDTH, up=WIDTH, ranks=(4, 4), blocks=2):
    """Returns LoRA weights of a module in each of some blocks, of tiny Wan's sizes."""
    found = {}
    for block in range(blocks):
        found[name.format(block, "A")] = torch.ones(ranks[0], down)
        found[name.format(block, "B")] = torch.ones(up, ranks[1])
    return found


def with_lora(folder: Path, *texts: str, model: str = "tiny-wan"):
    return decided(folder, config=None, model=model, features=Features(lora=texts))


class TestLora:
    @pytest.fixture(autouse=True)
    def here(self, tmp_path, monkeypatch):
        pytest.importorskip("peft")
        monkeypatch.chdir(tmp_path)

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            (lora("base_model.model.blocks.{}.attn1.to_q.lora_{}.weight"), "as pipe.save_lora_weights writes them$"),
            (lora("text_encoder.block.{}.q.lora_{}.weight"), "none of its 4 weights belongs to a transformer"),
            (
                lora("transformer.layers.{}.attn.q.lora_{}.weight"),
                r"modules \(layers.0.attn.q, …\) are not in the model",
            ),
            (lora(down=1536), r"blocks.0.attn1.to_q, \[4, 1536\] and \[288, 4\], do not fit the \[288, 288\]"),
        ],
    )
    def test_weights_of_another_model_are_rejected(self, tmp_path, weights, message):
        save_file(weights, "a.safetensors")
        with pytest.raises(UserError, match=rf"^--lora a\.safetensors.*{message}") as raised:
            with_lora(tmp_path, "a.safetensors")
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("gone.safetensors", None, "does not exist; give a file, a folder or a repository"),
            ("a.safetensors", POINTER, "is a pointer of Git LFS, not the file itself"),
            ("a.safetensors", "no weights", r"cannot be read \("),
            ("some/lora", None, r"cannot be read \(.*offline"),
        ],
    )
    def test_files_without_weights_are_rejected(self, tmp_path, name, content, message):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=rf"^--lora {name}.*{message}") as raised:
            with_lora(tmp_path, name)
        assert "\n" not in str(raised.value)

    def test_weights_with_diffusers_names_or_others_name_one_of_two_transformers(self, tmp_path):
        """Tries those of ComfyUI and LightX2V; modules that the model lacks are left to diffusers."""
        save_file(lora("diffusion_model.blocks.{}.self_attn.q.lora_{}.weight"), "a.safetensors")
        save_file(lora() | lora("transformer.blocks.{}.attn2.add_k_proj.lora_{}.weight"), "b.safetensors")
        with_lora(tmp_path, "a.safetensors:transformer", "b.safetensors:transformer_2=0.5", model="tiny-wan2.2")
        with pytest.raises(UserError, match=r"^--lora a.safetensors: tiny-wan2.2 has two transformers; name one of"):
            with_lora(tmp_path, "a.safetensors", model="tiny-wan2.2")
        with_lora(tmp_path, "a.safetensors:transformer=0.5")
        with pytest.raises(UserError, match=r"^--lora a.safetensors: tiny-wan has one transformer; remove :trans"):
            with_lora(tmp_path, "a.safetensors:transformer_2")


class TestSourceVideo:
    """A video's frames grow brighter by 20 from one to the next."""

    @pytest.mark.parametrize(
        ("changes", "taken"),
        [
            ({}, [0, 1, 2, 3, 4]),
            ({"fps": 32}, [0, 2, 4, 6, 8]),
            ({"fps": 24}, [0, 2, 3, 4, 6]),
            ({"fps": 8}, [0, 0, 1, 2, 2]),
        ],
    )
    def test_frames_are_the_nearest_in_time_in_the_new_size(self, tmp_path, changes, taken):
        save_video(tmp_path / "a.mp4", **changes)
        settings = GenerateSettings(width=96, height=64, num_frames=5, fps=16)
        frames = source_frames(tmp_path / "a.mp4", settings, TINY_MODELS["wan"])
        assert {frame.size for frame in frames} == {(96, 64)}
        assert [round(np.asarray(frame)[20:40, 30:60].mean() / 20) for frame in frames] == taken

    @pytest.mark.parametrize(
        ("video", "message"),
        [
            ({"width": 64, "height": 128}, "is 64×128: more than half of it would be cut off in a video of 96×64"),
            ({"frames": 6}, "too few frames: got 6 frames at 16 a second, expected 9; set generate.num_frames=5"),
            (bytes(range(256)), "has no frames that ffmpeg can read"),
        ],
    )
    def test_what_does_not_fit_is_rejected_in_one_line(self, tmp_path, video, message):
        if isinstance(video, bytes):
            (tmp_path / "a.mp4").write_bytes(video)
        else:
            save_video(tmp_path / "a.mp4", **video)
        with pytest.raises(UserError, match=rf"^--video .*a.mp4 .*{message}") as raised:
            decided(tmp_path, video=tmp_path / "a.mp4")
        assert "\n" not in str(raised.value)


class TestCheckpoint:
    @pytest.fixture
    def tiny(self, tmp_path):
        return make_tiny("wan", tmp_path / "tiny")

    def test_a_part_of_another_class_is_rejected_and_not_run(self, tmp_path, tiny):
        index = json.loads((tiny / "model_index.json").read_text())
        (tiny / "scheduler" / "my_scheduler.py").write_text("raise SystemExit('ran')")
        for scheduler, message in (
            (
                ["my_scheduler", "Mine"],
                "my_scheduler.Mine, custom code in the checkpoint, which db-SP does not run; save scheduler",
            ),
            (["diffusers", "SchedulerToCome"], r"diffusers.SchedulerToCome, which version .* does not have"),
        ):
            (tiny / "model_index.json").write_text(json.dumps(index | {"scheduler": scheduler}))
            with pytest.raises(UserError, match=f"^checkpoint .*/tiny: its scheduler is {message}"):
                decided(tmp_path, config=None, model=str(tiny))
        (tiny / "model_index.json").write_text(json.dumps(index | {"scheduler": ["no_library", "Mine"]}))
        with pytest.raises(UserError, match=r"^checkpoint .*/tiny cannot be loaded: "):
            load_stock_pipeline(str(tiny), None, from_image=False, flow_shift=None)
        (tiny / "model_index.json").write_text(json.dumps(index | {"_class_name": ["my_pipeline", "Mine"]}))
        with pytest.raises(UserError, match=r"^--model .*/tiny is .*; dbsp generate supports WanPipeline"):
            decided(tmp_path, config=None, model=str(tiny))

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            (
                "tokenizer/tokenizer.json",
                POINTER.encode(),
                "is a pointer of Git LFS, not the file itself; fetch it with",
            ),
            (WEIGHTS, b"", "cannot be read as weights .*; download it again$"),
        ],
    )
    def test_a_damaged_file_is_named_in_one_line(self, tmp_path, tiny, name, content, message):
        file = tiny / name
        file.write_bytes(content)
        with pytest.raises(UserError, match=f"^{file} {message}") as raised:
            decided(tmp_path, config=None, model=str(tiny))
        assert "\n" not in str(raised.value)

    def test_a_folder_that_is_not_whole_is_rejected_before_and_in_the_ranks(self, tmp_path, tiny, monkeypatch):
        require_checkpoint(str(tiny))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        generation = decided(tmp_path, config=None, model=str(tiny))
        (tiny / "transformer/diffusion_pytorch_model.safetensors").unlink()
        for action in (lambda: require_checkpoint(str(tiny)), lambda: make_videos(generation)):
            with pytest.raises(
                UserError, match=f"^checkpoint {tiny} lacks transformer/diffusion_py.*; download it again"
            ):
                action()
        shutil.rmtree(tiny / "vae")
        with pytest.raises(UserError, match=f"^checkpoint {tiny} lacks .*vae/"):
            require_checkpoint(str(tiny))

    def test_a_repository_is_looked_for_in_the_cache_and_then_on_the_hub(self, tmp_path, tiny, monkeypatch):
        """Gives an empty cache, and a hub that cannot be reached: tests run offline."""
        cache, wan = tmp_path / "cache", MODEL_SPECS["wan2.1-t2v-14b"].hub
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        said = f"^checkpoint {wan} is not in {cache}, and cannot be downloaded from https://huggingface.co .*offline"
        with pytest.raises(UserError, match=said):
            require_checkpoint(wan)
        repository = cache / f"models--{wan.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("a1", encoding="utf-8")
        snapshot = shutil.copytree(tiny, repository / "snapshots" / "a1")
        require_checkpoint(wan)
        (snapshot / "vae" / "diffusion_pytorch_model.safetensors").unlink()
        said = f"^checkpoint {wan} lacks vae/diffusion_pytorch_model.safetensors in {cache}, and cannot be downloaded"
        with pytest.raises(UserError, match=said):
            require_checkpoint(wan)
