"""Inputs of every kind, each drawn from a random generator: what is tried, and how."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dbsp_cli.mask_tools.convert import parse_thw
from dbsp_core import Strategy
from dbsp_core.config import DbspConfig, default_config, require_same_model
from dbsp_core.cost.machine import load_hardware
from dbsp_core.masks.mask_file import MaskFile
from dbsp_core.masks.steps import StepGroups
from dbsp_core.models.table import signature_of_model
from dbsp_core.planning.bags import BagTopology
from dbsp_core.reports.mask_recorder import parse_layers
from dbsp_core.sources.lowrank import LowRankProjections
from dbsp_core.sources.spec import mask_settings
from dbsp_core.utils.files import parse_size
from scripts.checks.stress.fuzz.mutations import damaged_file, damaged_text, damaged_words
from scripts.reproduce.knapformer.drawing import parse_streams

REPO = Path(__file__).resolve().parents[4]
Call = Callable[[str], object] | str
"""A reader of a text or path, or the words after `dbsp`, with {} for the path."""


@dataclass(frozen=True)
class Trial:
    """One input. what: in words;  call: a function to call, or the words after `dbsp`"""

    what: str
    call: Callable[[], object] | list[str]


def _read_masks(path: str) -> None:
    file = MaskFile(path)
    for layer in range(min(file.layers, 3)):
        file.layer(layer).density  # noqa: B018


def _read_model(path: str) -> None:
    signature = signature_of_model(str(Path(*Path(path).parts[:2])))
    default_config(signature)
    require_same_model(DbspConfig.load("tiny-wan"), signature)


def _bags(text: str) -> BagTopology:
    return BagTopology.parse(text, 8)


SIZES = "thw=3,4,8 block_q=16 block_k=16"
CONVERT = f"masks convert {{}} out.safetensors {SIZES}"
OF_RECORDING = ("masks info recording --gpus 2", "masks convert recording out.safetensors step=1")
FILES: dict[str, tuple[float, Sequence[Call]]] = {
    "configs/*.yaml": (20, [DbspConfig.load]),
    "configs/hardware/*.yaml": (5, [load_hardware]),
    "masks/*": (18, [*[_read_masks] * 10, "plan {} --gpus 4", "masks info {} --gpus 2 --json"]),
    "recording/index.json": (4, OF_RECORDING),
    "recording/*.safetensors": (2, OF_RECORDING),
    "foreign/*": (8, [f"{CONVERT} {more}" for more in ("", "lut=absolute", "lut=delta counts=counts", "key=mask")]),
    "report.json": (8, [f"report {words}" for words in ("{}", "{} --json", "{} {}", "{} --html out.html")]),
    "models/*/**/*.json": (3, [_read_model]),
    "fitted.safetensors": (2, [LowRankProjections.load]),
    "moments.safetensors": (1, ["masks fit out.safetensors {} --rank 2"]),
}
"""By pattern of the file that is damaged: how often, and what reads it. Readers are called for themselves more often
than commands, which take longer."""
STRINGS: tuple[tuple[Callable[[str], object], str], ...] = (
    (parse_size, "8GiB"),
    (parse_thw, "21,45,80"),
    (parse_layers, "0,5,10-12"),
    (StepGroups.parse, "5-9,10-24,25-49"),
    (StepGroups.parse, "0-9,10-"),
    (Strategy.parse, "U4R2"),
    (_bags, "g1n2+g2n1+g4n1"),
    (parse_streams, "g24b4i512,g8b1i512f85s1"),
    (mask_settings, "window:window=[5,9,9],block_q=32"),
    (DbspConfig.load, "sparge:cdf=0.92"),
    (DbspConfig.load, "window:tile=[3,5,8],window=[3,3,3]"),
    (DbspConfig.load, "synthetic:preset=wan2.1-t2v-14b,density=0.2"),
    (DbspConfig.load, "radial:width=0.5,decay=0.5"),
    (DbspConfig.load, "svg:frames=7,temporal_heads=[1,2]"),
)
COMMANDS = (
    "plan masks/one-True.safetensors --gpus 4 --strategy U2R2 --planner dbsp --keys needed",
    "plan masks/one-False.safetensors --gpus 4 --strategy all --planner all --json",
    "masks info masks/grouped-True.safetensors --gpus 2",
    "masks info masks/one-True.safetensors --gpus 2 --json",
    f"masks convert foreign/sparse.pt out.safetensors key=sparse {SIZES} orders=hwt,thw text_tokens=0 groups=0-4",
    f"masks convert foreign/arrays.npz out.safetensors key=mask {SIZES} tail_dense=true joined_text=true crop=true",
    "masks convert recording out.safetensors step=1 branch=0",
    "masks fit out.safetensors recording --rank 4",
    "report report.json report.json --json --html out.html",
    "masks --help",
)
STRINGS_WEIGHT, COMMANDS_WEIGHT = 30, 5


def draw_trial(rng: random.Random, originals: Path, folder: Path) -> Trial:
    """Empties `folder`, and damages a string, a file in it, or the words of a command that reads sound files there."""
    weights = [STRINGS_WEIGHT, COMMANDS_WEIGHT, *(weight for weight, _ in FILES.values())]
    (kind,) = rng.choices(["string", "command", *FILES], weights)
    shutil.rmtree(folder, ignore_errors=True)
    if kind == "string" or kind.startswith("configs"):
        folder.mkdir()
    else:
        shutil.copytree(originals, folder)
    if kind == "string":
        read, text = rng.choice(STRINGS)
        text = damaged_text(rng, text)
        return Trial(f"{text!r} for {read.__qualname__}", lambda: read(text))
    if kind == "command":
        words = [word.replace("\x00", "") for word in damaged_words(rng, rng.choice(COMMANDS).split())]
        return Trial(f"dbsp {words}"[:1500], words)  # without null characters, which no command line can hold
    return _damaged_file_trial(rng, kind, folder)


def _damaged_file_trial(rng: random.Random, pattern: str, folder: Path) -> Trial:
    sound = rng.choice(sorted((REPO if pattern.startswith("configs") else folder).glob(pattern)))
    path = "damaged.yaml" if pattern.startswith("configs") else str(sound.relative_to(folder))
    content = damaged_file(rng, sound)
    (folder / path).write_bytes(content)
    call = rng.choice(FILES[pattern][1])
    if isinstance(call, str):
        return Trial(f"dbsp {call} of {path}: {content[:1500]!r}", [word.format(path) for word in call.split()])
    return Trial(f"{call.__qualname__} of {path}: {content[:1500]!r}", lambda: call(path))
