"""The last stage of training: a pipeline folder that appears whole."""

from __future__ import annotations

from diffusers import WanPipeline

from dbsp_cli.tiny_models import make_tiny
from scripts.training.checkpoint import Card, save_pipeline


def test_folder_may_have_the_longest_name(tmp_path):
    pipe = WanPipeline.from_pretrained(make_tiny("wan", tmp_path / "wan"), local_files_only=True)
    card = Card("train", 0, 1, 1, "1 step", [0.5], [0.25], {"transformer": 1.0})
    folder = tmp_path / "made" / ("n" * 255)
    for _ in range(2):  # the second replaces the first
        save_pipeline(pipe.tokenizer, pipe.text_encoder, pipe.vae, pipe.transformer, card, folder)
    assert (folder / "model_index.json").is_file()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
