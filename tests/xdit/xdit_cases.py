"""What the workers run: xfuser's real wrappers and pipelines with db-SP attached, against diffusers in one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import io
import logging
import os
import types
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from tests.diffusers.models.model_cases import apart, outputs
from tests.support.models.tiny_pipelines import fingerprint, latents
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.models.transformers_for_tests import Inputs, make_transformer
from tests.support.references import kept_from_rank_0, mask_settings, pass_alone
from tests.support.shared import reused
from tests.support.single_process import attach_single_process


@dataclass(frozen=True)
class XditCase:
    """One forward pass. thw: size of the token grid. model: "wan" in xfuser's wrapper, or another, stock."""

    thw: tuple[int, int, int]
    config: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    model: str = "wan"
    seed: int = 1

    @property
    def inputs(self) -> dict[str, Any]:
        return Inputs.random(self.model, self.thw, self.batch, text_tokens=7, seed=self.seed).arguments


_started: list[tuple[int, int]] = []


def start_xfuser(rank: int, world: int, guidance: int = 1, data: int = 1) -> None:
    """xfuser on this worker's process group, with groups for guidance and data next to the sequence's.

    Its degrees are all that is left, and 1: configurations name the strategy. Groups that are there are kept: gloo's
    threads outlive a group that is destroyed.
    """
    from dbsp_cli.import_hook import after_import
    from dbsp_diffusers.patching import PatchSet
    from dbsp_xdit.runner import allow_all_degrees, install

    if _started == [(guidance, data)]:
        return
    _started[:] = [(guidance, data)]

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    install(after_import)
    from xfuser.core.distributed import init_distributed_environment, initialize_runtime_state
    from xfuser.core.distributed.parallel_state import destroy_model_parallel, model_parallel_is_initialized

    logging.getLogger("xfuser").setLevel(logging.ERROR)
    init_distributed_environment()
    if model_parallel_is_initialized():
        destroy_model_parallel()
    allow_all_degrees(PatchSet())
    config = types.SimpleNamespace(num_attention_heads=6)
    pipe = types.SimpleNamespace(transformer=types.SimpleNamespace(config=config), vae=None)
    initialize_runtime_state(pipe, engine_config(world, guidance, data))


def engine_config(world: int, guidance: int = 1, data: int = 1) -> Any:
    from xfuser import xFuserArgs

    args = xFuserArgs(
        model="tiny",
        ulysses_degree=world // guidance // data,
        ring_degree=1,
        use_cfg_parallel=guidance > 1,
        data_parallel_degree=data,
    )
    return args.create_config()[0]


def run_xdit_case(rank: int, world: int, case: XditCase) -> tuple[float, float]:
    """(largest difference from one process with the same mask, from dense attention), both on the whole output."""
    mask = case.model, case.thw, case.batch, case.seed, mask_settings(case.config)
    return differences_of(
        case, *kept_from_rank_0(("pass", mask), lambda: pass_alone(case.model, case.inputs, case.config))
    )


def differences_of(case: XditCase, dense: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """The largest differences, from `expected` and from `dense`, of a pass of the host's transformer with db-SP."""
    from dbsp_xdit import attach, detach

    with _hosted_transformers(case.model) as wrapped:
        pipe = types.SimpleNamespace(transformer=wrapped)
        before = fingerprint(wrapped)
        attach(pipe, case.config)
        with torch.no_grad():
            out = wrapped(**case.inputs)[0]
        with pytest.raises(ValueError, match="parallelized already"):
            attach(pipe, case.config)
        detach(pipe)
        assert fingerprint(wrapped) == before, "detach left something behind"
        detach(pipe)  # nothing to do, and no harm
    return float((out - expected).abs().max()), float((out - dense).abs().max())


def registered_model(rank: int, world: int, name: str) -> dict[str, Any]:
    """Returns what the runner model that `--model name` means has in mind, by which name, and whose it is."""
    from xfuser import xFuserArgs
    from xfuser.model_executor.models.runner_models.base_model import MODEL_REGISTRY

    from dbsp_core.config import DbspConfig
    from dbsp_xdit.command_line import xfuser_name

    key = xfuser_name(name, DbspConfig())
    cls = MODEL_REGISTRY[key]
    model = cls(xFuserArgs(model=key, task="t2v" if "TI2V" in key else None))
    return {
        "name": key,
        "class": cls.__name__,
        "source": model.settings.model_name,
        "height": model.default_input_values.height,
        "fps": model.settings.fps,
    }


def preflight_error(rank: int, world: int, argv: list[str]) -> str:
    """Returns what a command line is rejected with before anything is launched; "" if it is not."""
    from dbsp_core.utils.errors import UserError
    from dbsp_xdit.runner import preflight

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), mock.patch("dbsp_xdit.runner.require_checkpoint"):
            preflight(argv)
    except UserError as error:
        return str(error)
    except SystemExit:  # by xfuser's parser
        return said.getvalue()
    return ""


def rank_error(rank: int, world: int, name: str) -> str:
    """Returns what a rank writes when it is given a wrong `--model`, and ends with exit code 2."""
    import xfuser.model_executor.models.runner_models.base_model  # noqa: F401  as xfuser's runner does first
    from xfuser import xFuserArgs

    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ended:
        xFuserArgs.from_runner_args({"sp_backend": "dbsp", "sp_config": "sparge:cdf=0.9", "model": name})
    assert ended.value.code == 2
    return said.getvalue()


