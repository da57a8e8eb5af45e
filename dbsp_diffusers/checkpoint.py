"""The weights in a pipeline's folder, as diffusers writes it: which files are loaded, and which are missing."""

from __future__ import annotations

import codecs
import importlib
import json
import math
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import is_pointer, read_text
from dbsp_core.utils.process import installed_version

_STEMS = "diffusion_pytorch_model|pytorch_model|model"
_FILE = re.compile(rf"(?:{_STEMS})(?:\.(\w+))??(?:-\d+-of-\d+)?(?:\.(\w+))??\.(?:safetensors|bin)")
"""Names of files of weights; one of the groups is the variant, as in model.fp16.safetensors."""
_INDEX = re.compile(rf"(?:{_STEMS})\.(?:safetensors|bin)\.index(?:\.(\w+))?\.json")
_SHARD = re.compile(r"-\d+-of-\d+")
_WITHOUT_WEIGHTS = re.compile(r"Tokenizer|Processor|Extractor|Scheduler|Guid")
"""Within the names of classes."""


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint's folder.

    Attributes:
        variant: Variant of the files to load, such as "fp16", or None for files without one.
        missing: Files and folders that the pipeline needs and that are not there, relative to the folder.
    """

    folder: Path
    variant: str | None
    missing: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Looks at the names of files. Files without a variant are preferred, in each part of the pipeline."""
        lacking: dict[str, tuple[str, ...]] = {}
        variants: set[str] | None = None
        for part, has_weights in _parts(folder).items():
            if not (folder / part).is_dir():
                lacking[part], variants = (f"{part}/",), set()
            elif has_weights and (missing := _missing(folder / part, None)):
                lacking[part] = tuple(f"{part}/{name}" for name in missing)
                whole = {v for v in _variants(folder / part) if not _missing(folder / part, v)}
                variants = whole if variants is None else variants & whole
        if not lacking or variants:
            return cls(folder, min(variants) if variants else None, ())
        return cls(folder, None, tuple(name for names in lacking.values() for name in names))

    def weights(self) -> list[Path]:
        """Returns the .safetensors files that are loaded, of every part."""
        files: list[Path] = []
        for part in sorted(path for path in self.folder.iterdir() if path.is_dir()):
            by_variant = defaultdict(list)
            for path in sorted(part.glob("*.safetensors")):
                if name := _FILE.fullmatch(path.name):
                    by_variant[name[1] or name[2]].append(path)
            files += by_variant[self.variant] or by_variant[None]
        return files

    def config(self, part: str) -> dict[str, Any]:
        """Returns the content of a part's config.json; empty where there is none."""
        return _json(self.folder / part / "config.json")

    def require_readable(self) -> None:
        """Raises UserError for what is there and cannot be loaded: code, unknown classes, pointers, damaged files."""
        for part, (library, name) in _classes(self.folder).items():
            message = _class_message(library, name, self.folder / part)
            if message is not None:
                raise UserError(f"checkpoint {self.folder}: its {part} is {library}.{name}, {message}")
        for path in sorted(path for part in ("*", "*/*") for path in self.folder.glob(part)):
            if path.is_file() and is_pointer(path):
                raise UserError(f"{path} is a pointer of Git LFS, not the file itself; fetch it with git lfs pull")
            if path.suffix == ".json" and path.is_file() and _is_marked(path):
                raise UserError(f"{path} has a byte order mark, which {_LOADERS} cannot read; save it as plain UTF-8")
        for path in self.weights():
            numbers_in(path)


_LOADERS = "diffusers and transformers"


def _is_marked(path: Path) -> bool:
    """Returns True for text with a byte order mark."""
    with path.open("rb") as file:
        return file.read(3).startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def _class_message(library: str, name: str, part: Path) -> str | None:
    """Returns why a part's class cannot be had, or None. A library may be a module of diffusers' pipelines."""
    if library in ("diffusers", "transformers"):
        module = importlib.import_module(library)
        if name in dir(module) or hasattr(module, name):
            return None
        return f"which version {installed_version(library)} does not have; install a {library} that has it"
    if (part / f"{library}.py").is_file():
        return f"code in the checkpoint, and db-SP runs none; save {part.name} with a class of diffusers"
    if library != "__main__" and (find_spec(library.partition(".")[0]) or hasattr(_pipelines(), library)):
        return None
    return f"and no library {library} is installed; install it, or save {part.name} with a class of diffusers"


def _pipelines() -> Any:
    return importlib.import_module("diffusers.pipelines")


def numbers_in(path: Path) -> int:
    """Returns how many numbers a file of weights holds, as its header says.

    Raises:
        UserError: For a file that is none of weights, or is cut short.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  no mapping
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as weights ({error}); download it again") from error
    return sum(map(math.prod, shapes))


def _parts(folder: Path) -> dict[str, bool]:
    """Returns the parts that model_index.json names, and whether each has weights."""
    return {part: _WITHOUT_WEIGHTS.search(name) is None for part, (_, name) in _classes(folder).items()}


def _classes(folder: Path) -> dict[str, tuple[str, str]]:
    """Returns the library and the name of each part's class in model_index.json; parts without one are left out."""
    index = _json(folder / "model_index.json")
    pairs = {part: value for part, value in index.items() if isinstance(value, list) and len(value) == 2}
    return {
        part: (library, name)
        for part, (library, name) in pairs.items()
        if isinstance(library, str) and isinstance(name, str) and not part.startswith("_")
    }


def _variants(part: Path) -> set[str]:
    names = [path.name for path in part.iterdir()]
    matches = [_FILE.fullmatch(name) or _INDEX.fullmatch(name) for name in names]
    return {variant for match in matches if match is not None for variant in match.groups() if variant}


def _missing(part: Path, variant: str | None) -> list[str]:
    """Returns the names of files that are missing for one variant of a part; empty if it is whole."""
    names = {path.name for path in part.iterdir() if os.path.exists(path)}
    files = [(name, match) for name in sorted(names) if (match := _FILE.fullmatch(name))]
    if any((match[1] or match[2]) == variant and not _SHARD.search(name) for name, match in files):
        return []
    for name in sorted(names):
        match = _INDEX.fullmatch(name)
        if match and match[1] == variant:
            shards = _json(part / name).get("weight_map")
            return sorted(set(map(str, shards.values())) - names) if isinstance(shards, dict) else [name]
    usual = "model" if "transformers_version" in _json(part / "config.json") else "diffusion_pytorch_model"
    return [f"{usual}.{f'{variant}.' if variant else ''}safetensors"]


def _json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is none."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
