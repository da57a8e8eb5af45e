"""dbsp_xdit: xfuser's own wrapper over 1 to 4 ranks equals one process; its command line, models and autoloading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dbsp_core import Strategy
from dbsp_core.config import DbspConfig
from dbsp_core.models.table import find_model_spec
from dbsp_core.sources import NablaSource, RadialSource, SolSource, UnionSource, VsaSource, WindowSource
from dbsp_diffusers.patching import PatchSet
from dbsp_xdit.command_line import dbsp_requested, is_xfuser_run, is_xfusers_torchrun
from dbsp_xdit.cpu_shim import cpu_patches
from dbsp_xdit.flags import config_from, parse_known
from dbsp_xdit.models import find_model, preflight, settings_of
from dbsp_xdit.patches import _patch_base_model, _patch_runtime_state
from tests.support.programs import run
from tests.xdit.xdit_cases import XditCase, registered_model, run_xdit_case, start_xfuser

TOLERANCE = 1e-5
MASKS = (
    {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8},
    {"source": "window", "window": [1, 3, 3], "block_q": 8, "block_k": 16},
    {"source": "svg", "frames": 1, "bandwidth": 0.2, "block_q": 16, "block_k": 8},
    {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 8, "token_order": "tile:2x3x2"},
)


def test_cudnn_is_not_there_without_an_accelerator(monkeypatch):
    """torch's build for CUDA says that it is, and xfuser would give it text attention to compute."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch._C, "_has_cudnn", True)
    patches = PatchSet()
    cpu_patches(patches)
    assert not torch.backends.cudnn.is_available()
    patches.detach()
    assert torch.backends.cudnn.is_available()


class TestWhatXfuserHasNotInitialised:
    """As its own tests have it, on stand-ins of its classes: it runs as without db-SP."""

    class Model:
        def _post_load_and_state_initialization(self, input_args): ...
        def initialize(self, input_args): ...
        def run(self, input_args):
            return "ran", input_args

    class State:
        def _check_if_backend_compatible_with_current_configuration(self, backend):
            raise ValueError(f"no {backend}")

    def test_a_runner_without_a_pipeline(self):
        patches = PatchSet()
        _patch_base_model(SimpleNamespace(xFuserModel=self.Model), patches)
        try:
            assert self.Model().run({}) == ("ran", {})
        finally:
            patches.detach()

    def test_a_state_without_parallelism(self):
        patches, dit = PatchSet(), type("DiTRuntimeState", (), {"_check_model_and_parallel_config": None})
        _patch_runtime_state(SimpleNamespace(RuntimeState=self.State, DiTRuntimeState=dit), patches)
        try:
            with pytest.raises(ValueError, match="no VSA"):
                self.State()._check_if_backend_compatible_with_current_configuration("VSA")
        finally:
            patches.detach()


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equals_one_process(pool, world):
    workers = pool(world)
    workers.run(start_xfuser)
    for strategy in Strategy.all_for(world):
        for mask in (MASKS[0] | {"drift": 0.05}, *MASKS):
            config = {"mask": mask, "strategy": str(strategy)}
            # 3·5·7 = 105 tokens: xfuser pads them on 2 and 4 ranks
            for difference, from_dense in workers.run(run_xdit_case, XditCase((3, 5, 7), config, batch=2)):
                assert difference <= TOLERANCE, (strategy, config)
                assert from_dense > 100 * TOLERANCE, "the mask must matter"
    for config in ({"mask": {"source": "dense"}}, {"mask": MASKS[0], "strategy": "auto", "machine": "a800"}):
        for difference, _ in workers.run(run_xdit_case, XditCase((3, 5, 7), config)):
            assert difference <= TOLERANCE, config


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "/venv/bin/xdit", "--model", "m"], True),
        (["python", "-u", "-m", "xfuser.runner", "--model", "m"], True),
        (["python", "-m", "xfuser.cli"], True),
        (["python", "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "xfuser.runner"], False),
        (["python", "-c", "import torch"], False),
        (["python", "train.py", "xdit"], False),
        (["python"], False),
    ],
)
def test_autoload_knows_an_xfuser_run(command, expected):
    assert is_xfuser_run(command) is expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "xfuser.runner", "--model", "m"], True),
        (["python", "-m", "torch.distributed.run", "-m", "my.runner", "-m", "xfuser.runner"], False),
        (["python", "-u", "-m", "xfuser.runner", "--model", "m"], False),
        (["python", "/venv/bin/xdit"], False),
    ],
)
def test_autoload_knows_the_torchrun_that_xdit_starts(command, expected):
    assert is_xfusers_torchrun(command) is expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--sp-backend", "dbsp"], True),
        (["--sp_backend=dbsp"], True),
        (["--sp-backend", "dpsb"], True),
        (["--sp-backend", "usp"], False),
        (["--prompt", "dbsp"], False),
    ],
)
def test_only_a_backend_of_ours_makes_a_run_active(arguments, expected):
    assert dbsp_requested(["xdit", "--model", "m", *arguments]) is expected


