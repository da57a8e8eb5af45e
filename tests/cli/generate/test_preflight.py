"""Messages before a rank is started: settings that cannot work here, checkpoints that are missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from dbsp_cli.generate.videos import make_videos
from dbsp_cli.tiny_models import make_tiny
from dbsp_core.config import DbspConfig
from dbsp_core.models.table import MODEL_SPECS
from dbsp_core.utils.errors import SettingError, UserError
from dbsp_diffusers.checkpoint import require_checkpoint
from dbsp_diffusers.resolve import require_possible
from tests.cli.generate.test_requests import decided

WAN = MODEL_SPECS["wan2.1-t2v-14b"]
ELSEWHERE = "cpu" if torch.cuda.is_available() else "sparge"


@pytest.mark.parametrize(
    ("settings", "path", "message"),
    [
        ({"kernel": ELSEWHERE}, ("kernel",), f"kernel {ELSEWHERE!r} cannot be used here"),
        ({"machine": "h300"}, ("machine",), "no hardware 'h300'; use a800"),
    ],
)
def test_setting_that_cannot_work_here_is_rejected_with_its_path(settings, path, message):
    with pytest.raises(SettingError, match=message) as raised:
        require_possible(DbspConfig.load(settings))
    assert raised.value.path == path


def test_setting_that_can_work_is_accepted():
    require_possible(DbspConfig.load({"mask": {"source": "radial"}, "machine": "a800"}))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Gives an empty cache, and a hub that cannot be reached: tests run offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_checkpoint_that_is_nowhere_is_one_line(cache):
    with pytest.raises(UserError) as raised:
        require_checkpoint(WAN.hub)
    said = str(raised.value)
    assert said.startswith(f"checkpoint {WAN.hub} is not in {cache}, and https://huggingface.co does not give it (")
    assert "offline" in said
    assert "\n" not in said


def snapshot_of(cache: Path, name: str) -> Path:
    """Returns the path of a repository's files in the cache, where they are looked for."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a1", encoding="utf-8")
    return repository / "snapshots" / "a1"


def test_a_checkpoint_that_is_here_needs_no_network(cache):
    snapshot = snapshot_of(cache, WAN.hub)
    snapshot.mkdir(parents=True)
    (snapshot / "model_index.json").write_text("{}")
    for model in (WAN.hub, str(snapshot), None):
        require_checkpoint(model)


@pytest.fixture
def tiny(tmp_path):
    return make_tiny("wan", tmp_path / "tiny")


@pytest.mark.parametrize("gone", ["vae", "transformer/diffusion_pytorch_model.safetensors"])
def test_a_folder_that_is_not_whole_is_rejected(tiny, tmp_path, gone, monkeypatch):
    require_checkpoint(str(tiny))
    path = tiny / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    named = "vae/" if gone == "vae" else gone
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    for require in (require_checkpoint, lambda model: make_videos(decided(tmp_path, config=None, model=model))):
        with pytest.raises(UserError, match=f"^checkpoint {tiny} lacks {named}; download it again, whole$"):
            require(str(tiny))


def test_a_repository_of_which_the_cache_has_a_part_is_named_with_what_it_lacks(cache, tiny):
    snapshot = shutil.copytree(tiny, snapshot_of(cache, "some/wan"))
    (snapshot / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    said = f"^checkpoint some/wan lacks vae/diffusion_pytorch_model.safetensors in {cache}, and https://hugg"
    with pytest.raises(UserError, match=said):
        require_checkpoint("some/wan")


def test_a_variant_is_loaded(tiny, tmp_path, one_rank):
    for file in list(tiny.rglob("*.safetensors")):
        file.rename(file.with_name(f"{file.stem}.fp16.safetensors"))
    require_checkpoint(str(tiny))
    make_videos(decided(tmp_path, config=None, model=str(tiny)))
    assert (tmp_path / "v.mp4").stat().st_size > 0


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\x09" + b"\0" * 7 + b'{"a": {}}']
)
def test_what_is_no_file_of_weights_is_named(tiny, content):
    """Tries Git LFS's stub, too, whose first eight bytes are no length to read."""
    file = tiny / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(content)
    with pytest.raises(
        UserError, match=rf"^{file} (cannot be read as weights .*; download it|is a pointer of Git LFS)"
    ):
        require_checkpoint(str(tiny))


@pytest.mark.parametrize(("gpu", "model", "said"), [(False, WAN.name, 1), (True, WAN.name, 0), (False, "tiny-wan", 0)])
def test_a_published_model_on_a_cpu_is_warned_of(tmp_path, monkeypatch, gpu, model, said):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpu)
    config = "tiny-wan" if model == "tiny-wan" else None
    warnings = decided(tmp_path, config=config, model=model, changes=()).warnings
    expected = f"there is no GPU, and {model} can take days on CPUs; --config tiny-wan is for trying out"
    assert [one for one in warnings if "no GPU" in one] == [expected] * said


def test_parameters_are_those_of_the_models():
    """Transformers are counted on the meta device; the table has text encoders as published."""
    diffusers = pytest.importorskip("diffusers")
    for spec in (
        spec for spec in MODEL_SPECS.values() if any(one in spec.name for one in ("wan2.1-t2v", "t2v-a14b", "cog"))
    ):
        same = {"num_attention_heads": spec.heads, "attention_head_dim": spec.head_dim, "num_layers": spec.layers}
        with torch.device("meta"):
            if spec.pipeline == "WanPipeline":
                model = diffusers.WanTransformer3DModel(ffn_dim=spec.ffn, **same)
            else:
                patch = {"patch_size_t": spec.patch_frames, "patch_bias": False} if spec.patch_frames > 1 else {}
                model = diffusers.CogVideoXTransformer3DModel(
                    in_channels=16, use_rotary_positional_embeddings=True, **same, **patch
                )
        transformers = 2 if spec.variant == "two" else 1
        encoder = spec.parameters - transformers * sum(p.numel() for p in model.parameters())
        assert encoder == {"WanPipeline": 5_680_910_336, "CogVideoXPipeline": 4_762_310_656}[spec.pipeline]


@pytest.mark.parametrize(
    ("first", "last", "steps", "all_dense"), [(99, 0, 2, True), (1, 1, 2, True), (1, 0, 2, False)]
)
def test_a_schedule_that_leaves_nothing(first, last, steps, all_dense):
    config = DbspConfig.load({"dense_schedule": {"first_steps": first, "last_steps": last}})
    said = config.dense_schedule.message(steps)
    assert (said is not None) is all_dense
    assert said is None or f"makes all {steps} steps dense (first_steps {first}, last_steps {last})" in said
    assert config.dense_schedule.message(None) is None


def test_a_folder_in_a_file_is_relative_to_the_file(tmp_path, monkeypatch):
    folder = tmp_path / "files"
    (folder / "mine" / "transformer").mkdir(parents=True)
    (folder / "mine" / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    (folder / "my.yaml").write_text("model: mine\n")
    monkeypatch.chdir(tmp_path)
    assert DbspConfig.load("files/my.yaml").model == "files/mine"
    (folder / "my.yaml").write_text("model: tiny-wan\n")
    assert DbspConfig.load("files/my.yaml").model == "tiny-wan"
    assert DbspConfig.load({"model": "mine"}).model == "mine"
