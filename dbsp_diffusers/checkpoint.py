"""The weights in a pipeline's folder, as diffusers writes it: which files are loaded, and which are missing."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        found: list[Path] = []
        for part in sorted(path for path in self.folder.iterdir() if path.is_dir()):
            by_variant = defaultdict(list)
            for path in sorted(part.glob("*.safetensors")):
                if name := _FILE.fullmatch(path.name):
                    by_variant[name[1] or name[2]].append(path)
            found += by_variant[self.variant] or by_variant[None]
        return found


def _parts(folder: Path) -> dict[str, bool]:
    """Returns the parts that model_index.json names, and whether each has weights."""
    index = _json(folder / "model_index.json")
    classes = {name: value[1] for name, value in index.items() if isinstance(value, list) and len(value) == 2}
    return {
        name: _WITHOUT_WEIGHTS.search(kind) is None for name, kind in classes.items() if isinstance(kind, str) and kind
    }


def _variants(part: Path) -> set[str]:
    names = [path.name for path in part.iterdir()]
    found = [_FILE.fullmatch(name) or _INDEX.fullmatch(name) for name in names]
    return {variant for one in found if one is not None for variant in one.groups() if variant}


def _missing(part: Path, variant: str | None) -> list[str]:
    """Returns the names of files that are missing for one variant of a part; empty if it is whole."""
    names = {path.name for path in part.iterdir() if os.path.exists(path)}
    files = [(name, found) for name in sorted(names) if (found := _FILE.fullmatch(name))]
    if any((found[1] or found[2]) == variant and not _SHARD.search(name) for name, found in files):
        return []
    for name in sorted(names):
        found = _INDEX.fullmatch(name)
        if found and found[1] == variant:
            shards = _json(part / name).get("weight_map")
            return sorted(set(map(str, shards.values())) - names) if isinstance(shards, dict) else [name]
    usual = "model" if "transformers_version" in _json(part / "config.json") else "diffusion_pytorch_model"
    return [f"{usual}.{f'{variant}.' if variant else ''}safetensors"]


def _json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