def test_importing_torch_elsewhere_loads_nothing_of_ours():
    check = "import torch, sys; print([m for m in sys.modules if m.startswith(('dbsp_core', 'dbsp_xdit.patches'))])"
    out = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_settings_come_from_the_file(tmp_path):
    file = tmp_path / "dbsp.yaml"
    file.write_text("mask: {source: window}\nplanner: contiguous\nstrategy: U2R2\n")
    line = ["--sp-backend=dbsp", "--sp-config", str(file), "--ulysses-degree", "4", "--prompt", "a", "b"]
    assert config_from(parse_known(line)) == DbspConfig.load(file)


@pytest.mark.parametrize(
    ("settings", "flags", "message"),
    [
        ("strategy: U3R1", ["--ulysses_degree", "2"], "needs 3 GPUs"),
        ("strategy: 4x2", [], "not of the form UxRy"),
        ("planner: magic", [], "unknown planner 'magic'"),
        ("vae: true", ["--use_parallel_vae"], "--use_parallel_vae shares decoding out already"),
    ],
)
def test_a_file_s_mistakes_are_found_as_well(tmp_path, settings, flags, message):
    (tmp_path / "dbsp.yaml").write_text(settings)
    with pytest.raises(ValueError, match=message):
        preflight(["--sp-backend", "dbsp", "--sp-config", str(tmp_path / "dbsp.yaml"), "--prompt", "x", *flags])


@pytest.mark.parametrize(
    ("flag", "mask"),
    [
        (["--sp-config", "window:tile=[3,5,8],window=[3,5,5]"], WindowSource(tile=(3, 5, 8), window=(3, 5, 5))),
        (["--sp_config=radial:width=0.5"], RadialSource(width=0.5)),
        (["--sp-config", "sol:tau=0.5"], SolSource(tau=0.5)),
        (["--sp-config", "vsa:sparsity=0.7,tile=[2,4,8]"], VsaSource(sparsity=0.7, tile=(2, 4, 8))),
        (["--sp-config", "window+nabla:cdf=0.8"], UnionSource((WindowSource(), NablaSource(cdf=0.8)))),
    ],
)
def test_a_mask_may_come_with_its_settings(flag, mask):
    config = config_from(parse_known(["--sp-backend", "dbsp", *flag]))
    assert config is not None
    assert config.mask == mask


