"""Checks, without weights, that a model and this installation can make a video."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path

from dbsp_cli.generate.images import VIDEO
from dbsp_cli.generate.loras import TRANSFORMERS
from dbsp_core.config import DbspConfig
from dbsp_core.models.settings import TOKEN_PIXELS, GenerateSettings, side_message
from dbsp_core.models.signature import PIPELINES, ModelSignature, token_grid
from dbsp_core.models.table import TINY_MODELS, model_title, published_model
from dbsp_core.sources import MaskRequest
from dbsp_core.sources.static import StoredMasks
from dbsp_core.sources.union import parts_of
from dbsp_core.utils.errors import SettingError, UserError, blame_setting, require_value
from dbsp_core.utils.files import require_file
from dbsp_kernels.errors import install_command

_NEEDS = ("diffusers", "transformers", "imageio_ffmpeg")


def require_installed() -> None:
    """Raises UserError where a package is missing that makes videos."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{', '.join(missing)} is not installed; {install_command('diffusers')}")


def require_images(identity: ModelSignature, video: GenerateSettings) -> None:
    """Raises UserError for an image that the model needs; no setting is blamed for one that is missing."""
    given = sum(image is not None for image in (video.image, video.last_image))
    if given < identity.images[0]:
        again = " twice: the first frame, then the last" if identity.images[0] == 2 else ""
        raise UserError(f"{model_title(identity)} {identity.images_message(given)}; give one with --image FILE{again}")


def require_source_video(given: Path | None, identity: ModelSignature) -> None:
    """Raises UserError for a video to start from that is not there, or that the model does not take."""
    if given is None:
        return
    require_file(given, "--video", VIDEO)
    if PIPELINES[identity.pipeline].from_video is None or identity.variant:
        able = [pipeline.title for pipeline in PIPELINES.values() if pipeline.from_video]
        raise UserError(
            f"--video: {model_title(identity)} does not start from a video; {' and '.join(able)} models do"
        )


def require_video(signature: ModelSignature, video: GenerateSettings) -> None:
    """Raises SettingError for what the pipeline would change or reject: frames, a size, or images."""
    spec = published_model(signature)
    if signature.pipeline in PIPELINES and video.num_frames is not None:
        message = PIPELINES[signature.pipeline].frames_message(video.num_frames)
        require_value(video, "num_frames", message is None, str(message), "generate.")
    for side in ("height", "width"):
        value = getattr(video, side)
        message = None if value is None or spec is None else side_message(value, spec.token_pixels)
        require_value(video, side, message is None, str(message), "generate.")
    one_alone = video.guidance_scale_2 is None or signature.variant == "two"
    message = f"is for models with two transformers, and {model_title(signature)} has one; leave it out"
    require_value(video, "guidance_scale_2", one_alone, message, "generate.")
    message = signature.images_message(sum(image is not None for image in (video.image, video.last_image)))
    if message is not None:
        raise SettingError(f"{model_title(signature)} {message}", ("image",))
    if video.last_image is not None and video.image is None:
        raise SettingError("generate.last_image needs generate.image, the first frame", ("last_image",))


def require_mask_size(config: DbspConfig, signature: ModelSignature, video: GenerateSettings) -> None:
    """Raises UserError for a mask file that is for another model or size of video. Models of unknown sizes pass."""
    spec = published_model(signature)
    if spec is None and signature not in TINY_MODELS.values():
        return
    heads, frames = signature.sizes[1], signature.sizes[3]
    pixels = 2 * TOKEN_PIXELS if signature.variant == "ti2v" else TOKEN_PIXELS
    thw = token_grid(video.num_frames or 1, video.height or 0, video.width or 0, frames, pixels)
    request = MaskRequest(0, heads, thw, PIPELINES[signature.pipeline].text_tokens)
    for name in TRANSFORMERS if signature.variant == "two" else TRANSFORMERS[:1]:
        of_second = bool(config.transformer_2.get("mask")) and name == "transformer_2"
        for part in parts_of(config.for_transformer(name).mask):
            if isinstance(part, StoredMasks):
                with blame_setting(name) if of_second else nullcontext(), blame_setting("mask"):
                    part.grid(request)
