"""Weights of a pipeline's folder that are loaded, and those that are missing."""

from __future__ import annotations

import json

import diffusers
import pytest

from dbsp_core.models.table import MODEL_SPECS
from dbsp_diffusers.checkpoint import Checkpoint, load_stock_pipeline

INDEX = {
    "_class_name": "WanPipeline",
    "boundary_ratio": 0.9,
    "image_encoder": [None, None],
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
}
ENCODER, TRANSFORMER = "text_encoder/model", "transformer/diffusion_pytorch_model"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps(INDEX), encoding="utf-8")
    for part in ("scheduler", "tokenizer", "text_encoder", "transformer"):
        (tmp_path / part).mkdir()
    (tmp_path / "text_encoder" / "config.json").write_text('{"transformers_version": "5"}', encoding="utf-8")
    return tmp_path


def write(folder, *names):
    for name in names:
        (folder / name).write_bytes(b"weights")


def index(folder, name, *shards):
    (folder / name).write_text(json.dumps({"weight_map": {f"layer{n}": s for n, s in enumerate(shards)}}))


def found(folder):
    checkpoint = Checkpoint.read(folder)
    return checkpoint.variant, checkpoint.missing


def loaded(folder):
    return [str(path.relative_to(folder)) for path in Checkpoint.read(folder).weights()]


WHOLE = [f"{ENCODER}.safetensors", f"{TRANSFORMER}.safetensors"]


@pytest.mark.parametrize(
    ("files", "variant", "weights"),
    [
        ([*WHOLE, f"{ENCODER}.fp16.safetensors"], None, WHOLE),
        (
            [WHOLE[0], f"{TRANSFORMER}.bf16.safetensors", f"{TRANSFORMER}.fp16.safetensors"],
            "bf16",
            [WHOLE[0], f"{TRANSFORMER}.bf16.safetensors"],
        ),
    ],
    ids=["whole", "a part without a variant"],
)
def test_whole_checkpoint_has_nothing_missing(folder, files, variant, weights):
    write(folder, *files)
    assert found(folder) == (variant, ())
    assert loaded(folder) == weights


def test_missing_files_are_named(folder):
    (folder / "tokenizer").rmdir()
    write(folder, WHOLE[0])
    assert found(folder) == (None, ("tokenizer/", WHOLE[1]))


def test_two_parts_of_different_variants_are_not_whole(folder):
    write(folder, f"{ENCODER}.bf16.safetensors", f"{TRANSFORMER}.fp16.safetensors")
    assert found(folder) == (None, tuple(WHOLE))


def test_checkpoint_needs_all_files_of_its_index(folder):
    write(folder, WHOLE[0], f"{TRANSFORMER}-00001-of-00002.safetensors")
    shards = [f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    second = folder / "transformer" / shards[1]
    assert found(folder) == (None, (WHOLE[1],)), "files without an index are not loaded"
    index(folder, f"{WHOLE[1]}.index.json", *shards, shards[0])
    assert found(folder) == (None, (f"transformer/{shards[1]}",))
    second.symlink_to("gone")
    assert found(folder) == (None, (f"transformer/{shards[1]}",)), "as a download that was cut off leaves it"
    second.unlink()
    second.write_bytes(b"weights")
    assert found(folder) == (None, ())
    assert loaded(folder) == [WHOLE[0], *(f"transformer/{shard}" for shard in shards)]
    write(folder, f"{WHOLE[1]}.index.json")
    assert found(folder) == (None, (f"{WHOLE[1]}.index.json",)), "an index that cannot be read"


@pytest.mark.parametrize("name", ["{}.fp16-0000{}-of-00002.safetensors", "{}-0000{}-of-00002.fp16.safetensors"])
def test_variant_is_found_in_both_forms_of_names(folder, name):
    shards = [name.format("diffusion_pytorch_model", number) for number in (1, 2)]
    weights = [f"{ENCODER}.fp16.safetensors", *(f"transformer/{shard}" for shard in shards)]
    write(folder, *weights)
    index(folder, f"{WHOLE[1]}.index.fp16.json", *shards)
    assert found(folder) == ("fp16", ())
    assert loaded(folder) == weights
    (folder / "transformer" / shards[0]).unlink()
    assert found(folder) == (None, tuple(WHOLE))


@pytest.mark.parametrize(
    ("model", "from_image", "loaded"),
    [
        ("wan2.2-ti2v-5b", True, "WanImageToVideoPipeline"),
        ("wan2.2-ti2v-5b", False, "DiffusionPipeline"),
        ("ltx-2", True, "LTX2ImageToVideoPipeline"),
        ("wan2.1-t2v-14b", True, "DiffusionPipeline"),  # which takes no image
        ("wan2.1-vace-14b", True, "DiffusionPipeline"),
    ],
)
def test_class_that_starts_from_an_image_is_for_checkpoints_that_can(monkeypatch, model, from_image, loaded):
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", classmethod(lambda cls, *_, **__: cls))
    signature = MODEL_SPECS[model].signature
    assert load_stock_pipeline(model, signature, from_image=from_image, flow_shift=None).__name__ == loaded
