"""dbsp_xdit: xfuser's own wrapper over 1 to 4 ranks equals one process; its command line and models."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dbsp_core.config import DbspConfig
from dbsp_core.sources import NablaSource, RadialSource, SolSource, UnionSource, VsaSource, WindowSource
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.patching import require_names
from dbsp_xdit.command_line import config_from, source_of
from tests.support.programs import run
from tests.xdit.xdit_cases import XditCase, preflight_error, rank_error, registered_model, run_xdit_case, start_xfuser

TOLERANCE = 1e-5
MASK = {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}
SPARGE = {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 8, "token_order": "tile:2x3x2"}


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(
    ("world", "strategy", "mask"),
    [
        (1, "U1R1", MASK | {"drift": 0.05}),
        (2, "U1R2", SPARGE),
        pytest.param(4, "auto", MASK, marks=pytest.mark.long),
    ],
)
def test_transformer_equals_one_process(pool, world, strategy, mask):
    """The transformer becomes diffusers' own, of which tests/diffusers/models has every strategy."""
    workers = pool(world)
    workers.run(start_xfuser)
    config = {"mask": mask, "strategy": strategy, "machine": "a800"}
    # 3·5·7 = 105 tokens, which 4 ranks don't divide
    for difference, from_dense in workers.run(run_xdit_case, XditCase((3, 5, 7), config, batch=2)):
        assert difference <= TOLERANCE
        assert from_dense > 100 * TOLERANCE, "the mask must matter"


FLAG = {"sp_backend": "dbsp", "model": "m"}


def test_config_from_a_file_has_its_settings(tmp_path):
    file = tmp_path / "dbsp.yaml"
    file.write_text("mask: {source: window}\nplanner: contiguous\nstrategy: U2R2\n")
    assert config_from({**FLAG, "sp_config": str(file), "ulysses_degree": 4}) == DbspConfig.load(file)


@pytest.mark.parametrize(
    ("settings", "args", "message"),
    [
        ("strategy: U3R1", {"ulysses_degree": 2}, "needs 3 GPUs"),
        ("strategy: 4x2", {}, "not of the form UxRy"),
        ("planner: magic", {}, "unknown planner 'magic'"),
        ("vae: true", {"use_parallel_vae": True}, "--use_parallel_vae shares decoding out already"),
    ],
)
def test_config_from_a_file_with_a_mistake_is_rejected(tmp_path, settings, args, message):
    (tmp_path / "dbsp.yaml").write_text(settings)
    with pytest.raises(UserError, match=message):
        config_from({**FLAG, "sp_config": str(tmp_path / "dbsp.yaml"), **args})


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("window:tile=[3,5,8],window=[3,5,5]", WindowSource(tile=(3, 5, 8), window=(3, 5, 5))),
        ("radial:width=0.5", RadialSource(width=0.5)),
        ("sol:tau=0.5", SolSource(tau=0.5)),
        ("vsa:sparsity=0.7,tile=[2,4,8]", VsaSource(sparsity=0.7, tile=(2, 4, 8))),
        ("window+nabla:cdf=0.8", UnionSource((WindowSource(), NablaSource(cdf=0.8)))),
    ],
)
def test_config_from_a_mask_with_settings_has_them(text, mask):
    config = config_from({**FLAG, "sp_config": text})
    assert config is not None
    assert config.mask == mask


def test_config_from_a_missing_mask_file_is_rejected():
    with pytest.raises(UserError, match=r"mask file /nowhere\.safetensors does not exist"):
        config_from({**FLAG, "sp_config": "/nowhere.safetensors"})


def test_config_without_dbsp_is_none():
    assert config_from({"sp_backend": "usp", "model": "m", "ulysses_degree": 2}) is None
    assert config_from({"model": "m"}) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--sp-backend nonsense", "invalid choice: 'nonsense'"),
        ("--sp-backend usp --sp-config sparge", "no effect without --sp-backend dbsp"),
        ("--sp_config=radail:width=1", "did you mean 'radial'"),
        ("--sp-config radial:wdith=1", "unknown key 'wdith' in mask source 'radial'"),
        ("--sp-config radial:width", "write NAME:key=value"),
        ("--sp-config /nowhere.yaml", "does not exist"),
        ("--pipefusion_parallel_degree 2", "--pipefusion_parallel_degree does not go with --sp-backend dbsp"),
        ("--tensor-parallel-degree 2", "--tensor_parallel_degree does not go with --sp-backend dbsp"),
        ("--use_hybrid_attn_schedule", "--use_hybrid_attn_schedule does not go with"),
        ("--use-spargeattn-head-balance", "db-SP balances heads itself; leave it out"),
        ("--use_fp8_comms", "8 bits with precision: int8 in --sp-config; leave"),
        ("--cache_method teacache", "--cache_method teacache does not go with"),
        ("--attention_backend aiter_sparge", "choose the mask with --sp-config"),
        ("--model ./nowhere", "--model ./nowhere: that folder does not exist"),
        ("--ulysses-degree two", "invalid int value: 'two'"),
    ],
)
def test_command_line_with_a_mistake_is_rejected_before_ranks_start(pool, arguments, message):
    workers = pool(1)
    workers.run(start_xfuser)
    usual = ["--model", "wan2.1-t2v-14b", "--prompt", "x", "--sp-backend", "dbsp", "--sp-config", "sparge:cdf=0.9"]
    (said,) = workers.run(preflight_error, [*usual, *arguments.split()])
    assert message in said


