"""LoRA weights of `--lora`: the transformer that they are for, and whether they fit it, before weights are loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dbsp_cli.tiny_models import MAKERS, trained_weights
from dbsp_core.models.signature import ModelSignature
from dbsp_core.models.table import model_title, tiny_architecture
from dbsp_core.utils.errors import UserError, cut_short, did_you_mean
from dbsp_core.utils.files import expand_path, require_file

if TYPE_CHECKING:
    from torch import nn

TRANSFORMERS = ("transformer", "transformer_2")
_TARGET = re.compile(rf"(.+):({'|'.join(TRANSFORMERS)})(?:=(.*))?")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_KEY = re.compile(r"transformer\.(.+)\.(lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)(?:\.\w+)?\.weight")
_ADVICE = "give a file, a folder or a repository of LoRA weights"


@dataclass(frozen=True)
class Lora:
    """LoRA weights for one transformer.

    Attributes:
        source: File, folder or repository.
        target: Name of the transformer in the pipeline; None for a pipeline's only one.
    """

    source: str
    weight: float = 1.0
    target: str | None = None

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Reads "SOURCE", "SOURCE=WEIGHT" or "SOURCE:TRANSFORMER=WEIGHT". Raises UserError for anything else."""
        named = None if os.path.exists(text) else _TARGET.fullmatch(text)
        if named is not None:
            weight = 1.0 if named[3] is None else _number(named[3], text)
            return cls(_expanded(named[1], text), weight, named[2])
        source, weight = split_number(text, "--lora", 1.0)
        before, colon, after = source.rpartition(":")
        if colon and not os.path.exists(source) and os.path.exists(before):
            known = ", ".join(TRANSFORMERS)
            raise UserError(f"--lora {text}: {after!r} is not one of {known}{did_you_mean(after, TRANSFORMERS)}")
        return cls(_expanded(source, text), weight)

    def within(self, identity: ModelSignature) -> Lora:
        """Returns the weights with the name of their transformer. Raises UserError where it is not clear which."""
        two, title = identity.variant == "two", model_title(identity)
        if two and self.target is None:
            raise UserError(
                f"--lora {self.source}: {title} has two transformers; name the one that it is for, "
                f"--lora {self.source}:transformer (first steps, much noise) or --lora {self.source}:transformer_2, "
                "or give both"
            )
        if not two and self.target == "transformer_2":
            raise UserError(f"--lora {self.source}: {title} has one transformer; leave out :transformer_2")
        return replace(self, target=self.target or "transformer")


def split_number(text: str, option: str, usual: float) -> tuple[str, float]:
    """Returns the name and the number of "NAME=NUMBER", the usual number of "NAME" or of a path with "=" in it."""
    name, equals, number = text.rpartition("=")
    if not equals or os.path.exists(text):
        return text, usual
    return name, _number(number, text, option)


def _number(number: str, text: str, option: str = "--lora") -> float:
    try:
        return float(number)
    except ValueError:
        raise UserError(f"{option} {text}: {number!r} is not a number") from None


def _expanded(source: str, text: str) -> str:
    try:
        return expand_path(source)
    except UserError as error:
        raise UserError(f"--lora {text}: {error}") from error


def require_fitting(loras: Sequence[Lora], model: str, identity: ModelSignature) -> list[str]:
    """Checks LoRA weights against the model's transformers without their weights; returns warnings.

    Args:
        loras: Each with the name of its transformer.
        model: What ranks load: folder or repository, or the name of a tiny checkpoint.

    Raises:
        UserError: Weights are not there, cannot be read, or are of another model.
    """
    if not loras:
        return []
    import diffusers

    pipeline = getattr(diffusers, identity.pipeline)
    transformers = {str(lora.target): _without_weights(model, str(lora.target)) for lora in loras}
    warnings = []
    for lora in loras:
        weights, transformer = _read(lora, pipeline), transformers[str(lora.target)]
        if not any(key.startswith("transformer.") for key in weights):
            raise UserError(
                f"--lora {lora.source}: none of its {len(weights)} weights is of a transformer "
                f"({_first(weights)}); expected names such as transformer.blocks.0.attn1.to_q.lora_A.weight, as "
                "pipe.save_lora_weights writes them"
            )
        if transformer is not None:
            warnings += _unknown_modules(lora, weights, transformer)
    return list(dict.fromkeys(warnings))


