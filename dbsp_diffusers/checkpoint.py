"""A pipeline's checkpoint: the files to load and missing files, checked before loading weights."""

from __future__ import annotations

import importlib
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dbsp_core.models.signature import PIPELINES, ModelSignature
from dbsp_core.utils.errors import UserError, cut_short
from dbsp_core.utils.files import is_pointer, read_text
from dbsp_core.utils.process import installed_version

_STEMS = "diffusion_pytorch_model", "pytorch_model", "model"
_FILE = re.compile(rf"(?:{'|'.join(_STEMS)})(?:\.(\w+))??(?:-\d+-of-\d+)?(?:\.(\w+))??\.(?:safetensors|bin)")
"""Names of weight files; one of the groups is the variant, as in model.fp16.safetensors."""
_INDEX = re.compile(rf"(?:{'|'.join(_STEMS)})\.(?:safetensors|bin)\.index(?:\.(\w+))?\.json")
_WITHOUT_WEIGHTS = re.compile(r"Tokenizer|Processor|Extractor|Scheduler|Guid")  # parts of class names


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint's folder."""

    folder: Path
    variant: str | None  # of the files to load, such as "fp16", or None for files without variant
    missing: tuple[str, ...]  # files and folders that the pipeline needs, relative to the folder

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Reads file names, preferring files without a variant in each part of the pipeline."""
        lacking: list[str] = []
        variants: set[str] | None = None  # variants that complete all parts that are incomplete without one
        for part, (_, name) in _classes(folder).items():
            if not (folder / part).is_dir():
                lacking, variants = [*lacking, f"{part}/"], set()
            elif _WITHOUT_WEIGHTS.search(name) is None:
                missing = _missing_by_variant(folder / part)
                if missing.get(None) == []:
                    continue
                whole = {variant for variant, files in missing.items() if variant and not files}
                variants = whole if variants is None else variants & whole
                stem = "model" if "transformers_version" in _json(folder / part / "config.json") else _STEMS[0]
                lacking += [f"{part}/{file}" for file in missing.get(None, [f"{stem}.safetensors"])]
        return cls(folder, min(variants), ()) if variants else cls(folder, None, tuple(lacking))

    def weights(self) -> list[Path]:
        """Returns the .safetensors files to load, of all parts."""
        files: list[Path] = []
        for part in sorted(path for path in self.folder.iterdir() if path.is_dir()):
            by_variant = defaultdict(list)
            for path in sorted(part.glob("*.safetensors")):
                if name := _FILE.fullmatch(path.name):
                    by_variant[name[1] or name[2]].append(path)
            files += by_variant[self.variant] or by_variant[None]
        return files

    def config(self, part: str) -> dict[str, Any]:
        """Returns the content of a part's config.json; empty if there is none."""
        return _json(self.folder / part / "config.json")

    def require_readable(self) -> None:
        """Raises UserError for code, unknown classes, Git LFS pointers and damaged weights."""
        for part, (library, name) in _classes(self.folder).items():
            if library in ("diffusers", "transformers") and not hasattr(importlib.import_module(library), name):
                raise UserError(
                    f"checkpoint {self.folder}: its {part} is {library}.{name}, which version "
                    f"{installed_version(library)} does not have; install a {library} that has it"
                )
            if (self.folder / part / f"{library}.py").is_file():
                raise UserError(
                    f"checkpoint {self.folder}: its {part} is {library}.{name}, custom code in the checkpoint, which "
                    f"db-SP does not run; save {part} with a class of diffusers"
                )
        for path in sorted(self.folder.glob("*/*")):
            if path.is_file() and is_pointer(path):
                raise UserError(f"{path} is a pointer of Git LFS, not the file itself; fetch it with git lfs pull")
        for path in self.weights():
            try:
                with safe_open(path, framework="numpy") as file:
                    file.keys()
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} cannot be read as weights ({error}); download it again") from error


def _classes(folder: Path) -> dict[str, tuple[str, str]]:
    """Returns library and name of each part's class in model_index.json, skipping parts without a class."""
    parts = _json(folder / "model_index.json").items()
    named = {part: value for part, value in parts if isinstance(value, list) and not part.startswith("_")}
    return {part: (pair[0], pair[1]) for part, pair in named.items() if list(map(type, pair)) == [str, str]}


