"""Files that a video is made from, opened before weights are loaded: LoRA weights, videos, checkpoints, pointers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dbsp_cli.generate.images import source_frames
from dbsp_cli.generate.pipeline import Features
from dbsp_cli.tiny_models import make_tiny
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.models.signature import PIPELINES
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.checkpoint import load_stock_pipeline
from tests.cli.generate.test_requests import decided, save_video

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
            (
                lora("blocks.{}.attn1.to_q.lora_{}.weight"),
                r"none of its 4 weights is of a transformer \(blocks.0.attn1",
            ),
            (lora("base_model.model.blocks.{}.attn1.to_q.lora_{}.weight"), "as pipe.save_lora_weights writes them$"),
            (lora("text_encoder.block.{}.q.lora_{}.weight"), "none of its 4 weights is of a transformer"),
            (
                lora("transformer.layers.{}.attn.q.lora_{}.weight"),
                r"modules \(layers.0.attn.q, …\) are not in the model",
            ),
            (lora(down=1536), r"blocks.0.attn1.to_q, \[4, 1536\] and \[288, 4\], do not fit the \[288, 288\]"),
            (lora(up=1536), r"do not fit the \[288, 288\] of the model's transformer; give weights made for this"),
            (lora(ranks=(4, 8)), r"\[4, 288\] and \[288, 8\], do not fit"),
            ({"nothing.of.it": torch.zeros(2)}, r"none of its 1 weights is of a transformer \(nothing.of.it\)"),
            ({}, "has no weights"),
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
            ("a/b/gone", None, "does not exist"),
            ("a.safetensors", POINTER, "is a pointer of Git LFS, not the file itself"),
            ("a.safetensors", "no weights", r"cannot be read \("),
            (
                "folder/pytorch_lora_weights.safetensors",
                POINTER,
                "pytorch_lora_weights.safetensors is a pointer of Git",
            ),
            ("empty/readme.md", "", r"cannot be read \("),
            ("some/lora", None, r"cannot be read \(.*offline"),
        ],
    )
    def test_files_without_weights_are_rejected(self, tmp_path, name, content, message):
        path = tmp_path / name
        if content is not None:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        given = name if content is None or "/" not in name else name.partition("/")[0]
        with pytest.raises(UserError, match=rf"^--lora {given}.*{message}") as raised:
            with_lora(tmp_path, given)
        assert "\n" not in str(raised.value)

    def test_modules_that_the_model_lacks_are_warned_of(self, tmp_path):
        save_file(lora() | lora("transformer.blocks.{}.attn2.add_k_proj.lora_{}.weight"), "a.safetensors")
        assert with_lora(tmp_path, "a.safetensors").warnings == (
            "--lora a.safetensors: the model's transformer lacks 2 of its 4 modules (blocks.0.attn2.add_k_proj, …), "
            "whose weights have no effect",
        )

    @pytest.mark.parametrize("name", ["transformer.{}", "diffusion_model.{}"])
    def test_one_of_two_transformers_is_named(self, tmp_path, name):
        """Tries diffusers' names, and those of ComfyUI and LightX2V."""
        module = "blocks.{}.attn1.to_q.lora_{}.weight" if name[0] == "t" else "blocks.{}.self_attn.q.lora_{}.weight"
        save_file(lora(name.format(module)), "a.safetensors")
        with_lora(tmp_path, "a.safetensors:transformer", "a.safetensors:transformer_2=0.5", model="tiny-wan2.2")
        with pytest.raises(UserError, match=r"^--lora a.safetensors: tiny-wan2.2 has two transformers; name the one"):
            with_lora(tmp_path, "a.safetensors", model="tiny-wan2.2")
        with_lora(tmp_path, "a.safetensors:transformer=0.5")
        with pytest.raises(UserError, match=r"^--lora a.safetensors: tiny-wan has one transformer; leave out :trans"):
            with_lora(tmp_path, "a.safetensors:transformer_2")

    def test_a_folder_is_checked_by_its_configuration(self, tmp_path):
        folder = make_tiny("wan", tmp_path / "model")
        save_file(lora(down=1536, up=1536), "a.safetensors")
        with pytest.raises(UserError, match="do not fit"):
            with_lora(tmp_path, "a.safetensors", model=str(folder))


