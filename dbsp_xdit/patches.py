"""The changes that db-SP makes in an xfuser run, each right after the module concerned is imported, each undoable.

In all runs of xfuser's runner:
- xfuser.cli: user errors are found before torchrun starts
- xfuser.config.args: the flags; what `--model` may be
In runs with backend "dbsp" only:
- xfuser…runner_models.base_model: attach after the weights are loaded, report after the run
- xfuser…runtime_state: no refusals on behalf of an attention that will not run
In a user's own scripts:
- xfuser.config.args: the flags are refused, with what to call instead
"""

from __future__ import annotations

import copy
import functools
import os
import signal
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from dbsp_core.config import DbspConfig
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import exit_on_user_error
from dbsp_diffusers.patching import PatchSet
from dbsp_start.import_hook import after_import
from dbsp_xdit.command_line import BACKEND, dbsp_requested, full_name

__all__ = ["install", "undoable", "uninstall"]

Action = Callable[[ModuleType, PatchSet], None]
_installed: PatchSet | None = None


def install(*, active: bool, script: bool = False, config: DbspConfig | None = None) -> None:
    """Makes every change, now or when the module is imported, once; `uninstall` undoes them.

    Args:
        active: Whether the run uses backend "dbsp"; otherwise it only learns the flags.
        script: Whether this is a user's own script rather than xfuser's runner.
        config: The run's configuration, where it has been read already.
    """
    global _installed
    if _installed is not None:
        return
    patches = PatchSet()
    actions: dict[str, Action] = {
        "xfuser.cli": _patch_cli,
        "xfuser.config.args": functools.partial(_patch_args, read=config),
    }
    if script:
        actions = {"xfuser.config.args": _patch_parser}
    elif active:
        from dbsp_xdit.cpu_shim import cpu_patches

        actions["xfuser.model_executor.models.runner_models.base_model"] = _patch_base_model
        actions["xfuser.core.distributed.runtime_state"] = _patch_runtime_state
        actions.update(cpu_patches(patches))
    patches.on_detach(after_import(undoable(actions, patches)))
    _installed = patches


def uninstall() -> None:
    """Undoes `install`: xfuser's modules are as they were."""
    global _installed
    if _installed is not None:
        _installed.detach()
        _installed = None


def undoable(actions: Mapping[str, Action], patches: PatchSet) -> dict[str, Callable[[ModuleType], None]]:
    """The actions as `after_import` takes them; they note in `patches` what they change."""

    def noting(action: Action) -> Callable[[ModuleType], None]:
        return lambda module: action(module, patches)

    return {name: noting(action) for name, action in actions.items()}


def _patch_cli(module: ModuleType, patches: PatchSet) -> None:
    original = module.main

    @functools.wraps(original)
    def main(args: list[str] | None = None) -> None:
        from dbsp_diffusers.preflight import require_checkpoint
        from dbsp_xdit.models import preflight

        with exit_on_user_error():
            require_checkpoint(preflight(sys.argv[1:] if args is None else args))
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup, which torchrun would ignore
            os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
        else:  # a closed terminal ends the ranks as SIGTERM does
            signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
        original(args)

    patches.set_attribute(module, "main", main)


def _patch_args(module: ModuleType, patches: PatchSet, read: DbspConfig | None = None) -> None:
    """Adds the flags and models; `read` is the configuration, where it has been read already."""
    cls = module.xFuserArgs
    add_runner_args, from_runner_args = cls.add_runner_args, cls.from_runner_args

    @functools.wraps(add_runner_args)
    def with_flags(parser: Any) -> Any:
        from dbsp_xdit.flags import add_flags

        parser = add_runner_args(parser)
        add_flags(parser)
        return parser

    @functools.wraps(from_runner_args)
    def with_models(_: type, args: dict[str, Any]) -> Any:
        from dbsp_xdit.models import settings_of
        from dbsp_xdit.runner_models import register

        with exit_on_user_error():
            settings = settings_of(args, read)
        made = from_runner_args(args)
        made.dbsp_config = None
        if settings is not None:
            made.dbsp_config, model = settings
            register(args["model"], model, made.dbsp_config)
        return made

    patches.set_attribute(cls, "add_runner_args", staticmethod(with_flags))
    patches.set_attribute(cls, "from_runner_args", classmethod(with_models))


def _patch_parser(module: ModuleType, patches: PatchSet) -> None:
    """Refuses the flags in scripts that take xfuser's arguments: they make their pipeline, and must attach db-SP."""
    cls = module.FlexibleArgumentParser
    original = cls.parse_args

    @functools.wraps(original)
    def parse_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else args
        has_its_own = any(full_name(option) == BACKEND for option in self._option_string_actions)
        if dbsp_requested(given) and not has_its_own:
            with exit_on_user_error():
                raise UserError(
                    "--sp-backend dbsp is for the command xdit; this script makes its pipeline itself: leave the flag "
                    "out, and call dbsp_xdit.attach(pipe, config) once the pipeline is loaded"
                )
        return original(self, args, namespace)

    patches.set_attribute(cls, "parse_args", parse_args)


def _patch_base_model(module: ModuleType, patches: PatchSet) -> None:
    cls = module.xFuserModel
    post_load, initialize, run = cls._post_load_and_state_initialization, cls.initialize, cls.run

    @functools.wraps(post_load)
    def post_load_then_attach(self: Any, input_args: dict[str, Any]) -> None:
        from dbsp_xdit.attachment import attach
        from dbsp_xdit.flags import config_from

        post_load(self, input_args)
        own: Any = getattr(self, "config", None)
        with exit_on_user_error():
            # A runner model that a script made from arguments of its own has no configuration yet.
            config = own.dbsp_config if hasattr(own, "dbsp_config") else config_from(input_args)
            if config is not None:
                attach(self.pipe, config)

    @functools.wraps(run)
    def run_then_report(self: Any, input_args: dict[str, Any]) -> Any:
        from dbsp_xdit.attachment import recorded

        pipe = getattr(self, "pipe", None)
        if pipe is None:  # a runner that loads none
            return run(self, input_args)
        with exit_on_user_error(), recorded(pipe, model=str(self.config.model)):
            return run(self, input_args)

    patches.set_attribute(cls, "_post_load_and_state_initialization", post_load_then_attach)
    patches.set_attribute(cls, "initialize", exit_on_user_error()(initialize))  # with torch.compile it generates once
    patches.set_attribute(cls, "run", run_then_report)


def _patch_runtime_state(module: ModuleType, patches: PatchSet) -> None:
    """xfuser's checks guard its own self-attention: heads that x does not divide, backends without log-sum-exp."""
    cls = module.RuntimeState
    check_backend = cls._check_if_backend_compatible_with_current_configuration

    @functools.wraps(check_backend)
    def check_as_if_without_ring(self: Any, attention_backend: Any) -> None:
        parallel_config = getattr(self, "parallel_config", None)
        if parallel_config is None:
            return check_backend(self, attention_backend)
        self.parallel_config = copy.copy(parallel_config)
        self.parallel_config.ring_degree = 1
        try:
            check_backend(self, attention_backend)
        finally:
            self.parallel_config = parallel_config

    patches.set_attribute(cls, "_check_if_backend_compatible_with_current_configuration", check_as_if_without_ring)
    patches.set_attribute(module.DiTRuntimeState, "_check_model_and_parallel_config", lambda self, **_: None)
