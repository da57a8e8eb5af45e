"""Inputs of every kind, each drawn from a random generator: what is tried, and how."""

from __future__ import annotations

import random
from collections.abc import Callable
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
from scripts.checks.stress.fuzz.mutations import (
    WORDS,
    mutated_bytes,
    mutated_json,
    mutated_safetensors,
    mutated_text,
    mutated_tree,
    mutated_words,
)
from scripts.checks.stress.fuzz.originals import Originals
from scripts.reproduce.knapformer.drawing import parse_streams

SIZES = "thw=3,4,8 block_q=16 block_k=16"


@dataclass(frozen=True)
class Trial:
    """One input. what: in words;  call: a function to call, or the words after `dbsp`"""

    what: str
    call: Callable[[], object] | list[str]


def draw_trial(rng: random.Random, originals: Originals, folder: Path) -> Trial:
    """Writes what it needs to `folder`, which is the working directory. Readers are called for themselves more often
    than commands, which take longer."""
    kind = rng.choices([*KINDS], [weight for weight, _ in KINDS.values()])[0]
    return KINDS[kind][1](rng, originals, folder)


def _yaml(rng: random.Random, text: str) -> str:
    import yaml

    if rng.random() < 0.5:
        return mutated_text(rng, text)
    return str(yaml.safe_dump(mutated_tree(rng, yaml.safe_load(text))))


def _write(path: Path, content: str | bytes) -> None:
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)


def _config(rng: random.Random, originals: Originals, folder: Path) -> Trial:
    _write(folder / "config.yaml", text := _yaml(rng, rng.choice(originals.configs)))
    return Trial(f"configuration {text!r}", lambda: DbspConfig.load("config.yaml"))


def _hardware(rng: random.Random, originals: Originals, folder: Path) -> Trial:
    _write(folder / "hardware.yaml", text := _yaml(rng, rng.choice(originals.hardware)))
    return Trial(f"hardware {text!r}", lambda: load_hardware("hardware.yaml"))


STRINGS: tuple[tuple[Callable[[str], object], str], ...] = (
    (parse_size, "8GiB"),
    (parse_thw, "21,45,80"),
    (parse_layers, "0,5,10-12"),
    (StepGroups.parse, "5-9,10-24,25-49"),
    (StepGroups.parse, "0-9,10-"),
    (Strategy.parse, "U4R2"),
    (lambda text: BagTopology.parse(text, 8), "g1n2+g2n1+g4n1"),
    (parse_streams, "g24b4i512,g8b1i512f85s1"),
    (mask_settings, "window:window=[5,9,9],block_q=32"),
    (DbspConfig.load, "sparge:cdf=0.92"),
    (DbspConfig.load, "window:tile=[3,5,8],window=[3,3,3]"),
    (DbspConfig.load, "synthetic:preset=wan2.1-t2v-14b,density=0.2"),
    (DbspConfig.load, "radial:width=0.5,decay=0.5"),
    (DbspConfig.load, "svg:frames=7,temporal_heads=[1,2]"),
)


def _string(rng: random.Random, originals: Originals, folder: Path) -> Trial:
    read, text = rng.choice(STRINGS)
    text = rng.choice(WORDS) if rng.random() < 0.1 else mutated_text(rng, text)
    return Trial(f"{text!r} for {read.__qualname__}", lambda: read(text))


def _mask_file(rng: random.Random, originals: Originals, folder: Path) -> Trial:
    _write(folder / "masks.safetensors", mutated_safetensors(rng, rng.choice(originals.masks)))

    def read() -> None:
        file = MaskFile("masks.safetensors")
        for layer in range(min(file.layers, 3)):
            file.layer(layer).density  # noqa: B018

    return Trial("a mask file", read)


def _mask_command(rng: random.Random, originals: Originals, folder: Path) -> Trial:
    _write(folder / "masks.safetensors", mutated_safetensors(rng, rng.choice(originals.masks)))
    command = rng.choice(["plan masks.safetensors --gpus 4", "masks info masks.safetensors --gpus 2 --json"])
    return Trial(f"a mask file for dbsp {command}", command.split())


