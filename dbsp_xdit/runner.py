"""Changes to xfuser's launcher and runner for `xdit … --sp-backend`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dbsp_core.reports.collect import require_report_folder
from dbsp_core.reports.mask_recorder import require_new_recording
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import require_file, require_folder_path
from dbsp_core.utils.process import RECORD, exit_on_user_error
from dbsp_diffusers.checkpoint import require_checkpoint
from dbsp_diffusers.patching import PatchSet, require_names
from dbsp_diffusers.resolve import require_possible
from dbsp_xdit.command_line import add_flags, config_from, source_of, xfuser_name
from dbsp_xdit.cpu_shim import cpu_patches
from dbsp_xdit.import_hook import after_import

_BASE_MODEL = "xfuser.model_executor.models.runner_models.base_model"
_LAUNCHER = {"xfuser.cli:main": ("args",), "xfuser.cli:extract_torchrun_args": ("args",)}
_RUNNER = {
    "xfuser.config.args:xFuserArgs.add_runner_args": ("parser",),
    "xfuser.config.args:xFuserArgs.from_runner_args": ("args",),
    f"{_BASE_MODEL}:xFuserModel._post_load_and_state_initialization": ("input_args",),
    f"{_BASE_MODEL}:xFuserModel.initialize": ("input_args",),
    f"{_BASE_MODEL}:xFuserModel.run": ("input_args",),
    "xfuser.core.distributed.runtime_state:RuntimeState._check_if_backend_compatible_with_current_configuration": (
        "attention_backend",
    ),
    "xfuser.core.distributed.runtime_state:DiTRuntimeState._check_model_and_parallel_config": ("parallel_config",),
}
"""Wrapped functions with required arguments, checked before wrapping anything."""
_FIX = "install xfuser 0.7, or remove --sp-backend"


def install() -> PatchSet:
    """Applies the changes as xfuser's modules are imported; returns them for undoing."""
    patches = PatchSet()
    actions: dict[str, Any] = {"xfuser.cli": _change_launcher, _BASE_MODEL: _change_runner, **cpu_patches(patches)}
    patches.on_detach(after_import({name: functools.partial(act, patches=patches) for name, act in actions.items()}))
    return patches


def preflight(argv: Sequence[str]) -> None:
    """Checks an xdit command line before starting ranks. Raises UserError for mistakes."""
    from PIL import Image
    from xfuser.cli import extract_torchrun_args
    from xfuser.config.args import FlexibleArgumentParser, xFuserArgs

    torchrun, words = extract_torchrun_args(list(argv))
    parser = add_flags(xFuserArgs.add_runner_args(FlexibleArgumentParser(prog="xdit")))
    args = vars(parser.parse_args(words))
    config = config_from(args)
    if config is None:
        return
    if args["prompt"] is None and args["dataset_path"] is None:
        raise UserError("--prompt is missing; say what to generate")
    require_possible(config)
    for image in args["input_images"] or ():
        if image.startswith(("http://", "https://")):
            continue
        require_file(Path(image), "--input_images", "give a file such as a PNG or JPEG")
        try:
            Image.open(image).verify()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise UserError(f"--input_images {image} cannot be read as an image; give a PNG or JPEG") from error
    if torchrun["--nnodes"] == "1":  # with several nodes, only one writes
        require_folder_path(Path(args["output_directory"]).absolute(), "--output_directory")
        if config.report:
            require_report_folder(Path(config.report).absolute(), "report")
        if config.record:
            require_new_recording(Path(config.record).absolute(), f"${RECORD}")
    require_checkpoint(source_of(args["model"]))


@exit_on_user_error()
def _change_launcher(module: ModuleType, patches: PatchSet) -> None:
    require_names("xfuser", _LAUNCHER, _FIX)
    original = module.main

    @functools.wraps(original)
    def main(args: list[str] | None = None) -> None:
        with exit_on_user_error():
            preflight(sys.argv[1:] if args is None else args)
        original(args)

    patches.set_attribute(module, "main", main)


@exit_on_user_error()
def _change_runner(module: ModuleType, patches: PatchSet) -> None:
    require_names("xfuser", _RUNNER, _FIX)
    from xfuser.config.args import xFuserArgs
    from xfuser.core.utils.runner_utils import is_last_process

    add_runner_args, from_runner_args = xFuserArgs.add_runner_args, xFuserArgs.from_runner_args
    cls = module.xFuserModel
    post_load = cls._post_load_and_state_initialization

    @functools.wraps(from_runner_args)
    def with_config(_: type, args: dict[str, Any]) -> Any:
        config = config_from(args)
        if config is None:
            return from_runner_args(args)
        made = from_runner_args({**args, "model": xfuser_name(args["model"], config)})
        if is_last_process():  # the writer
            require_folder_path(Path(made.output_directory).absolute(), "--output_directory")
            os.makedirs(made.output_directory, exist_ok=True)
        made.dbsp_config = config
        allow_all_degrees(patches)
        return made

    @functools.wraps(post_load)
    def post_load_then_attach(self: Any, input_args: dict[str, Any]) -> None:
        from dbsp_xdit.attachment import attach

        post_load(self, input_args)
        config = getattr(self.config, "dbsp_config", None)
        if config is not None:
            attach(self.pipe, config)

    patches.set_attribute(
        xFuserArgs, "add_runner_args", staticmethod(lambda parser: add_flags(add_runner_args(parser)))
    )
    patches.set_attribute(xFuserArgs, "from_runner_args", classmethod(exit_on_user_error()(with_config)))
    patches.set_attribute(cls, "_post_load_and_state_initialization", post_load_then_attach)
    for name in ("initialize", "run"):  # with torch.compile, initialize generates once
        patches.set_attribute(cls, name, exit_on_user_error()(getattr(cls, name)))


def allow_all_degrees(patches: PatchSet) -> None:
    """Disables xfuser's checks of its own self-attention: heads divisible by x, kernels with ring support."""
    from xfuser.core.distributed import runtime_state as state

    name, of_model = "_check_if_backend_compatible_with_current_configuration", "_check_model_and_parallel_config"
    patches.set_attribute(state.RuntimeState, name, lambda self, attention_backend: None)
    patches.set_attribute(state.DiTRuntimeState, of_model, lambda self, pipeline, parallel_config: None)
