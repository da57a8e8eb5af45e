"""Where db-SP enters an xfuser run: small changes made right after the module concerned is imported, each undoable.

- xfuser.cli: user errors are found before torchrun starts
- xfuser.config.args: the flags; what `--model` may be
and, in runs with backend "dbsp" only:
- xfuser…runner_models.base_model: attach after the weights are loaded, report after the run
- xfuser…runtime_state: no refusals on behalf of an attention that will not run
"""

from __future__ import annotations

import copy
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from dbsp_core.utils.errors import exit_on_user_error
from dbsp_diffusers.patching import PatchSet

__all__ = ["install", "uninstall"]

Action = Callable[[ModuleType, PatchSet], None]
_installed: PatchSet | None = None


def install(*, active: bool) -> None:
    """Makes every change, now or when the module is imported. Once; see `uninstall`.

    active: whether the run uses backend "dbsp": otherwise it only learns the flags
    """
    global _installed
    if _installed is not None:
        return
    patches = PatchSet()
    actions: dict[str, Action] = {
        "xfuser.cli": _patch_cli,
        "xfuser.config.args": _patch_args,
    }
    if active:
        from dbsp_xdit.cpu_shim import cpu_patches

        actions["xfuser.model_executor.models.runner_models.base_model"] = _patch_base_model
        actions["xfuser.core.distributed.runtime_state"] = _patch_runtime_state
        actions.update(cpu_patches(patches))
    for name in [name for name in actions if name in sys.modules]:
        actions.pop(name)(sys.modules[name], patches)
    finder = PostImportHook(actions, patches)
    sys.meta_path.insert(0, finder)
    patches.on_detach(lambda: sys.meta_path.remove(finder))
    _installed = patches


def uninstall() -> None:
    """Undoes `install`: xfuser's modules are as they were."""
    global _installed
    if _installed is not None:
        _installed.detach()
        _installed = None


class PostImportHook(importlib.abc.MetaPathFinder):
    """Runs an action once a module of that name has been executed."""

    def __init__(self, actions: dict[str, Action], patches: PatchSet) -> None:
        self._actions = actions
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = self._actions.pop(fullname, None)  # popped first: the nested search below must not come back here
        if action is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            action(module, self._patches)

        spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]
        return spec


def _patch_cli(module: ModuleType, patches: PatchSet) -> None:
    original = module.main

    @functools.wraps(original)
    def main(args: list[str] | None = None) -> None:
        from dbsp_core.config.preflight import require_checkpoint
        from dbsp_xdit.models import preflight

        with exit_on_user_error():
            require_checkpoint(preflight(sys.argv[1:] if args is None else args))
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # a closed terminal ends the ranks as SIGTERM does
            signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
        original(args)

    patches.set_attribute(module, "main", main)


def _patch_args(module: ModuleType, patches: PatchSet) -> None:
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
            settings = settings_of(args)
        if settings is not None:
            config, model = settings
            if model is not None:
                register(args["model"], model, config)
        return from_runner_args(args)

    patches.set_attribute(cls, "add_runner_args", staticmethod(with_flags))
    patches.set_attribute(cls, "from_runner_args", classmethod(with_models))


def _patch_base_model(module: ModuleType, patches: PatchSet) -> None:
    cls = module.xFuserModel
    post_load, initialize, run = cls._post_load_and_state_initialization, cls.initialize, cls.run

    @functools.wraps(post_load)
    def post_load_then_attach(self: Any, input_args: dict[str, Any]) -> None:
        from dbsp_xdit.attachment import attach
        from dbsp_xdit.flags import config_from

        post_load(self, input_args)
        with exit_on_user_error():
            config = config_from(input_args)
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