def hosted_transformer(model: str, **options: Any) -> Any:
    """As xfuser's runner has it: Wan in xfuser's wrapper, CogVideoX as diffusers makes it."""
    if model != "wan":
        return make_transformer(model, **options)
    from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper

    wrapped = make_transformer(model, cls=xFuserWanTransformer3DWrapper, attention_kwargs={"thw": None}, **options)
    wrapped.load_state_dict(make_transformer(model, **options).state_dict())
    return wrapped


def run_family(rank: int, world: int, model: str, subclass: str) -> tuple[float, float, int]:
    """A tiny transformer in xfuser's subclass of diffusers' class, two ranks sharing the sequence.

    subclass: the module and name.
    returns: difference from one process, of that from dense attention, attentions that db-SP computed
    """
    from dbsp_xdit import attach, detach

    stock, inputs = make_tiny_transformer(model), tiny_inputs(model)
    module, name = subclass.split(":")
    cls = getattr(importlib.import_module(f"xfuser.model_executor.models.transformers.{module}"), name)
    known = inspect.signature(cls.__init__).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    settings = {key: value for key, value in stock.config.items() if not key.startswith("_")}
    wrapped = cls(**{key: value for key, value in settings.items() if anything or key in known}).eval()
    wrapped.load_state_dict(stock.state_dict())
    if model == "minimax-h3":
        wrapped.fuse_qkv_projections()  # as xfuser's runner does
    config = {"mask": {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}, "strategy": "U1R2"}
    with torch.no_grad():
        dense = outputs(stock, inputs)
        single = attach_single_process(stock, config)
        expected = outputs(stock, inputs)
        single.detach()
        session = attach(types.SimpleNamespace(transformer=wrapped), config)
        found = outputs(wrapped, inputs)
        calls = session.statistics()["calls"]
        detach(types.SimpleNamespace(transformer=wrapped))
    assert type(wrapped) is cls
    return apart(found, expected), apart(expected, dense), calls


_hosted_transformers = reused(hosted_transformer)


@dataclass(frozen=True)
class PipelineCase:
    """Two generations. own: whether by xfuser's own pipeline class, else by diffusers'."""

    folder: str
    config: dict[str, Any]
    height: int
    own: bool = True
    guidance_scale: float = 2.0  # it multiplies rounding
    width: int = 96
    num_frames: int = 9


def run_cogvideox_pipeline(rank: int, world: int, case: PipelineCase) -> tuple[float, float, float]:
    """Largest differences of the latents: from one process, of a second generation from the first, from dense."""
    from dbsp_xdit import attach, detach

    pipe = load_cogvideox(case.folder)
    size = case.height, case.width, case.num_frames, case.guidance_scale
    dense = kept_from_rank_0(("dense video", size), lambda: latents_of(pipe, case))
    expected = kept_from_rank_0(("video", size, case.config["mask"]), lambda: expected_latents(case))
    if case.own:
        from xfuser import xFuserCogVideoXPipeline

        pipe = xFuserCogVideoXPipeline(pipe, engine_config(world))
    before = fingerprint(pipe.transformer)
    attach(pipe, case.config)
    out, again = latents_of(pipe, case), latents_of(pipe, case)
    detach(pipe)
    assert fingerprint(pipe.transformer) == before, "detach left something behind"
    return tuple(float((a - b).abs().max()) for a, b in ((out, expected), (again, out), (out, dense)))  # type: ignore[return-value]


def run_prompts(rank: int, world: int, case: PipelineCase) -> tuple[int, float]:
    """(videos that xfuser's own pipeline gives this rank of two, their largest difference from one process's)."""
    from xfuser import xFuserCogVideoXPipeline

    from dbsp_xdit import attach, detach

    expected = kept_from_rank_0(("two videos", case.height, case.config["mask"]), lambda: expected_latents(case))
    pipe = xFuserCogVideoXPipeline(load_cogvideox(case.folder), engine_config(world, data=2))
    attach(pipe, case.config)
    out = latents_of(pipe, case, prompt=["the sea at dusk"] * 2)
    detach(pipe)
    return len(out), float((out - expected).abs().max())


def expected_latents(case: PipelineCase) -> torch.Tensor:
    """Of one process."""
    pipe = load_cogvideox(case.folder)
    attach_single_process(pipe.transformer, {"mask": case.config["mask"]})
    return latents_of(pipe, case)


def load_cogvideox(folder: str) -> Any:
    """A pipeline with a transformer and a scheduler of its own, which xfuser changes; the other parts are shared."""
    from diffusers import CogVideoXPipeline

    parts = _cogvideox_parts(folder)
    pipe = CogVideoXPipeline(**parts | {name: copy.deepcopy(parts[name]) for name in ("transformer", "scheduler")})
    pipe.set_progress_bar_config(disable=True)
    return pipe


@functools.cache
def _cogvideox_parts(folder: str) -> dict[str, Any]:
    from diffusers import CogVideoXPipeline

    parts: dict[str, Any] = CogVideoXPipeline.from_pretrained(folder, local_files_only=True).components
    with parts["transformer"].cache_context("cond"):  # which leaves an attribute, as a first generation does
        return parts


def latents_of(pipe: Any, case: PipelineCase, steps: int = 2, **options: Any) -> torch.Tensor:
    size = {name: getattr(case, name) for name in ("height", "width", "num_frames", "guidance_scale")}
    made: torch.Tensor = latents(pipe, num_inference_steps=steps, **size | options)
    return made
