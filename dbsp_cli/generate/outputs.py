"""The videos that are asked for: prompts and seeds, each with a file of its own."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbsp_core.utils.errors import UserError, in_short
from dbsp_core.utils.files import expand_path, read_text, require_file, user_path

_MOST_VIDEOS = 100_000


@dataclass(frozen=True)
class Output:
    """One video to make."""

    prompt: str
    seed: int
    path: Path


def prompts_of(option: str | None) -> tuple[str, ...]:
    """Returns the prompts of an option: a text, or the lines of "@FILE" that are not blank."""
    if option is None:
        return ()
    if not option.startswith("@"):
        return (in_utf8(option, "--prompt"),)
    with _blame_option("--prompt"):
        file = user_path(option[1:])
    require_file(file, "--prompt: file", "give a text, or @FILE with one prompt a line")
    try:
        # not splitlines, which also ends lines at U+2028, U+0085 and \v, as prompts may have them
        lines = tuple(line.strip() for line in re.split(r"\r\n|\n|\r", read_text(file)) if line.strip())
    except UnicodeError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--prompt: {file} is not text in UTF-8") from error
    if not lines:
        raise UserError(f"--prompt: {file} has no prompts; write one a line")
    return lines


def in_utf8(text: str, option: str) -> str:
    """Returns an option's text, read as UTF-8 where the locale's encoding could not read it."""
    try:
        return os.fsencode(text).decode() if any("\udc80" <= letter <= "\udcff" for letter in text) else text
    except UnicodeError:
        raise UserError(f"{option} {in_short(text)} is not text in UTF-8; set a locale that can read it") from None


def outputs_of(pattern: str, prompts: Sequence[str], first_seed: int, videos: int) -> tuple[Output, ...]:
    """Returns the videos of every prompt and seed, each with a file of its own.

    Args:
        pattern: Files to write, with fields in braces.
        videos: Number of videos for each prompt.
    """
    count = len(prompts) * videos
    if not 0 < videos <= _MOST_VIDEOS or count > _MOST_VIDEOS:
        raise UserError(f"--videos {videos} must be at least 1, and all videos at most {_MOST_VIDEOS:,}")
    outputs: dict[Path, Output] = {}
    for prompt in prompts:
        for number in range(videos):
            seed = first_seed + number
            path = Path(_named(pattern, index=len(outputs), seed=seed)).absolute()
            if path.suffix != ".mp4":
                raise UserError(f"--out {pattern} must end in .mp4")
            if path in outputs:
                raise UserError(
                    f"--out {pattern} names one file for several of {count} videos; put {{index}} in the name, "
                    "for example video-{index:03}.mp4"
                )
            outputs[path] = Output(prompt, seed, path)
    return tuple(outputs.values())


def _named(pattern: str, **fields: Any) -> str:
    """Returns a pattern's path with the fields filled in. Raises UserError for a pattern with others."""
    try:
        unknown = {name for _, name, _, _ in string.Formatter().parse(pattern)} - {None, *fields}
        path = pattern.format(**fields) if not unknown else None
    except (ValueError, KeyError, IndexError, AttributeError):
        path = None
    if path is None:
        names = "}, {".join(fields)
        raise UserError(f"--out {pattern}: use the fields {{{names}}}, or double the braces of a name")
    with _blame_option("--out"):
        return expand_path(path)


@contextmanager
def _blame_option(option: str) -> Iterator[None]:
    """Names an option in a UserError inside."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{option}: {error}") from error


def replaced_message(outputs: Sequence[Output]) -> str | None:
    """Returns the warning about files that the videos replace, or None."""
    there = [output.path for output in outputs if output.path.exists()]
    if not there:
        return None
    more = f" and {len(there) - 1} more" if there[1:] else ""
    are = "exist and are" if more else "exists and is"
    return f"--out {there[0]}{more} {are} replaced when the video is complete; give another --out, or --resume to skip"