def test_usp_asks_for_nothing():
    assert config_from(parse_known(["--model", "m", "--ulysses_degree", "2"])) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sp-backend", "nonsense"], "invalid choice: 'nonsense'"),
        (["--sp-config", "sparge"], "no effect without --sp-backend dbsp"),
        (["--sp-mask", "sparge"], "--sp-mask was removed; write --sp-config MASK"),
        (["--sp_strategy=U2R1"], "--sp_strategy was removed; the degrees say it"),
        (["--sp-backend", "dbsp", "--sp-planner", "paper"], "removed; write planner in the file of --sp-config"),
        (["--sp-backend", "dbsp", "--sp-vae"], "removed; write vae: true in the file of --sp-config"),
        (["--sp-backend", "dbsp", "--sp-report", "out"], "removed; write report: DIR in the file of --sp-config"),
        (["--sp-backend", "dbsp", "--sp-config", "/nowhere.safetensors"], "does not exist"),
        (["--sp-backend", "dbsp", "--sp-config", "radail:width=1"], "did you mean 'radial'"),
        (["--sp-backend", "dbsp", "--sp-config", "radial:wdith=1"], "unknown key 'wdith' in mask source 'radial'"),
        (["--sp-backend", "dbsp", "--sp-config", "radial:width"], "write NAME:key=value"),
        (["--sp-backend", "dbsp", "--sp-config", "/nowhere.yaml"], "does not exist"),
        (["--sp-backend", "dbsp", "--pipefusion_parallel_degree", "2"], "leave it at 1"),
        (["--sp-backend", "dbsp"], "--model is missing; use one of wan2.1-t2v-14b, .* or a local folder"),
        (["--sp-backend", "dbsp", "--model", "./nowhere"], "that folder does not exist"),
        (["--sp-backend", "dbsp", "--tensor-parallel-degree", "2"], "leave it at 1"),
        (["--sp-backend", "dbsp", "--use_hybrid_attn_schedule"], "--use_hybrid_attn_schedule does not go with"),
        (["--sp-backend", "dbsp", "--use-spargeattn-head-balance"], "db-SP balances heads itself; leave it out"),
        (["--sp-backend", "dbsp", "--use_fp8_comms"], "8 bits with precision: int8 in --sp-config; leave"),
        (["--sp-backend", "dbsp", "--cache_method", "teacache"], "--cache_method teacache does not go with"),
        (["--sp-backend", "dbsp", "--attention_backend", "aiter_sparge"], "choose the mask with --sp-config"),
        (["--sp-backend", "dbsp", "--model", "CogVideoX1.5", "--height", "770"], "multiple of 16, for example 768"),
        (["--sp-backend", "dbsp", "--model", "CogVideoX1.5", "--num_frames", "84"], r"must be 8k \+ 1 .* example 81"),
        (
            ["--sp-backend", "dbsp", "--model", "wan2.1-t2v-14b", "--num_frames", "82"],
            r"must be 4k \+ 1 .* example 81",
        ),
        (
            ["--sp-backend", "dbsp", "--model", "wan2.1-t2v-1.3b", "--use_cfg_parallel"],
            "two groups of ranks; leave it out",
        ),
        (["--sp-backend", "dbsp", "--model", "Wan2.2-I2V"], "takes one image in xDiT, got 0"),
        (["--sp-backend", "dbsp", "--model", "Wan2.2-I2V", "--input_images", "nowhere.png"], "there is no such file"),
        (
            ["--sp-backend", "dbsp", "--model", "Wan2.2-T2V", "--input_images", "a.png"],
            "takes no image in xDiT, got 1",
        ),
        (
            ["--sp-backend", "dbsp", "--model", "Wan2.1-VACE-14B", "--input_images", "a.png"],
            "two images, of the first",
        ),
        (["--sp-backend", "dbsp", "--model", "Wan2.2-TI2V"], "needs --task t2v or --task i2v"),
        (["--sp-backend", "dbsp", "--model", "Wan2.2-TI2V", "--task", "t2v", "--height", "720"], "multiple of 32"),
        (["--sp-backend", "dbsp", "--model", "black-forest-labs/FLUX.1-dev"], "does not know that name"),
    ],
)
def test_mistakes_are_found_before_anything_is_launched(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        preflight(["--prompt", "x", *arguments])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("Wan2.1-T2V", "Wan-AI/Wan2.1-T2V-14B-Diffusers"),
        ("WAN2.1-T2V-1.3B", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
        ("Wan2.2-T2V", "Wan-AI/Wan2.2-T2V-A14B-Diffusers"),
        ("Wan2.2-I2V", "Wan-AI/Wan2.2-I2V-A14B-Diffusers"),
        ("Wan2.2-TI2V", "Wan-AI/Wan2.2-TI2V-5B-Diffusers"),
        ("Wan2.2-Distilled-I2V", "Wan-AI/Wan2.2-I2V-A14B-Diffusers"),
        ("wan2.1-i2v-14b-480p", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"),
        ("Wan2.1-VACE-1.3B", "Wan-AI/Wan2.1-VACE-1.3B-diffusers"),
        ("CogVideoX-5B", "zai-org/CogVideoX-5b"),
        ("thudm/cogvideox1.5-5b", "THUDM/CogVideoX1.5-5B"),
    ],
)
def test_published_checkpoints_by_any_name(pool, name, source):
    assert find_model(name).source == source
    workers = pool(1)
    workers.run(start_xfuser)
    (settings,) = workers.run(registered_model, name)
    like = find_model_spec(name)
    assert like is not None
    height = {"wan2.2-ti2v-5b": 736, "wan2.1-vace-1.3b": 720}.get(like.name, like.video.height)  # xfuser's own
    assert (settings["model_name"], settings["fps"], settings["height"]) == (source, like.video.fps, height)
    assert settings["as usual"], "a command makes the same video with and without db-SP"
    splits_guidance = like.pipeline == "WanImageToVideoPipeline" or like.variant == "ti2v"
    assert settings["cfg"] is (splits_guidance and "distilled" not in like.name)


def test_usp_runs_know_no_model_of_ours():
    assert settings_of({"sp_backend": "usp", "model": "CogVideoX1.5"}) is None
    assert settings_of({"sp_backend": "usp", "model": "./nowhere"}) is None


def test_local_folders_are_known_by_their_sizes(tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "CogVideoXPipeline"}))
    config = {"num_layers": 42, "num_attention_heads": 48, "attention_head_dim": 64, "patch_size": 2}
    for frames, name in ((None, "cogvideox-5b"), (2, "cogvideox1.5-5b")):
        for layers in (42, 7):  # the size of the published one, and another
            file = tmp_path / "transformer" / "config.json"
            file.write_text(json.dumps({**config, "num_layers": layers, "patch_size_t": frames}))
            assert find_model(str(tmp_path)).like.name == name