def _missing_by_variant(part: Path) -> dict[str | None, list[str]]:
    """Returns missing files by variant, for each variant of a part's weights with any file or index."""
    names = {path.name for path in part.iterdir() if path.exists()}  # excludes dangling links of interrupted downloads
    missing: dict[str | None, list[str]] = {}
    for name in sorted(names):
        if index := _INDEX.fullmatch(name):
            shards = _json(part / name).get("weight_map")
            files = set(map(str, shards.values())) - names if isinstance(shards, dict) else {name}
            missing.setdefault(index[1], sorted(files))
    whole = (_FILE.fullmatch(name) for name in names if not re.search(r"-\d+-of-\d+", name))
    return missing | {name[1] or name[2]: [] for name in whole if name}


def _json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, or an empty one if there is no file."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def require_checkpoint(model: str | None, *, ask_hub: bool = True) -> None:
    """Raises UserError for a checkpoint with missing or damaged files, or with classes that are not installed.

    `model` is a folder or repository; None passes. Without `ask_hub`, so does a missing one: it may appear later.
    """
    checkpoint = None if model is None else local_checkpoint(model)
    if checkpoint is not None:
        checkpoint.require_readable()
    if model is None or (checkpoint is not None and not checkpoint.missing):
        return
    missing = () if checkpoint is None else checkpoint.missing
    lacks = f"lacks {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}" if missing else "is not"
    if Path(model).is_dir():
        raise UserError(f"checkpoint {model} {lacks}; download it again, whole")
    if not ask_hub:
        return
    from huggingface_hub import HfApi, constants

    try:
        HfApi().model_info(model, timeout=10.0)
    except Exception as error:  # any library may raise for the network
        reason = (str(error).strip(" .\n").splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"checkpoint {model} {lacks} in {constants.HF_HUB_CACHE}, and cannot be downloaded from "
            f"{constants.ENDPOINT} ({reason}); download it where there is a network (hf download {model}) and pass "
            "its folder with --model, or set HF_HUB_CACHE to the cache that has it"
        ) from error


def local_checkpoint(model: str) -> Checkpoint | None:
    """Returns the checkpoint of a folder, or of a repository in Hugging Face's cache (maybe incomplete), or None."""
    folder = Path(model) if Path(model).is_dir() else cached_checkpoint(model)
    return None if folder is None else Checkpoint.read(folder)


def cached_checkpoint(repository: str, file: str = "model_index.json") -> Path | None:
    """Returns the folder in Hugging Face's cache with this file of a repository (maybe incomplete), or None."""
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(repository, file)
    except (ImportError, ValueError):  # not a repository name
        return None
    return Path(path).parent if isinstance(path, str) else None


def load_stock_pipeline(
    model: str,
    identity: ModelSignature | None,
    *,
    from_image: bool,
    flow_shift: float | None,
    cls: str = "DiffusionPipeline",
    **options: Any,
) -> Any:
    """Loads a pipeline in the variant of its files. Raises UserError if they cannot be loaded.

    Args:
        from_image: True to start from an image, for checkpoints that name the text-only class (Wan2.2 TI2V, LTX-2).
        flow_shift: Shift of the scheduler, if it has one. None: the checkpoint's.
        cls: diffusers class; by default the one that the checkpoint names.
        options: Further arguments of `from_pretrained`.
    """
    import diffusers

    if from_image and identity is not None and identity.images != (0, 0):
        cls = PIPELINES[identity.pipeline].from_image or cls
    checkpoint = local_checkpoint(model)
    variant = None if checkpoint is None else checkpoint.variant
    try:
        pipe = getattr(diffusers, cls).from_pretrained(model, variant=variant, **options)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise UserError(f"checkpoint {model} cannot be loaded: {cut_short(' '.join(str(error).split()))}") from error
    if flow_shift is not None and "flow_shift" in pipe.scheduler.config:
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=flow_shift)
    return pipe
