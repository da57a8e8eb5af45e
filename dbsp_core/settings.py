"""Reading YAML files strictly: what every settings file has in common."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

__all__ = ["read_mapping", "require_known", "shipped_configs"]


def read_mapping(path: str | os.PathLike[str], what: str) -> Mapping[str, Any]:
    """The mapping in a YAML file (empty for an empty file). Raises ValueError, naming `what` it is, for others."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{what} {path} does not exist; give the path of a YAML file")
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{what} {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is not None and not isinstance(content, Mapping):
        raise ValueError(f"{what} {path} must be a mapping, not a {type(content).__name__}")
    return content or {}


def require_known(key: object, known: Collection[str], where: str) -> None:
    """Raises ValueError, naming the nearest valid key, for a key that is not known."""
    if key not in known:
        close = difflib.get_close_matches(str(key), list(known), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
        raise ValueError(f"unknown key {key!r} in {where}; {hint}")


def shipped_configs() -> Path:
    """Where the configurations that come with db-SP are: in the repository, or installed as `dbsp_configs`."""
    repository = Path(__file__).resolve().parents[1] / "configs"
    found = None if repository.is_dir() else importlib.util.find_spec("dbsp_configs")
    locations = list(found.submodule_search_locations or ()) if found is not None else []
    return Path(locations[0]) if locations else repository
