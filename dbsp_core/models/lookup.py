"""Which model a name, a folder or a signature means, and whether a video fits it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from dbsp_core.models.settings import GenerateSettings, side_complaint
from dbsp_core.models.signature import PIPELINES, ModelSignature, model_signature, variant_of
from dbsp_core.models.table import MODEL_SPECS, PUBLISHED, TINY, TINY_MODELS, TINY_NAMES, ModelSpec
from dbsp_core.utils.errors import SettingError, bad_value

__all__ = [
    "find_model_spec",
    "model_title",
    "published_model",
    "require_video",
    "signature_of_model",
    "signature_of_name",
    "tiny_architecture",
]


def find_model_spec(name: str) -> ModelSpec | None:
    """The model of that name, upper or lower case, or None."""
    wanted = name.casefold()
    return next((s for s in MODEL_SPECS.values() if wanted in {known.casefold() for known in s.names}), None)


def tiny_architecture(model: str) -> str | None:
    """The key of `TINY_MODELS` that a model's name asks for ("tiny-wan": "wan"), or None."""
    name = model.removeprefix(TINY)
    return name if model.startswith(TINY) and name in TINY_MODELS and not Path(model).exists() else None


def signature_of_name(name: str) -> ModelSignature | None:
    """The signature of a published or tiny model of this name; None where there is none."""
    spec, tiny = find_model_spec(name), tiny_architecture(name)
    return spec.signature if spec is not None else None if tiny is None else TINY_MODELS[tiny]


def signature_of_model(model: str | os.PathLike[str]) -> ModelSignature | None:
    """The signature of a model by its name, or of a local folder in diffusers' form; None for what is neither."""
    text = os.fspath(model)
    known = signature_of_name(text)
    if known is not None:
        return known
    try:
        index = json.loads((Path(text) / "model_index.json").read_text(encoding="utf-8"))
        config = json.loads((Path(text) / "transformer" / "config.json").read_text(encoding="utf-8"))
        variant = variant_of((index.get("transformer_2") or [None])[0] is not None, index)
        return model_signature(str(index["_class_name"]), config, variant)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def published_model(signature: ModelSignature) -> ModelSpec | None:
    """The published model that has this signature, or None."""
    return PUBLISHED.get(signature)


def model_title(signature: ModelSignature) -> str:
    """A model in words: its name where it is known, else its pipeline and sizes."""
    spec = published_model(signature)
    if spec is not None:
        return spec.name
    if signature in TINY_NAMES:
        return f"{TINY}{TINY_NAMES[signature]}"
    layers, heads, head_dim, _ = signature.sizes
    if not heads:  # a class whose configuration has other names for them
        return f"a {signature.pipeline}"
    return f"a {signature.pipeline} with {layers} layers and {heads} heads of {head_dim}"


def require_video(signature: ModelSignature, video: GenerateSettings) -> None:
    """Raises SettingError for what the pipeline would change or refuse: frames, a size, or images."""
    spec = published_model(signature)
    if signature.pipeline in PIPELINES and video.num_frames is not None:
        complaint = PIPELINES[signature.pipeline].frames_complaint(video.num_frames)
        if complaint is not None:
            raise bad_value(video, "num_frames", complaint, "generate.")
    for side in ("height", "width"):
        value = getattr(video, side)
        complaint = None if value is None or spec is None else side_complaint(value, spec.token_pixels)
        if complaint is not None:
            raise bad_value(video, side, complaint, "generate.")
    complaint = signature.images_complaint(sum(image is not None for image in (video.image, video.last_image)))
    if complaint is not None:
        raise SettingError(f"{model_title(signature)} {complaint}", ("image",))
    if video.last_image is not None and video.image is None:
        raise SettingError("generate.last_image needs generate.image, the first frame", ("last_image",))