def _without_weights(model: str, name: str) -> nn.Module | None:
    """Returns a model's transformer, on the meta device or tiny; None where its configuration is not here."""
    import diffusers

    from dbsp_diffusers.checkpoint import local_checkpoint

    tiny = tiny_architecture(model)
    if tiny is not None and tiny != "wan-trained":
        with torch.random.fork_rng(devices=[]):
            transformer: nn.Module = getattr(MAKERS[tiny](), name)
        return transformer
    checkpoint = local_checkpoint(str(trained_weights()) if tiny else model)
    config = {} if checkpoint is None else checkpoint.config(name)
    if not hasattr(diffusers, str(config.get("_class_name"))):
        return None
    with torch.device("meta"):
        transformer = getattr(diffusers, config["_class_name"]).from_config(config)
    return transformer


def _read(lora: Lora, pipeline: Any) -> dict[str, torch.Tensor]:
    """Reads weights as diffusers does, with its names. Raises UserError where there are none."""
    path = Path(lora.source)
    if path.is_dir():
        for file in sorted(path.glob("*.safetensors")):
            require_file(file, "--lora", _ADVICE)
    elif os.path.lexists(path) or path.suffix in (".safetensors", ".bin") or not _REPOSITORY.fullmatch(lora.source):
        require_file(path, "--lora", _ADVICE)
    try:
        weights: dict[str, torch.Tensor] = pipeline.lora_state_dict(lora.source)
    except Exception as error:  # of whichever library reads it, or answers for the network
        raise UserError(f"--lora {lora.source} cannot be read ({reason(error)}); {_ADVICE}") from error
    if not weights:
        raise UserError(f"--lora {lora.source} has no weights; {_ADVICE}")
    return weights


def _unknown_modules(lora: Lora, weights: Mapping[str, torch.Tensor], transformer: nn.Module) -> list[str]:
    """Returns a warning if the transformer lacks some modules of LoRA weights.

    Raises UserError if it lacks all of them, or has them in other sizes.
    """
    modules = dict(transformer.named_modules())
    shapes: dict[str, dict[str, torch.Size]] = {}
    for key, weight in weights.items():
        if (parts := _KEY.fullmatch(key)) is not None:
            side = "down" if parts[2].endswith(("A", "down")) else "up"
            shapes.setdefault(parts[1], {})[side] = weight.shape
    unknown = [name for name in shapes if not hasattr(modules.get(name), "weight")]
    if unknown and len(unknown) == len(shapes):
        raise UserError(
            f"--lora {lora.source}: its modules ({_first(unknown)}) are not in the model's {lora.target}; give "
            "weights made for this model"
        )
    for name in (name for name in shapes if name not in unknown):
        size, down, up = modules[name].weight.shape, shapes[name].get("down"), shapes[name].get("up")
        fits = down is None or up is None or (down[1:] == size[1:] and (up[0], up[1]) == (size[0], down[0]))
        if not fits:
            raise UserError(
                f"--lora {lora.source}: its weights of {name}, {list(down or ())} and {list(up or ())}, do not fit "
                f"the {list(size)} of the model's {lora.target}; give weights made for this model"
            )
    if not unknown:
        return []
    return [
        f"--lora {lora.source}: the model's {lora.target} lacks {len(unknown)} of its {len(shapes)} modules "
        f"({_first(unknown)}), whose weights have no effect"
    ]


def _first(names: Iterable[str]) -> str:
    """Returns the first of several names for a message."""
    first, *others = names
    return f"{first}, …" if others else first


def load_loras(pipe: Any, loras: Sequence[Lora]) -> None:
    """Loads LoRA weights into a pipeline's transformers. Raises UserError where they cannot be loaded."""
    adapters: dict[str, dict[str, float]] = {}
    for number, lora in enumerate(loras):
        target, adapter = str(lora.target), f"lora_{number}"
        options = {"load_into_transformer_2": True} if target == "transformer_2" else {}
        try:
            pipe.load_lora_weights(lora.source, adapter_name=adapter, **options)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            title = type(pipe).__name__
            raise UserError(f"--lora {lora.source} cannot be loaded into {title} ({reason(error)})") from error
        adapters.setdefault(target, {})[adapter] = lora.weight
    for target, weights in adapters.items():
        getattr(pipe, target).set_adapters(list(weights), list(weights.values()))


def reason(error: Exception) -> str:
    """Returns an error's text in one short line."""
    return cut_short(" ".join(str(error).split())) or type(error).__name__
