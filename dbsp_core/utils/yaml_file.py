"""Reads YAML files strictly, with the line of each setting."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from dbsp_core.utils.errors import SettingError, UserError, did_you_mean, in_short, kind_of
from dbsp_core.utils.files import read_text, require_file, user_path

KeyPath = tuple[str, ...]

_UNREADABLE = (yaml.YAMLError, ValueError, RecursionError)
"""Raised for invalid YAML; ValueError for text, numbers and dates that Python cannot read."""


@dataclass(frozen=True)
class Settings:
    """Settings as plain YAML values, with their locations."""

    values: Mapping[str, Any]
    locations: Mapping[KeyPath, str] = field(default_factory=dict)  # such as {("mask", "cdf"): "my.yaml:7"}
    origin: str = ""  # the file

    def location_of(self, path: KeyPath) -> str:
        """Returns the location of a setting, else of a key within it, else of the innermost enclosing setting."""
        within = [location for known, location in self.locations.items() if known[: len(path)] == path]
        around = [self.locations.get(path[:length], "") for length in range(len(path), 0, -1)]
        return self.locations.get(path) or next(iter(within), "") or next(filter(None, around), self.origin)

    def changed(self, path: Sequence[str], value: Any, location: str) -> Settings:
        """Returns a copy with one setting replaced or added. Raises UserError if a parent key is not a mapping."""
        values, inside = _put(self.values, path, value, location), tuple(path)
        locations = {known: where for known, where in self.locations.items() if known[: len(inside)] != inside}
        return replace(self, values=values, locations={**locations, inside: location})

    @contextmanager
    def located(self) -> Iterator[None]:
        """Adds the setting's location to the message of a SettingError in the body."""
        try:
            yield
        except SettingError as error:
            location = self.location_of(error.path)
            raise UserError(f"{location}: {error}" if location else str(error)) from error.__cause__


def _put(values: Mapping[str, Any], path: Sequence[str], value: Any, location: str) -> dict[str, Any]:
    key, *rest = path
    inner = values.get(key)
    if rest and not isinstance(inner, (Mapping, type(None))):
        shown = f"{key!r} is {in_short(inner)}, not a mapping that could hold {rest[0]!r}"
        raise UserError(f"{location}: {shown}; set {key!r} as a whole")
    return {**values, key: _put(inner or {}, rest, value, location) if rest else value}


def read_settings(path: str | os.PathLike[str], what: str) -> Settings:
    """Reads the mapping in a YAML file, which may be empty; `what` names it, such as "configuration file"."""
    path = Path(path)
    require_file(path, what, "give the path of a YAML file")
    try:
        content, locations = _parsed(read_text(path), f"{path}:", with_lines=True)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        line = f":{at.line + 1}" if at is not None else ""
        raise UserError(f"{path}{line}: this is not YAML: {error.problem}") from error
    except OSError as error:
        raise UserError(f"{what} {path} cannot be read ({error.strerror})") from error
    except _UNREADABLE as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{what} {path} is not YAML: {error}") from error
    if content is not None and not isinstance(content, Mapping):
        raise UserError(f"{what} {path} must be a mapping, got {kind_of(content)}")
    return Settings(content or {}, locations, str(path))


def parse_value(text: str, what: str) -> Any:
    """Parses one YAML value, called `what` in messages. Raises UserError for text that is not YAML."""
    try:
        return _parsed(text, what)[0]
    except _UNREADABLE as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{what}: {in_short(text)} is not YAML ({error}); close its brackets and quotes") from error


def _parsed(text: str, where: str, with_lines: bool = False) -> tuple[Any, dict[KeyPath, str]]:
    """Returns the value of a YAML document, and the location of each key (`where`, plus the line if `with_lines`).

    The key of a list element is its index, from "0". Raises UserError for duplicate keys.
    """
    locations: dict[KeyPath, str] = {}

    def note_locations(node: yaml.Node, path: KeyPath) -> None:
        if isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                note_locations(value, (*path, str(index)))
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inside = (*path, str(key.value))
                location = where + (str(key.start_mark.line + 1) if with_lines else "")
                if inside in locations:
                    twice = f"{in_short(key.value)} is given twice, first in {locations[inside]}"
                    raise UserError(f"{location}: {twice}; give it once")
                locations[inside] = location
                note_locations(value, inside)

    loader = yaml.SafeLoader(text)
    node = loader.get_single_node()
    if node is None:
        return None, {}
    note_locations(node, ())
    return loader.construct_document(node), locations


def shipped_configs() -> Path:
    """Returns the folder of shipped configurations: inside the installed package, or next to it in the repository."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def shown_config(origin: str) -> str:
    """Returns a configuration file's name for messages: the bare name of a shipped one, else the path."""
    path = Path(origin)
    return path.stem if path.parent == shipped_configs() else origin


def find_config(name: str | os.PathLike[str]) -> Path:
    """Finds a configuration file by path, or else a shipped one by name. Raises UserError if there is neither."""
    path = user_path(name)
    if os.path.isfile(path):
        return path
    shipped = {path.stem: path for path in sorted(shipped_configs().glob("*.yaml"))}
    text = os.fspath(name)
    if text.removesuffix(".yaml") in shipped:
        return shipped[text.removesuffix(".yaml")]
    hint = did_you_mean(Path(text).stem, shipped) or f"; shipped ones: {', '.join(shipped)}"
    require_file(path, "configuration file", f"give the path of a YAML file or a shipped one's name{hint}")
    return path
