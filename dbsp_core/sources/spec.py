"""Spelling of masks in YAML, in Python and on the command line.

A mask is a source's name ("sparge"), a name with settings ("sparge:cdf=0.92,block_q=128", values in YAML), several of
these joined by "+", a mask file's path, a function's name ("my_masks:diagonal"), or a mapping such as {source: sparge,
cdf: 0.92}; in Python also a function or a `MaskSource`.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any, cast

from dbsp_core.sources import SOURCES, CallableSource, MaskSource, UnionSource
from dbsp_core.utils.errors import SettingError, UserError, blame_setting, did_you_mean, in_short
from dbsp_core.utils.schema import build, plain_value
from dbsp_core.utils.yaml_file import parse_value

_LOOKS_LIKE_A_SOURCE = re.compile(r"\w+(:|\+|$)")
_NAME_ENDS = re.compile(r"[:+]")
_BETWEEN_SOURCES = re.compile(r"\+(?=[A-Za-z_]\w*(?:[:+]|$))")
_BETWEEN_KEYS = re.compile(r",(?=\s*[A-Za-z_]\w*\s*=)")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def names_mask(text: str) -> bool:
    """Returns True if text is meant as a mask, even an invalid one, rather than a configuration file."""
    name, meant = _NAME_ENDS.split(text, maxsplit=1)[0], ":" in text
    if text.endswith(".safetensors") or os.path.isfile(os.path.expanduser(text)):
        return text.endswith(".safetensors")
    meant = meant or bool(did_you_mean(name, SOURCES))
    return name in SOURCES or _is_function(text) or bool(meant and _LOOKS_LIKE_A_SOURCE.match(text))


def _is_function(text: str) -> bool:
    """Returns True if text is a function's name, package.module:name, and not a misspelled source."""
    name = text.partition(":")[0]
    return bool(_FUNCTION.fullmatch(text)) and name not in SOURCES and not did_you_mean(name, SOURCES)


def mask_settings(text: str) -> dict[str, Any]:
    """Returns the mapping for a mask written as text; see this module's docstring.

    Raises UserError for other text; the source checks keys and values.
    """
    parts = _BETWEEN_SOURCES.split(text)
    if len(parts) > 1 and _NAME_ENDS.split(text, maxsplit=1)[0] in SOURCES:
        return {"source": "union", "of": [mask_settings(part) for part in parts]}
    name, colon, rest = text.partition(":")
    if name not in SOURCES:
        if _is_function(text) and not os.path.exists(os.path.expanduser(text)):
            return {"source": "callable", "function": text}
        if _LOOKS_LIKE_A_SOURCE.match(text) and not os.path.exists(os.path.expanduser(text)):
            hint = did_you_mean(name, SOURCES) or f"; sources: {', '.join(SOURCES)}"
            raise UserError(f"{in_short(text)} is neither a mask source nor a mask file that exists{hint}")
        return {"source": "file", "path": text}
    settings: dict[str, Any] = {"source": name}
    for part in _BETWEEN_KEYS.split(rest) if colon else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            raise UserError(
                f"{part!r} in {text!r} is not of the form key=value; write NAME:key=value,key=value, for example "
                "window:window=[7,21,33]"
            )
        if key in settings:
            raise UserError(f"{key!r} is given twice in {text!r}; give it once")
        settings[key] = parse_value(value, f"the value of {key!r} in {in_short(text)}")
    return settings


def read_mask(value: Any, name: str) -> MaskSource:
    """Returns the source of a mask in any spelling. Raises UserError, with `name` in the message, for other values."""
    if hasattr(value, "mask"):
        return cast(MaskSource, value)
    if callable(value):
        return CallableSource(function=value)
    if isinstance(value, (str, os.PathLike)):
        value = mask_settings(os.fspath(value))
    if not isinstance(value, Mapping):
        raise UserError(
            f"{name} must be a mask such as sparge, sparge:cdf=0.92 or {{source: sparge, cdf: 0.92}}, "
            f"got {in_short(value)}"
        )
    source, values = value.get("source"), {key: inner for key, inner in value.items() if key != "source"}
    if isinstance(source, str) and source in SOURCES:
        if SOURCES[source] is UnionSource and isinstance(values.get("of"), (list, tuple)):
            with blame_setting("of"):
                values["of"] = [read_mask(mask, f"mask {n} of a union") for n, mask in enumerate(values["of"], 1)]
        return cast(MaskSource, build(SOURCES[source], values, f"mask source {source!r}"))
    known = ", ".join(SOURCES) + did_you_mean(source, SOURCES)
    raise SettingError(f"unknown mask source {in_short(source)}; set mask.source to one of {known}", ("source",))


def mask_values(source: MaskSource) -> dict[str, Any]:
    """Returns a mapping for YAML from which `read_mask` makes an equal source; for a custom source its name."""
    values = {"of": [mask_values(part) for part in source.of]} if isinstance(source, UnionSource) else None
    plain = plain_value(source) if values is None else values
    return {"source": _name_of(source), **(plain if isinstance(plain, dict) else {})}


def mask_in_words(source: MaskSource, defaults: bool = False) -> str:
    """Returns a source with its settings as text, such as "sparge:cdf=0.92"; long values are shortened."""
    if isinstance(source, UnionSource):
        return "+".join(mask_in_words(part, defaults) for part in source.of)
    name = _name_of(source)
    settings: list[Field[Any]] = [field for field in fields(source) if field.init] if is_dataclass(source) else []
    values = ((field, getattr(source, field.name)) for field in settings)
    shown = ((field, value) for field, value in values if value not in (None, {}))
    parts = [f"{field.name}={_shortly(value)}" for field, value in shown if defaults or value != field.default]
    return f"{name}:{','.join(parts)}" if parts else name


def _name_of(source: MaskSource) -> str:
    """Returns the name after `source:`, or a custom class's name."""
    return next((name for name, known in SOURCES.items() if type(source) is known), type(source).__name__)


def _shortly(value: object) -> str:
    return value if isinstance(value, str) else reprlib.repr(list(value) if isinstance(value, tuple) else value)