class TestSourceVideo:
    """A video's frames grow brighter by 20 from one to the next."""

    def frames(self, path, **changes):
        settings = {"width": 96, "height": 64, "num_frames": 9, "fps": 16, **changes}
        found, said = source_frames(path, GenerateSettings(**settings), PIPELINES["WanPipeline"])
        assert {frame.size for frame in found} == {(settings["width"], settings["height"])}
        return [round(np.asarray(frame)[20:40, 30:60].mean() / 20) for frame in found], said

    def test_frames_are_those_of_the_video(self, tmp_path):
        save_video(tmp_path / "a.mp4")
        assert self.frames(tmp_path / "a.mp4") == ([*range(9)], None)

    @pytest.mark.parametrize(("fps", "taken"), [(32, [0, 2, 4, 6, 8]), (24, [0, 2, 3, 4, 6]), (8, [0, 0, 1, 2, 2])])
    def test_frames_of_another_rate_are_the_nearest_in_time(self, tmp_path, fps, taken):
        save_video(tmp_path / "a.mp4", fps=fps)
        found, said = self.frames(tmp_path / "a.mp4", num_frames=5)
        assert found == taken
        assert f" s at {fps} frames a second, the first 0.31 s are used, at 16 a second" in said

    def test_a_longer_one_is_used_from_its_beginning(self, tmp_path):
        save_video(tmp_path / "a.mp4", frames=12)
        found, said = self.frames(tmp_path / "a.mp4")
        assert found == [*range(9)]
        assert "of 0.75 s at 16 frames a second, the first 0.56 s are used" in said

    def test_another_shape_is_cut_and_not_squashed(self, tmp_path):
        pictures = np.zeros((9, 64, 128, 3), dtype=np.uint8)
        pictures[:, :, 48:80] = 255  # a third of 96 columns that are left, a quarter of all
        import imageio.v2 as imageio

        imageio.mimwrite(tmp_path / "a.mp4", list(pictures), fps=16, macro_block_size=1)
        settings = GenerateSettings(width=96, height=64, num_frames=9, fps=16)
        found, _ = source_frames(tmp_path / "a.mp4", settings, PIPELINES["WanPipeline"])
        assert {frame.size for frame in found} == {(96, 64)}
        assert abs((np.asarray(found[0]) > 127).mean() - 1 / 3) < 0.02

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"width": 64, "height": 128}, "is 64×128: more than half of it would be cut off in a video of 96×64"),
            (
                {"frames": 6},
                "too few frames: 6 frames at 16 a second, and the video has 9; set generate.num_frames=5, or",
            ),
            ({"frames": 9, "fps": 32}, "too few frames: 5 frames at 16 a second, .*; set generate.num_frames=5"),
        ],
    )
    def test_what_does_not_fit_is_rejected(self, tmp_path, changes, message):
        save_video(tmp_path / "a.mp4", **changes)
        with pytest.raises(UserError, match=rf"^--video .*a.mp4 .*{message}"):
            self.frames(tmp_path / "a.mp4")

    @pytest.mark.parametrize("content", [b"", bytes(range(256)), POINTER.encode(), b"RIFF    WAVEfmt "])
    def test_a_file_without_pictures_is_rejected_in_one_line(self, tmp_path, content):
        (tmp_path / "a.mp4").write_bytes(content)
        with pytest.raises(UserError, match=r"^--video .*a.mp4 (has no pictures|is a pointer of Git LFS)") as raised:
            decided(tmp_path, video=tmp_path / "a.mp4")
        assert "\n" not in str(raised.value)


class TestCheckpoint:
    @pytest.fixture
    def tiny(self, tmp_path):
        return make_tiny("wan", tmp_path / "tiny")

    def rejected(self, tmp_path, tiny, message):
        with pytest.raises(UserError, match=message) as raised:
            decided(tmp_path, config=None, model=str(tiny))
        assert "\n" not in str(raised.value)

    def change(self, tiny, **parts):
        index = json.loads((tiny / "model_index.json").read_text())
        (tiny / "model_index.json").write_text(json.dumps(index | parts))

    @pytest.mark.parametrize(
        ("scheduler", "message"),
        [
            (
                ["my_scheduler", "Mine"],
                "my_scheduler.Mine, code in the checkpoint, and db-SP runs none; save scheduler",
            ),
            (["__main__", "Mine"], "and no library __main__ is installed"),
            (["no_library.of_mine", "Mine"], "and no library no_library.of_mine is installed"),
            (["diffusers", "SchedulerToCome"], r"diffusers.SchedulerToCome, which version .* does not have"),
        ],
    )
    def test_a_part_of_another_class_is_rejected_and_not_run(self, tmp_path, tiny, scheduler, message):
        (tiny / "scheduler" / "my_scheduler.py").write_text("raise SystemExit('ran')")
        self.change(tiny, scheduler=scheduler)
        self.rejected(tmp_path, tiny, f"^checkpoint .*/tiny: its scheduler is .*{message}")

    def test_a_pipeline_of_its_own_is_rejected(self, tmp_path, tiny):
        self.change(tiny, _class_name=["my_pipeline", "Mine"])
        self.rejected(tmp_path, tiny, "^--model .*/tiny is .*; db-SP generates with WanPipeline")

    @pytest.mark.parametrize("file", ["tokenizer/tokenizer.json", "vae/diffusion_pytorch_model.safetensors"])
    def test_a_pointer_of_git_lfs_is_named(self, tmp_path, tiny, file):
        (tiny / file).write_text(POINTER)
        self.rejected(
            tmp_path, tiny, f"^{tiny / file} is a pointer of Git LFS, not the file itself; fetch it with git"
        )

    def test_a_byte_order_mark_is_named(self, tmp_path, tiny):
        for name in ("model_index.json", "vae/config.json"):
            content = (tiny / name).read_text()
            (tiny / name).write_text(content, encoding="utf-8-sig")
            self.rejected(tmp_path, tiny, f"^{tiny / name} has a byte order mark, which diffusers and transformers")
            (tiny / name).write_text(content)

    @pytest.mark.parametrize("offload", [None, "model"])
    def test_weights_that_are_cut_short_are_named(self, tmp_path, tiny, offload, monkeypatch):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        file = tiny / "transformer" / "diffusion_pytorch_model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(UserError, match=rf"^{file} cannot be read as weights .*; download it again$"):
            decided(tmp_path, config=None, model=str(tiny), features=Features(offload=offload))

    def test_a_part_that_cannot_be_read_is_one_line(self, tiny):
        (tiny / "scheduler" / "scheduler_config.json").write_text("no JSON")
        with pytest.raises(UserError, match=r"^checkpoint .*/tiny cannot be loaded: ") as raised:
            load_stock_pipeline(str(tiny), None, from_image=False, flow_shift=None)
        assert "\n" not in str(raised.value)