def test_command_line_without_a_prompt_is_rejected_before_ranks_start(pool):
    workers = pool(1)
    workers.run(start_xfuser)
    (said,) = workers.run(preflight_error, ["--model", "Wan2.1-T2V", "--sp-backend", "dbsp"])
    assert said == "--prompt is missing; say what to generate"


def test_report_folder_is_checked_before_ranks_start_on_one_node_only(pool, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dbsp.yaml").write_text(f"mask: {{source: sparge}}\nreport: {tmp_path / 'file'}\n")
    workers = pool(1)
    workers.run(start_xfuser)
    line = ["--model", "Wan2.1-T2V", "--prompt", "x", "--sp-backend", "dbsp"]
    line += ["--sp-config", str(tmp_path / "dbsp.yaml")]
    (said,) = workers.run(preflight_error, line)
    assert said.endswith("file is a file; give the name of a folder")
    assert workers.run(preflight_error, [*line, "--nnodes=2"]) == [""]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "dbsp: error: --model ./nowhere: that folder does not exist\n"),
        (
            "Qwen-Imgae",
            "dbsp: error: --model Qwen-Imgae: neither xDiT nor db-SP knows that name; did you mean 'Qwen-Image'",
        ),
    ],
)
def test_mistake_in_a_rank_is_one_line(pool, name, message):
    workers = pool(1)
    workers.run(start_xfuser)
    (said,) = workers.run(rank_error, name)
    assert said.startswith(message)
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("wan2.1-t2v-14b", "Wan2.1-T2V"),
        ("Wan2.2-T2V", "Wan2.2-T2V"),
        ("wan2.2-i2v-a14b", "Wan2.2-I2V"),
        ("Wan2.2-TI2V", "Wan2.2-TI2V"),
        ("wan2.2-distilled-i2v", "Wan2.2-Distilled-I2V"),
        ("wan2.1-vace-1.3b", "Wan2.1-VACE-1.3B"),
        ("flux.1-DEV", "FLUX.1-dev"),
    ],
)
def test_model_of_xfuser_keeps_its_runner(pool, name, theirs):
    workers = pool(1)
    workers.run(start_xfuser)
    (found,) = workers.run(registered_model, name)
    assert found["name"].casefold() in (theirs.casefold(), (source_of(theirs) or "").casefold())
    assert found["class"].startswith("xFuser")


@pytest.mark.parametrize(
    ("name", "source", "height", "fps"),
    [
        ("WAN2.1-T2V-1.3B", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 480, 16),
        ("wan2.1-i2v-14b-480p", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", 480, 16),
        ("CogVideoX-5B", "zai-org/CogVideoX-5b", 480, 8),
        ("thudm/cogvideox1.5-5b", "THUDM/CogVideoX1.5-5B", 768, 16),
    ],
)
def test_model_that_xfuser_lacks_runs_on_diffusers_classes(pool, name, source, height, fps):
    assert source_of(name) == source
    workers = pool(1)
    workers.run(start_xfuser)
    (found,) = workers.run(registered_model, name)
    assert found == {"name": name, "class": "DiffusersModel", "source": source, "height": height, "fps": fps}


def test_local_folder_of_any_pipeline_has_a_model(pool, tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    workers = pool(1)
    workers.run(start_xfuser)
    (found,) = workers.run(registered_model, str(tmp_path))
    assert (found["class"], found["source"], found["height"]) == ("DiffusersModel", str(tmp_path), None)


def test_private_name_that_is_missing_or_takes_other_arguments_is_named():
    names = {"argparse:ArgumentParser.parse_args": ("args",)}
    require_names("pytest", names, "wait")
    for missing in ({"argparse:ArgumentParser.parse": ("args",)}, {"argparse:ArgumentParser.parse_args": ("words",)}):
        ((name, (argument,)),) = missing.items()
        with pytest.raises(UserError) as caught:
            require_names("pytest", names | missing, "wait")
        assert str(caught.value) == (
            f"pytest {pytest.__version__} does not have {name}({argument}), which db-SP expects; wait"
        )


def test_xdit_command_with_a_mistake_exits_2_with_one_line():
    bin_folder = os.path.dirname(sys.executable)
    arguments = ["--sp-backend", "dbsp", "--model", "./nowhere", "--ulysses_degree", "2", "--prompt", "x"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = run([os.path.join(bin_folder, "xdit"), *arguments], **pipes)
    assert done.returncode == 2
    ours = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(ours) == 1
    assert "--model ./nowhere: that folder does not exist" in ours[0]
    assert "Traceback" not in done.stderr
