"""The requested videos: prompt, seed and file of each."""

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
    """Returns the prompts of `--prompt`: a text, or the non-blank lines of "@FILE"."""
    if option is None:
        return ()
    if not option.startswith("@"):
        return (option,)
    file = user_path(option[1:])
    require_file(file, "--prompt: file", "give a text, or @FILE with one prompt per line")
    try:
        # not splitlines: it also splits at U+2028, U+0085 and \v, which prompts may contain
        lines = tuple(line.strip() for line in re.split(r"\r\n|\n|\r", read_text(file)) if line.strip())
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt: {file} is not text in UTF-8") from error
    if not lines:
        raise UserError(f"--prompt: {file} has no prompts; write one per line")
    return lines


def outputs_of(pattern: str, prompts: Sequence[str], first_seed: int, videos: int) -> tuple[Output, ...]:
    """Returns `videos` of every prompt, each with a different file: `pattern` with the fields {index} and {seed}."""
    count = len(prompts) * videos
    if not 0 < videos <= _MOST_VIDEOS or count > _MOST_VIDEOS:
        raise UserError(f"--videos {videos} is out of range; use at least 1 a prompt, {_MOST_VIDEOS:,} in all at most")
    outputs: dict[Path, Output] = {}
    for prompt in prompts:
        for number in range(videos):
            seed = first_seed + number
            try:
                name = pattern.format(index=len(outputs), seed=seed)
            except (ValueError, LookupError, AttributeError):
                raise UserError(
                    f"--out {pattern} has an unknown field; use {{index}} or {{seed}}, and double all other braces"
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
    verb = "exist" if more else "exists"
    return f"--out {existing[0]}{more} already {verb} and will be replaced on completion; change --out or add --resume"
