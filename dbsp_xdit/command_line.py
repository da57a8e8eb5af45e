"""db-SP's flags on an xdit command line, and the meaning of `--model`.

xfuser's models run unchanged; CogVideoX, some sizes of Wan and local folders run as diffusers pipelines.
"""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch

from dbsp_core.config import DbspConfig, default_config, require_same_model
from dbsp_core.layout.strategy import Strategy
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.models.table import find_model_spec, published_model, signature_of_model
from dbsp_core.utils.errors import UserError, did_you_mean
from dbsp_diffusers.checkpoint import load_stock_pipeline

_BY_ONE_RANK = "it decides by one rank's tokens; use --cache_method fbcache or dbcache"
_IN_DIFFUSERS = "attention is db-SP's and diffusers'; choose the mask with --sp-config"
_RIVALS = {
    "pipefusion_parallel_degree": "all ranks share the sequence",
    "tensor_parallel_degree": "all ranks share the sequence",
    "attention_backend": _IN_DIFFUSERS,
    "cross_attention_backend": _IN_DIFFUSERS,
    "use_hybrid_attn_schedule": _IN_DIFFUSERS,
    "use_spargeattn_head_balance": "db-SP balances heads itself",
    "use_fp8_comms": "db-SP exchanges 8 bits with precision: int8 in --sp-config",
    "use_teacache": _BY_ONE_RANK,
    "use_fbcache": _BY_ONE_RANK,
}
"""Options of xfuser (degrees: above 1) that db-SP does not support, with the reason."""
_ARGUMENTS = (
    *("prompt", "negative_prompt", "height", "width", "num_frames", "num_inference_steps"),
    *("guidance_scale", "guidance_scale_2", "max_sequence_length"),
)
"""xfuser arguments that pipelines take by the same name."""


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds db-SP's options, with underscores because xfuser's parser converts dashes to them."""
    group = parser.add_argument_group("db-SP")
    group.add_argument(
        "--sp_backend",
        choices=("usp", "dbsp"),
        default="usp",
        help="Sequence parallelism of self-attention: xDiT's (usp) or block-sparse, dual-balanced (dbsp).",
    )
    group.add_argument(
        "--sp_config",
        help="db-SP's settings: a YAML file, the name of a shipped one, or a mask such as sparge:cdf=0.92, "
        "window:window=[7,21,33] or a mask file. Default: the settings shipped for the model.",
    )
    return parser


def config_from(args: Mapping[str, Any]) -> DbspConfig | None:
    """Returns the configuration from xfuser's arguments by name, or None for backend "usp".

    Raises UserError if settings are invalid or do not fit together.
    """
    if args.get("sp_backend", "usp") == "usp":
        if args.get("sp_config") is not None:
            raise UserError("--sp-config has no effect without --sp-backend dbsp; add it")
        return None
    signature = signature_of_model(args["model"])
    if args.get("sp_config") is None:
        config = default_config(signature, find_model_spec(args["model"]))
    else:
        config = DbspConfig.load(args["sp_config"])
    require_same_model(config, signature)
    if config.vae and args.get("use_parallel_vae"):
        raise UserError("--use_parallel_vae already decodes in parallel; remove either it or setting vae")
    for name, why in _RIVALS.items():
        if args.get(name) is True or args.get(name) not in (None, False, 1):
            raise UserError(f"--{name} is not supported with --sp-backend dbsp: {why}; remove it")
    if args.get("cache_method") == "teacache":
        raise UserError(f"--cache_method teacache is not supported with --sp-backend dbsp: {_BY_ONE_RANK}")
    strategy_from(config, args.get("ulysses_degree") or 1, args.get("ring_degree") or 1)
    return config


def strategy_from(config: DbspConfig, ulysses_degree: int, ring_degree: int) -> Strategy | None:
    """Returns the configured strategy (None: "auto"), else xfuser's. Raises UserError for another number of GPUs."""
    degrees = Strategy(ulysses_degree, ring_degree)
    strategy = config.strategy_or(degrees)
    if strategy is not None and strategy.world != degrees.world:
        raise UserError(
            f"strategy {strategy} needs {strategy.world} GPUs, but --ulysses_degree {ulysses_degree} "
            f"and --ring_degree {ring_degree} make {degrees.world}; change one of them"
        )
    return strategy


