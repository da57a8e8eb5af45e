"""Weights of a pipeline's folder that are loaded, and those that are missing."""

from __future__ import annotations

import json

import pytest

from dbsp_diffusers.checkpoint import Checkpoint

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
    about = json.dumps({"transformers_version": "5"})
    (tmp_path / "text_encoder" / "config.json").write_text(about, encoding="utf-8")
    return tmp_path


def write(folder, *names):
    for name in names:
        (folder / name).write_bytes(b"weights")


def index(folder, name, *shards):
    (folder / name).write_text(json.dumps({"weight_map": {f"layer{n}": s for n, s in enumerate(shards)}}))


def found(folder):
    one = Checkpoint.read(folder)
    return one.variant, one.missing


def loaded(folder):
    return [str(path.relative_to(folder)) for path in Checkpoint.read(folder).weights()]


@pytest.mark.parametrize(
    ("files", "variant", "weights"),
    [
        (
            [f"{ENCODER}.safetensors", f"{ENCODER}.fp16.safetensors", f"{TRANSFORMER}.safetensors"],
            None,
            [f"{ENCODER}.safetensors", f"{TRANSFORMER}.safetensors"],
        ),
        (["text_encoder/pytorch_model.bin", f"{TRANSFORMER}.bin"], None, None),
        (
            [f"{ENCODER}.safetensors", f"{TRANSFORMER}.bf16.safetensors", f"{TRANSFORMER}.fp16.safetensors"],
            "bf16",
            [f"{ENCODER}.safetensors", f"{TRANSFORMER}.bf16.safetensors"],
        ),
    ],
    ids=["whole", "old files", "a part without a variant"],
)
def test_whole_checkpoint_has_nothing_missing(folder, files, variant, weights):
    write(folder, *files)
    assert found(folder) == (variant, ())
    assert weights is None or loaded(folder) == weights


def test_missing_file_is_named(folder):
    (folder / "tokenizer").rmdir()
    write(folder, f"{ENCODER}.safetensors")
    assert found(folder) == (None, ("tokenizer/", f"{TRANSFORMER}.safetensors"))


def test_checkpoint_needs_all_files_of_its_index(folder):
    write(folder, f"{ENCODER}.safetensors", f"{TRANSFORMER}-00001-of-00002.safetensors")
    shards = [f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert found(folder) == (None, (f"{TRANSFORMER}.safetensors",)), "files without an index are not loaded"
    index(folder, f"{TRANSFORMER}.safetensors.index.json", *shards, shards[0])
    assert found(folder) == (None, (f"transformer/{shards[1]}",))
    (folder / "transformer" / shards[1]).symlink_to("gone")
    assert found(folder) == (None, (f"transformer/{shards[1]}",)), "as a download that was cut off leaves it"
    (folder / "transformer" / shards[1]).unlink()
    write(folder, f"transformer/{shards[1]}")
    assert found(folder) == (None, ())
    assert loaded(folder) == [f"{ENCODER}.safetensors", *(f"transformer/{shard}" for shard in shards)]
    write(folder, f"{TRANSFORMER}.safetensors.index.json")
    assert found(folder) == (None, (f"{TRANSFORMER}.safetensors.index.json",)), "an index that cannot be read"


@pytest.mark.parametrize(
    "shards",
    [
        [
            "diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
            "diffusion_pytorch_model.fp16-00002-of-00002.safetensors",
        ],
        [
            "diffusion_pytorch_model-00001-of-00002.fp16.safetensors",
            "diffusion_pytorch_model-00002-of-00002.fp16.safetensors",
        ],
    ],
)
def test_variant_is_found_in_both_forms_of_names(folder, shards):
    write(folder, f"{ENCODER}.fp16.safetensors", *(f"transformer/{shard}" for shard in shards))
    index(folder, f"{TRANSFORMER}.safetensors.index.fp16.json", *shards)
    assert found(folder) == ("fp16", ())
    assert loaded(folder) == [f"{ENCODER}.fp16.safetensors", *(f"transformer/{shard}" for shard in shards)]
    (folder / "transformer" / shards[0]).unlink()
    assert found(folder) == (None, (f"{ENCODER}.safetensors", f"{TRANSFORMER}.safetensors"))


def test_two_parts_of_different_variants_are_not_whole(folder):
    write(folder, f"{ENCODER}.bf16.safetensors", f"{TRANSFORMER}.fp16.safetensors")
    assert found(folder) == (None, (f"{ENCODER}.safetensors", f"{TRANSFORMER}.safetensors"))
