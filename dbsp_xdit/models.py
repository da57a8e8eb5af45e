"""The models that db-SP runs in xDiT: published checkpoints by name, and local folders of the same pipelines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbsp_core.config import DbspConfig
from dbsp_core.models.settings import side_complaint
from dbsp_core.models.signature import PIPELINES, ModelSignature
from dbsp_core.models.table import MODEL_SPECS, ModelSpec, find_model_spec, published_model, signature_of_model
from dbsp_core.utils.errors import UserError, did_you_mean
from dbsp_core.utils.files import require_folder_place
from dbsp_diffusers.checkpoint import Checkpoint
from dbsp_diffusers.preflight import require_possible
from dbsp_xdit.flags import config_from, parse_known

__all__ = ["Model", "find_model", "preflight", "require_video_size", "settings_of"]

_KNOWN = f"use one of {', '.join(MODEL_SPECS)}, their names on Hugging Face, or a local folder"


@dataclass(frozen=True)
class Model:
    """A pipeline that can be loaded.

    Attributes:
        source: Its repository on Hugging Face, or its local folder.
        like: The published model whose settings are its defaults.
    """

    source: str
    like: ModelSpec


def find_model(name: str) -> Model:
    """Finds the model that `--model name` means: a published checkpoint's name, in any case, or a local folder.

    Raises:
        UserError: In one line, for anything else.
    """
    spec = find_model_spec(name)
    if spec is not None:
        hub = next(n for n in spec.names if n.casefold() == name.casefold())
        return Model(hub if "/" in hub else spec.hub, spec)
    folder = Path(name)
    if not os.path.isdir(folder):
        looks_local = name.startswith((".", os.sep, "~")) or name.count("/") > 1
        fault = "that folder does not exist" if looks_local else "db-SP does not know that name"
        raise UserError(f"--model {name}: {fault}; {_KNOWN}{did_you_mean(name.casefold(), MODEL_SPECS)}")
    _require_pipeline(folder)
    variant = Checkpoint.read(folder).variant
    if variant is not None:
        raise UserError(
            f"--model {name}: its weights are of variant {variant} alone, which xDiT does not load; use dbsp "
            "generate, or save it again without a variant"
        )
    _read_json(folder / "transformer" / "config.json")
    signature = signature_of_model(folder)
    if signature is None:
        raise UserError(f"--model {name}: its configurations cannot be understood; download the folder again")
    return Model(name, _most_like(signature))


def require_video_size(model: Model, args: Mapping[str, Any]) -> None:
    """Raises UserError, in one line, for arguments of a run that the model cannot serve.

    Args:
        args: xfuser's arguments by name. One that is missing or None takes the model's default.
    """
    name = model.like.pipeline
    for side in ("height", "width"):
        value = args.get(side)
        complaint = None if value is None else side_complaint(value, model.like.token_pixels)
        if complaint is not None:
            raise UserError(f"--{side} {value} {complaint}")
    frames = args.get("num_frames")
    complaint = None if frames is None else PIPELINES[name].frames_complaint(frames)
    if complaint is not None:
        raise UserError(f"--num_frames {frames} {complaint}")
    if args.get("use_cfg_parallel") and name != "WanImageToVideoPipeline" and args.get("task") != "i2v":
        raise UserError(
            f"--use_cfg_parallel: {PIPELINES[name].title} does not run the two guidance passes on two groups of "
            "ranks; leave it out and double --ulysses_degree or --ring_degree"
        )
    _require_images(model, args)


def _require_images(model: Model, args: Mapping[str, Any]) -> None:
    """Raises UserError for a wrong number of images, which xfuser finds only when the weights are loaded."""
    images, task = args.get("input_images") or [], args.get("task")
    identity = model.like.signature
    most = identity.images[1]
    if model.like.variant == "ti2v":
        if task not in ("t2v", "i2v"):
            raise UserError(f"--model {model.like.name} needs --task t2v or --task i2v")
        wanted = int(task == "i2v")
    else:
        wanted = most if most != 2 or identity.images[0] == 2 else 1  # xfuser's image-to-video takes no last frame
    if len(images) != wanted:
        number = ("no image", "one image", "two images, of the first frame and of the last")[wanted]
        raise UserError(f"--input_images: {model.like.name} takes {number} in xDiT, got {len(images)}")
    for image in images:
        if "://" not in image and not os.path.isfile(image):
            raise UserError(f"--input_images {image}: there is no such file; name an image file or an address")


def _require_pipeline(folder: Path) -> None:
    """Raises UserError where a folder holds no pipeline of PIPELINES."""
    index = folder / "model_index.json"
    if not index.is_file():
        raise UserError(
            f"--model {folder}: the folder has no model_index.json; give the folder that holds it, as save_pretrained "
            "writes it (dbsp tiny wan DIR makes a small one)"
        )
    pipeline = _read_json(index).get("_class_name")
    if not isinstance(pipeline, str) or pipeline not in PIPELINES:
        kinds = " and ".join(f"{cls} ({pipeline.title})" for cls, pipeline in PIPELINES.items())
        raise UserError(
            f"--model {folder}: db-SP runs {kinds} in xDiT; this is {pipeline}; use --sp-backend usp for it"
        )


def _most_like(signature: ModelSignature) -> ModelSpec:
    """The model of that size, or the first of the same pipeline and variant that patches frames alike."""
    same = [s for s in MODEL_SPECS.values() if (s.pipeline, s.variant) == (signature.pipeline, signature.variant)]
    same = same or [spec for spec in MODEL_SPECS.values() if spec.pipeline == signature.pipeline]
    alike = (spec for spec in same if spec.patch_frames == signature.sizes[3])
    return published_model(signature) or next(alike, same[0])


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON; download the folder again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not the index of a pipeline; download the folder again")
    return content


def preflight(argv: Sequence[str], read: DbspConfig | None = None) -> str | None:
    """Checks an xdit command line, if it asks for db-SP, before any rank is started.

    Args:
        read: The configuration, if it has been read already.

    Returns:
        The repository or folder that its ranks will load, or None.

    Raises:
        UserError: The arguments are wrong.
    """
    if "-h" in argv or "--help" in argv:
        return None
    args = parse_known(argv)
    settings = settings_of(args, read)
    if settings is None:
        return None
    require_possible(settings[0])
    if settings[0].report and args["nnodes"] == "1":  # one of several nodes writes it
        require_folder_place(Path(settings[0].report).absolute(), "report")
    return settings[1].source


def settings_of(args: Mapping[str, Any], read: DbspConfig | None = None) -> tuple[DbspConfig, Model] | None:
    """Returns the configuration and the model that xfuser's arguments, by name, ask for; None for backend "usp".

    Args:
        read: The configuration, if it has been read already.

    Raises:
        UserError: In one line, for arguments that make no sense.
    """
    config = config_from(args, read)
    if config is None:
        return None
    if args.get("model") is None:
        raise UserError(f"--model is missing; {_KNOWN}")
    model = find_model(args["model"])
    require_video_size(model, args)
    return config, model
