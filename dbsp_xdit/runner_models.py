"""Runner models for what xfuser has none for: CogVideoX, some sizes of Wan, local folders, short names.

They are registered only in runs with backend "dbsp"; in all others xfuser's list of models stays as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dbsp_core.config import DbspConfig
from dbsp_core.models.table import MODEL_SPECS
from dbsp_diffusers.patching import in_float64
from dbsp_xdit.models import Model

__all__ = ["register"]


def register(name: str, model: Model, config: DbspConfig) -> None:
    """Makes `--model name` mean this model, in this process."""
    import xfuser.model_executor.models.runner_models  # noqa: F401  fills the registry
    from xfuser.model_executor.models.runner_models.base_model import MODEL_REGISTRY

    known = {key.casefold(): model for key, model in MODEL_REGISTRY.items()}
    if model.like.pipeline == "CogVideoXPipeline":
        MODEL_REGISTRY[name] = _cogvideox(model, config.generate.torch_dtype)
        return
    kind = model.like.pipeline, model.like.variant
    alike = [spec for spec in MODEL_SPECS.values() if (spec.pipeline, spec.variant) == kind]
    like, base = next(
        (spec, known[name.casefold()])
        for spec in (model.like, *alike)
        for name in spec.names
        if name.casefold() in known
    )
    MODEL_REGISTRY[name] = _wan(model, base, like is model.like, config.generate.torch_dtype)


def _wan(model: Model, base: Any, own: bool, dtype: torch.dtype) -> type:
    """Makes xfuser's own runner model load these weights, with the usual settings for their size.

    Args:
        own: Whether `base` is for just this model. Its defaults stay then, so that a command makes the same video with
            and without db-SP.
    """
    like = model.like
    # which layers may have low precision is known for the model itself only
    no_low_precision = {"use_fp8_gemms": False, "use_fp4_gemms": False, "use_fp6_gemms": False}

    class WanModel(base):
        capabilities = replace(base.capabilities, **({} if own else no_low_precision))
        default_input_values = replace(base.default_input_values, **({} if own else _defaults(model)))
        _BASE_MODEL = model.source  # where the distilled model's other parts are

        def _customize_settings(self, config: Any) -> None:
            super()._customize_settings(config)
            self.settings.model_name = model.source
            if not own:
                self.settings.output_name = like.name

        def _load_model(self) -> Any:
            if dtype == torch.bfloat16:  # all of xfuser's ways to load are for this dtype
                return super()._load_model()
            pipe = _pipeline(model, self.config.task).from_pretrained(model.source, torch_dtype=dtype)
            return in_float64(pipe) if dtype == torch.float64 else pipe

    return WanModel


def _pipeline(model: Model, task: str | None) -> Any:
    """The class that xfuser runs a Wan model in; `task` matters for models that take text or images."""
    import diffusers
    from xfuser.model_executor.pipelines.pipeline_wan_i2v import xFuserWanImageToVideoPipeline

    from_image = model.like.pipeline == "WanImageToVideoPipeline" or task == "i2v"
    return xFuserWanImageToVideoPipeline if from_image else getattr(diffusers, model.like.pipeline)


def _cogvideox(model: Model, dtype: torch.dtype) -> type:
    """Makes a runner model of diffusers' own pipeline, which `attach` shards over xfuser's sequence-parallel group."""
    from xfuser.model_executor.models.runner_models.base_model import (
        DefaultInputValues,
        DiffusionOutput,
        ModelCapabilities,
        ModelSettings,
        xFuserModel,
    )

    class CogVideoXModel(xFuserModel):
        capabilities = ModelCapabilities(enable_slicing=True, enable_tiling=True, use_vae_channels_last_format=False)
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
    """The model's usual settings by the names of xfuser's DefaultInputValues."""
    video = model.like.video
    names = ("height", "width", "num_frames", "guidance_scale", "guidance_scale_2", "flow_shift")
    return {name: getattr(video, name) for name in names} | {"num_inference_steps": video.steps}