def test_local_folders_must_be_known_pipelines(tmp_path):
    with pytest.raises(ValueError, match=r"no model_index\.json"):
        find_model(str(tmp_path))
    index = tmp_path / "model_index.json"
    for text in ("{", "[" * 100_000):
        index.write_text(text)
        with pytest.raises(ValueError, match="cannot be read as JSON"):
            find_model(str(tmp_path))
    index.write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(ValueError, match="this is FluxPipeline"):
        find_model(str(tmp_path))
    index.write_text(json.dumps({"_class_name": []}))
    with pytest.raises(ValueError, match=r"this is \[\]"):
        find_model(str(tmp_path))
    index.write_text(
        json.dumps({"_class_name": "WanPipeline", "transformer_2": ["diffusers", "WanTransformer3DModel"]})
    )
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        find_model(str(tmp_path))
    index.write_text(json.dumps({"_class_name": "WanPipeline", "transformer_2": [None, None]}))
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        find_model(str(tmp_path))
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text("{}")
    assert find_model(str(tmp_path)).source == str(tmp_path)
    assert find_model(str(tmp_path)).like.name == "wan2.1-t2v-14b"
    for parts, name in (
        ({"transformer_2": ["diffusers", "x"]}, "wan2.2-t2v-a14b"),
        ({"expand_timesteps": True}, "wan2.2-ti2v-5b"),
    ):
        index.write_text(json.dumps({"_class_name": "WanPipeline"} | parts))
        assert find_model(str(tmp_path)).like.name == name


def test_a_mistake_exits_2_with_one_line():
    bin_folder = os.path.dirname(sys.executable)
    arguments = ["--sp-backend", "dbsp", "--model", "./nowhere", "--ulysses_degree", "2", "--prompt", "x"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = run([os.path.join(bin_folder, "xdit"), *arguments], **pipes)
    assert done.returncode == 2
    ours = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(ours) == 1
    assert "--model ./nowhere: that folder does not exist" in ours[0]
    assert "Traceback" not in done.stderr
