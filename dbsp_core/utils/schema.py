"""Builds settings (frozen dataclasses) from YAML mappings, strictly by field types."""

from __future__ import annotations

import functools
import os
import re
import types
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dbsp_core.utils.errors import SettingError, UserError, blame_setting, did_you_mean, in_short
from dbsp_core.utils.files import expand_path

_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")  # numbers such as 1e9, which YAML reads as text


@functools.cache
def setting_names(cls: type) -> tuple[str, ...]:
    """Returns the keys of a settings class: its fields, except those with metadata setting=False."""
    return tuple(f.name for f in fields(cls) if f.metadata.get("setting", True))


def build(cls: type, values: Mapping[str, Any], where: str) -> Any:
    """Returns `cls(**values)` after checking keys and types; `where` is the location for messages, or ""."""
    settings = checked(cls, values, where)
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in needed if name not in settings]:
        raise SettingError(f"{where or 'the file'} lacks {', '.join(missing)}; add what is missing")
    try:
        return cls(**settings)
    except SettingError:
        raise
    except UserError as error:  # not about a single setting
        raise SettingError(str(error)) from error.__cause__


def checked(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns values converted to the types of a dataclass's fields; see `build`.

    A field with metadata read=function is converted by function(value, name for messages).
    """
    hints, known = get_type_hints(cls), setting_names(cls)
    readers = {f.name: f.metadata["read"] for f in fields(cls) if "read" in f.metadata}
    converted = {}
    for key in values:
        require_known(key, known, where)
    for key, value in values.items():
        name = f"{in_short(key)} in {where}" if where else in_short(key)
        with blame_setting(key):
            converted[key] = readers[key](value, name) if key in readers else convert(value, hints[key], name, key)
    return converted


def keys_within(cls: type) -> dict[str, str]:
    """Maps keys of nested settings classes to their parent key."""
    inner: dict[str, str] = {}
    for name, hint in get_type_hints(cls).items():
        if isinstance(hint, type) and is_dataclass(hint) and name in setting_names(cls):
            inner |= {key: f"{name}.{within}" for key, within in keys_within(hint).items()}
            inner |= dict.fromkeys(setting_names(hint), name)
    return inner


def convert(value: Any, hint: Any, name: str, key: str = "") -> Any:
    """Converts a YAML value to type `hint`; `name` is the setting for messages, `key` its key within a mapping."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    for option in options:
        origin = get_origin(option)
        if origin is Literal and value in get_args(option):
            return value
        if option in (bool, int) and type(value) is option:
            return value
        if option is float and (type(value) in (int, float) or (type(value) is str and _EXPONENT.fullmatch(value))):
            return float(value)
        if option is str and isinstance(value, (str, os.PathLike)):
            return os.fspath(value)
        if isinstance(option, type) and is_dataclass(option):
            if isinstance(value, option):
                return value
            if isinstance(value, Mapping):
                return build(option, value, repr(key))
        if origin is Mapping and isinstance(value, Mapping):
            item = get_args(option)[1]
            return {k: convert(v, item, f"{k} in {name}", k) if is_dataclass(item) else v for k, v in value.items()}
        if origin is tuple and isinstance(value, (list, tuple)):
            with suppress(UserError):  # would be about one item
                return tuple(convert(item, get_args(option)[0], name) for item in value)
    wanted = " or ".join(_in_words(option) for option in options if option is not type(None))
    raise UserError(f"{name} must be {wanted}, got {in_short(value)}")


def read_path(value: Any, name: str) -> str | None:
    """Reads a setting that is a path or None, for metadata read=; see `expand_path`."""
    path = convert(value, str | None, name)
    return None if path is None else expand_path(path)


def plain_value(value: Any) -> Any:
    """Converts a setting for YAML and JSON."""
    if is_dataclass(value) and not isinstance(value, type) and type(value).__str__ is object.__str__:
        return {f.name: plain_value(getattr(value, f.name)) for f in fields(value) if f.repr}
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return type(value).__name__ if type(value).__str__ is object.__str__ else str(value)  # without its memory address


def _in_words(option: Any) -> str:
    origin = get_origin(option)
    if origin is tuple:
        return f"a list of {get_args(option)[0].__name__}"
    if origin is Literal:
        return " or ".join(map(repr, get_args(option)))
    if origin is Mapping:
        return "a mapping"
    if is_dataclass(option) and isinstance(option, type):
        return f"a mapping of {', '.join(setting_names(option))}"
    return getattr(option, "__name__", str(option))


def require_choice(key: str, value: object, choices: tuple[str, ...], section: str = "") -> None:
    """Raises SettingError unless the value is one of the choices; `section` precedes the key in the message."""
    if value not in choices:
        raise SettingError(f"unknown {section}{key} {in_short(value)}; use one of {', '.join(choices)}", (key,))


def require_known(key: object, known: Collection[str], where: str, elsewhere: Mapping[str, str] | None = None) -> None:
    """Raises SettingError for an unknown key in `where` (or ""); `elsewhere` maps keys to their parent key."""
    if key not in known:
        hint = did_you_mean(key, known) or f"; known keys: {', '.join(known)}"
        if elsewhere and str(key) in elsewhere:
            hint = f"; it belongs under {elsewhere[str(key)]!r}"
        raise SettingError(f"unknown key {in_short(key)}{f' in {where}' if where else ''}{hint}", (str(key),))
