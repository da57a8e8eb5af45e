"""xfuser's runner models for what xfuser has none for: CogVideoX, Wan2.1 1.3B, local folders, short names.

Registered in runs with backend "dbsp" only: elsewhere xfuser's own list of models stays as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dbsp_core.config.config import DbspConfig
from dbsp_diffusers.patching import in_float64
from dbsp_xdit.models import Model

__all__ = ["register"]


def register(name: str, model: Model, config: DbspConfig) -> None:
    """Makes `--model name` mean this model, in this process."""
    import xfuser.model_executor.models.runner_models  # noqa: F401  fills the registry
    from xfuser.model_executor.models.runner_models.base_model import MODEL_REGISTRY

    make = {"WanPipeline": _wan, "CogVideoXPipeline": _cogvideox}[model.like.pipeline]
    MODEL_REGISTRY[name] = make(model, config.generate.torch_dtype)


def _wan(model: Model, dtype: torch.dtype) -> type:
    """xfuser's own runner model for Wan2.1 14B, told where the weights are and what is usual for their size."""
    from xfuser.model_executor.models.runner_models.wan import xFuserWan21T2VModel

    like = model.like
    own = like.name == "wan2.1-t2v-14b"
    no_low_precision = {"use_fp8_gemms": False, "use_fp4_gemms": False, "use_fp6_gemms": False}

    class WanModel(xFuserWan21T2VModel):
        # its choice of layers for low precision is for the 14B model
        capabilities = replace(xFuserWan21T2VModel.capabilities, **({} if own else no_low_precision))
        # the 14B model's stay, so that a command makes the same video with and without db-SP
        default_input_values = replace(xFuserWan21T2VModel.default_input_values, **({} if own else _defaults(model)))

        def _customize_settings(self, config: Any) -> None:
            super()._customize_settings(config)
            self.settings.model_name = model.source
            if not own:
                self.settings.output_name = like.name

        def _load_model(self) -> Any:
            if dtype == torch.bfloat16:  # all of xfuser's ways to load are for this dtype
                return super()._load_model()
            from diffusers import WanPipeline
            from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper

            transformer = xFuserWanTransformer3DWrapper.from_pretrained(
                model.source, subfolder="transformer", torch_dtype=dtype, attention_kwargs={"thw": None}
            )
            pipe = WanPipeline.from_pretrained(model.source, torch_dtype=dtype, transformer=transformer)
            return in_float64(pipe) if dtype == torch.float64 else pipe

    return WanModel


def _cogvideox(model: Model, dtype: torch.dtype) -> type:
    """A runner model around diffusers' own pipeline, which `attach` shards over xfuser's sequence-parallel group."""
    from xfuser.model_executor.models.runner_models.base_model import (
        DefaultInputValues,
        DiffusionOutput,
        ModelCapabilities,
        ModelSettings,
        xFuserModel,
    )

    class CogVideoXModel(xFuserModel):
        capabilities = ModelCapabilities(
            use_cfg_parallel=True, enable_slicing=True, enable_tiling=True, use_vae_channels_last_format=False
        )
        default_input_values = DefaultInputValues(max_sequence_length=226, **_defaults(model))
        settings = ModelSettings(
            model_name=model.source,
            output_name=model.like.name,
            model_output_type="video",
            mod_value=16,
            resolution_divisor=16,
            fps=model.like.video.fps,
        )

        def _load_model(self) -> Any:
            from diffusers import CogVideoXPipeline

            return CogVideoXPipeline.from_pretrained(model.source, torch_dtype=dtype)

        def _run_pipe(self, input_args: dict[str, Any]) -> Any:
            passed = ("prompt", "negative_prompt", "height", "width", "num_frames", "num_inference_steps")
            output = self.pipe(
                **{name: input_args[name] for name in (*passed, "guidance_scale", "max_sequence_length")},
                generator=self._make_generator(input_args["seed"]),
                output_type="np",
            )
            return DiffusionOutput(videos=output.frames, pipe_args=input_args)

    return CogVideoXModel


def _defaults(model: Model) -> dict[str, Any]:
    """By the names of xfuser's DefaultInputValues."""
    video = model.like.video
    names = ("height", "width", "num_frames", "guidance_scale", "flow_shift")
    return {name: getattr(video, name) for name in names} | {"num_inference_steps": video.steps}