def source_of(name: str) -> str | None:
    """Returns the local folder or repository of `--model name`; None for names that only xfuser knows.

    Raises UserError for a path that does not exist.
    """
    spec = find_model_spec(name)
    if spec is not None:
        spelled = next(known_name for known_name in spec.names if known_name.casefold() == name.casefold())
        return spelled if "/" in spelled else spec.hub
    if os.path.isdir(name):
        return name
    if name.startswith((".", os.sep, "~")) or name.count("/") > 1:
        raise UserError(f"--model {name}: that folder does not exist")
    return None


def xfuser_name(name: str, config: DbspConfig) -> str:
    """Returns the name of `--model name` in xfuser's registry, adding our model if xfuser has none.

    Raises UserError for an unknown name.
    """
    import xfuser.model_executor.models.runner_models  # noqa: F401  fills the registry
    from xfuser.model_executor.models.runner_models.base_model import MODEL_REGISTRY

    spec, source = find_model_spec(name), source_of(name)
    known = {key.casefold(): key for key in MODEL_REGISTRY}
    theirs = [known[alias.casefold()] for alias in (name, *(spec.names if spec else ())) if alias.casefold() in known]
    if theirs:
        return theirs[0]
    if source is None:
        raise UserError(f"--model {name}: neither xDiT nor db-SP knows that name{did_you_mean(name, MODEL_REGISTRY)}")
    MODEL_REGISTRY[name] = _diffusers_model(source, config.generate.torch_dtype)
    return name


def _diffusers_model(source: str, dtype: torch.dtype) -> type:
    """Makes a runner model of a diffusers pipeline, with the model's default settings."""
    from xfuser.model_executor.models.runner_models import base_model as xfuser

    signature = signature_of_model(source)
    spec = find_model_spec(source) or (None if signature is None else published_model(signature))
    video = GenerateSettings() if spec is None else spec.video
    usual = {name: getattr(video, name, None) for name in _ARGUMENTS if name != "prompt"}

    class DiffusersModel(xfuser.xFuserModel):
        capabilities = xfuser.ModelCapabilities(
            enable_slicing=True, enable_tiling=True, use_vae_channels_last_format=False
        )
        default_input_values = xfuser.DefaultInputValues(**usual | {"num_inference_steps": video.steps})
        settings = xfuser.ModelSettings(
            model_name=source,
            output_name=spec.name if spec else os.path.basename(os.path.abspath(source)),
            fps=video.fps or 16,
        )

        def _load_model(self) -> Any:
            from_image, shift = bool(self.config.input_images), self.config.flow_shift or video.flow_shift
            return load_stock_pipeline(source, signature, from_image=from_image, flow_shift=shift, torch_dtype=dtype)

        def _run_pipe(self, input_args: dict[str, Any]) -> Any:
            taken = inspect.signature(type(self.pipe).__call__).parameters
            images = dict(zip(("image", "last_image"), input_args["input_images"], strict=False))
            if not taken.keys() >= images.keys():
                raise UserError(f"--input_images: {type(self.pipe).__name__} does not take {' and '.join(images)}")
            given = {name: value for name in _ARGUMENTS if (value := input_args.get(name)) is not None}
            options = {name: value for name, value in given.items() if name in taken}
            output = self.pipe(**options, **images, generator=self._make_generator(input_args["seed"]))
            self.settings.model_output_type = "image" if hasattr(output, "images") else "video"
            results = {"images": output.images} if hasattr(output, "images") else {"videos": output.frames}
            return xfuser.DiffusionOutput(**results, pipe_args=input_args)

    return DiffusersModel
