"""The videos that are asked for: prompts and seeds, each with a file of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dbsp_core.utils.errors import UserError
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
        return (option,)
    file = user_path(option[1:])
    require_file(file, "--prompt: file", "give a text, or @FILE with one prompt a line")
    try:
        # not splitlines, which also ends lines at U+2028, U+0085 and \v, as prompts may have them
        lines = tuple(line.strip() for line in re.split(r"\r\n|\n|\r", read_text(file)) if line.strip())
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt: {file} is not text in UTF-8") from error
    if not lines:
        raise UserError(f"--prompt: {file} has no prompts; write one a line")
    return lines


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
            try:
                name = pattern.format(index=len(outputs), seed=seed)
            except (ValueError, LookupError, AttributeError):
                raise UserError(
                    f"--out {pattern}: use the fields {{index}}, {{seed}}, or double the braces of a name"
                ) from None
            path = Path(expand_path(name)).absolute()
            if path.suffix != ".mp4":
                raise UserError(f"--out {pattern} must end in .mp4")
            if path in outputs:
                raise UserError(
                    f"--out {pattern} names one file for several of {count} videos; put {{index}} in the name, "
                    "for example video-{index:03}.mp4"
                )
            outputs[path] = Output(prompt, seed, path)
    return tuple(outputs.values())


def replaced_message(outputs: Sequence[Output]) -> str | None:
    """Returns the warning about files that the videos replace, or None."""
    existing = [output.path for output in outputs if output.path.exists()]
    if not existing:
        return None
    more = f" and {len(existing) - 1} more" if existing[1:] else ""
    are = "exist and are" if more else "exists and is"
    return (
        f"--out {existing[0]}{more} {are} replaced when the video is complete; give another --out, or --resume to skip"
    )
