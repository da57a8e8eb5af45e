"""dbsp_xdit's command line: settings from its flags, mistakes before ranks start, and the models of `--model`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any
from unittest import mock

import pytest

from dbsp_core.config import DbspConfig
from dbsp_core.sources import NablaSource, UnionSource, WindowSource
from dbsp_core.utils.errors import UserError
from dbsp_xdit.command_line import config_from, xfuser_name
from dbsp_xdit.runner import preflight
from tests.support.programs import run

FLAG = {"sp_backend": "dbsp", "model": "m"}


def test_config_has_the_settings_of_its_file_its_mask_or_its_model(tmp_path):
    file = tmp_path / "dbsp.yaml"
    file.write_text("mask: {source: window}\nplanner: contiguous\nstrategy: U2R2\n")
    assert config_from({**FLAG, "sp_config": str(file), "ulysses_degree": 4}) == DbspConfig.load(file)
    config = config_from({**FLAG, "sp_config": "window+nabla:cdf=0.8"})
    assert config is not None
    assert config.mask == UnionSource((WindowSource(), NablaSource(cdf=0.8)))
    of_model = FLAG | {"model": "Wan2.1-T2V"}
    assert config_from(of_model) == DbspConfig.load("wan2.1-t2v-14b-subblock")
    assert config_from(FLAG) == DbspConfig()
    with pytest.raises(ValueError, match=r"is for cogvideox1\.5-5b, the model is wan2.1-t2v-14b"):
        config_from({**of_model, "sp_config": "cogvideox1.5-5b-sparge"})
    assert config_from({"sp_backend": "usp", "model": "m", "ulysses_degree": 2}) is None
    assert config_from({"model": "m"}) is None


@pytest.mark.parametrize(
    ("settings", "args", "message"),
    [
        ("strategy: U3R1", {"ulysses_degree": 2}, "needs 3 GPUs"),
        ("vae: true", {"use_parallel_vae": True}, "--use_parallel_vae already decodes in parallel"),
    ],
)
def test_config_from_a_file_with_a_mistake_is_rejected(tmp_path, settings, args, message):
    (tmp_path / "dbsp.yaml").write_text(settings)
    with pytest.raises(UserError, match=message):
        config_from({**FLAG, "sp_config": str(tmp_path / "dbsp.yaml"), **args})


def preflight_error(rank: int, world: int, argv: list[str]) -> str:
    """Returns what a command line is rejected with before anything is launched; "" if it is not."""
    written = io.StringIO()
    try:
        with contextlib.redirect_stderr(written), mock.patch("dbsp_xdit.runner.require_checkpoint"):
            preflight(argv)
    except UserError as error:
        return str(error)
    except SystemExit:  # by xfuser's parser
        return written.getvalue()
    return ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--sp-backend nonsense", "invalid choice: 'nonsense'"),
        ("--sp-backend usp --sp-config sparge", "no effect without --sp-backend dbsp"),
        ("--sp_config=radail:width=1", "did you mean 'radial'"),
        ("--pipefusion_parallel_degree 2", "--pipefusion_parallel_degree is not supported with --sp-backend dbsp"),
        ("--use-spargeattn-head-balance", "db-SP balances heads itself; remove it"),
        ("--use_fp8_comms", "8 bits with precision: int8 in --sp-config; remove"),
        ("--cache_method teacache", "--cache_method teacache is not supported with"),
        ("--attention_backend aiter_sparge", "choose the mask with --sp-config"),
        ("--model ./nowhere", "--model ./nowhere: that folder does not exist"),
        ("--input_images ./gone.png", "--input_images gone.png does not exist; give a file such as a PNG or JPEG"),
    ],
)
def test_command_line_with_a_mistake_is_rejected_before_ranks_start(xfuser, arguments, message):
    usual = ["--model", "wan2.1-t2v-14b", "--prompt", "x", "--sp-backend", "dbsp", "--sp-config", "sparge:cdf=0.9"]
    (answer,) = xfuser(1).run(preflight_error, [*usual, *arguments.split()])
    assert message in answer


def test_prompt_and_report_folder_are_checked_before_ranks_start(xfuser, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dbsp.yaml").write_text(f"mask: {{source: sparge}}\nreport: {tmp_path / 'file'}\n")
    line = ["--model", "Wan2.1-T2V", "--sp-backend", "dbsp", "--sp-config", str(tmp_path / "dbsp.yaml")]
    assert xfuser(1).run(preflight_error, line) == ["--prompt is missing; say what to generate"]
    (answer,) = xfuser(1).run(preflight_error, [*line, "--prompt", "x"])
    assert answer.endswith("file is a file; give the name of a folder")
    line += ["--prompt", "x"]
    assert xfuser(1).run(preflight_error, [*line, "--nnodes=2"]) == [""], "another node may write it"
    (tmp_path / "dbsp.yaml").write_text("mask: sparge\n")
    (answer,) = xfuser(1).run(preflight_error, [*line, "--output_directory", str(tmp_path / "file")])
    assert answer == f"--output_directory {tmp_path / 'file'} is a file; give the name of a folder"
    assert xfuser(1).run(preflight_error, [*line, "--output_directory", str(tmp_path / "new")]) == [""]


def in_a_rank(rank: int, world: int, args: dict[str, str]) -> tuple[object, str]:
    """Returns the exit code of a rank that is given arguments, and what it writes."""
    import xfuser.model_executor.models.runner_models.base_model  # noqa: F401  as xfuser's runner does first
    from xfuser import xFuserArgs

    written = io.StringIO()
    try:
        with contextlib.redirect_stderr(written):
            xFuserArgs.from_runner_args({"sp_backend": "dbsp", "sp_config": "sparge:cdf=0.9"} | args)
    except SystemExit as ended:
        return ended.code, written.getvalue()
    return 0, written.getvalue()


def test_folder_of_videos_is_made_and_mistakes_are_one_line_before_weights_are_loaded(xfuser, tmp_path):
    args = {"model": "Wan2.1-T2V", "output_directory": str(tmp_path / "new" / "videos")}
    assert xfuser(1).run(in_a_rank, args)[0][0] == 0
    assert (tmp_path / "new" / "videos").is_dir()
    (tmp_path / "file").touch()
    assert xfuser(1).run(in_a_rank, args | {"output_directory": str(tmp_path / "file")})[0][0] == 2
    ((code, answer),) = xfuser(1).run(in_a_rank, {"model": "Qwen-Imgae"})
    said = "--model Qwen-Imgae: neither xDiT nor db-SP knows that name; did you mean 'Qwen-Image'"
    assert (code, answer.count("\n")) == (2, 1)
    assert answer.startswith(f"dbsp: error: {said}")


def registered_model(rank: int, world: int, name: str) -> dict[str, Any]:
    """Returns what the runner model that `--model name` means has in mind, by which name, and whose it is."""
    from xfuser import xFuserArgs
    from xfuser.model_executor.models.runner_models.base_model import MODEL_REGISTRY

    key = xfuser_name(name, DbspConfig())
    cls = MODEL_REGISTRY[key]
    model = cls(xFuserArgs(model=key, task="t2v" if "TI2V" in key else None))
    return {
        "class": cls.__name__,
        "source": model.settings.model_name,
        "height": model.default_input_values.height,
    }


@pytest.mark.parametrize(
    ("name", "cls", "source", "height"),
    [
        ("wan2.1-t2v-14b", "xFuserWan21T2VModel", None, None),
        ("WAN2.1-T2V-1.3B", "DiffusersModel", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 480),
        ("thudm/cogvideox1.5-5b", "DiffusersModel", "THUDM/CogVideoX1.5-5B", 768),
        ("FOLDER", "DiffusersModel", "FOLDER", None),
    ],
)
def test_model_keeps_xfusers_runner_or_runs_on_diffusers_classes(xfuser, tmp_path, name, cls, source, height):
    """Tries the folder of another pipeline, too."""
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    name, source = (str(tmp_path) if text == "FOLDER" else text for text in (name, source))
    (found,) = xfuser(1).run(registered_model, name)
    assert found["class"] == cls
    if source is not None:
        assert (found["source"], found["height"]) == (source, height)


def test_xdit_command_with_a_mistake_exits_2_with_one_line():
    command = os.path.join(os.path.dirname(sys.executable), "xdit")
    done = run([command, "--sp-backend", "dbsp", "--model", "./nowhere", "--ulysses_degree", "2", "--prompt", "x"])
    assert done.returncode == 2
    ours = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(ours) == 1
    assert "--model ./nowhere: that folder does not exist" in ours[0]
    assert "Traceback" not in done.stderr