def _recording(rng: random.Random, originals: Originals, folder: Path) -> Trial:
    (folder / "recording").mkdir(exist_ok=True)
    broken = "index.json" if rng.random() < 0.7 else rng.choice(list(originals.recording))
    for name, content in originals.recording.items():
        if name == broken:
            json = name.endswith(".json")
            content = mutated_json(rng, content.decode()) if json else mutated_safetensors(rng, content)
        _write(folder / "recording" / name, content)
    command = rng.choice(["masks info recording --gpus 2", "masks convert recording out.safetensors step=1"])
    return Trial(f"a recording with another {broken} for dbsp {command}", command.split())


def _foreign(rng: random.Random, originals: Originals, folder: Path) -> Trial:
    suffix, content = rng.choice(originals.foreign)
    _write(folder / f"foreign{suffix}", mutated_bytes(rng, content))
    more = rng.choice(["", "lut=absolute", "lut=delta counts=counts", "crop=true", "steps=20", "key=mask"])
    command = f"masks convert foreign{suffix} out.safetensors {SIZES} {more}"
    return Trial(f"a foreign file for dbsp {command}", command.split())


def _report(rng: random.Random, originals: Originals, folder: Path) -> Trial:
    _write(folder / "report.json", text := mutated_json(rng, originals.report))
    _write(folder / "sound.json", originals.report)
    command = rng.choice(
        ["report.json", "report.json --json", "sound.json report.json", "report.json --html out.html"]
    )
    return Trial(f"{command} with {text[:1500]!r}", ["report", *command.split()])


_FIT = "masks fit fitted moments --rank 2"


def _fitted(rng: random.Random, originals: Originals, folder: Path) -> Trial:
    if rng.random() < 0.5:
        _write(folder / "fitted", mutated_safetensors(rng, originals.fitted))
        return Trial("a file of fitted projections", lambda: LowRankProjections.load("fitted"))
    _write(folder / "moments", mutated_safetensors(rng, originals.moments))
    return Trial("recorded queries and keys for dbsp masks fit", _FIT.split())


def _model(rng: random.Random, originals: Originals, folder: Path) -> Trial:
    index, transformer = rng.choice(originals.models)
    if rng.random() < 0.5:
        index = mutated_json(rng, index)
    else:
        transformer = mutated_json(rng, transformer)
    (folder / "model" / "transformer").mkdir(parents=True)
    _write(folder / "model" / "model_index.json", index)
    _write(folder / "model" / "transformer" / "config.json", transformer)

    def read() -> None:
        signature = signature_of_model("model")
        default_config(signature)
        require_same_model(DbspConfig.load("tiny-wan"), signature)

    return Trial(f"a model with {index[:700]!r} and {transformer[:700]!r}", read)


COMMANDS = (
    "plan masks.safetensors --gpus 4 --strategy U2R2 --planner dbsp --keys needed",
    "plan masks.safetensors --gpus 4 --strategy all --planner all --json",
    "masks info masks.safetensors --gpus 2",
    "masks info masks.safetensors --gpus 2 --quality --json",
    f"masks convert foreign.pt out.safetensors key=sparse {SIZES} orders=hwt,thw text_tokens=0 groups=0-4",
    f"masks convert foreign.npz out.safetensors key=mask {SIZES} tail_dense=true joined_text=true crop=true",
    "masks convert recording out.safetensors step=1 branch=0",
    "masks fit out.safetensors recording --rank 4",
    "report report.json report.json --json --html out.html",
    "masks --help",
)


def _command(rng: random.Random, originals: Originals, folder: Path) -> Trial:
    _write(folder / "masks.safetensors", originals.masks[0])
    for suffix, content in originals.foreign:
        _write(folder / f"foreign{suffix}", content)
    (folder / "recording").mkdir(exist_ok=True)
    for name, content in originals.recording.items():
        _write(folder / "recording" / name, content)
    _write(folder / "report.json", originals.report)
    words = mutated_words(rng, rng.choice(COMMANDS).split())
    return Trial(f"dbsp {words}"[:1500], words)


KINDS: dict[str, tuple[float, Callable[[random.Random, Originals, Path], Trial]]] = {
    "string": (30, _string),
    "configuration": (20, _config),
    "hardware": (5, _hardware),
    "mask file": (15, _mask_file),
    "mask file to a command": (3, _mask_command),
    "recording": (6, _recording),
    "foreign file": (8, _foreign),
    "report": (8, _report),
    "command": (5, _command),
    "model": (3, _model),
    "fitted file": (3, _fitted),
}
"""By name, how often, and how one is drawn."""
