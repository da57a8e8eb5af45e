"""Reads masks recorded by `dbsp_core.reports.mask_recorder`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.mask_file import MaskFile
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.reports.mask_recorder import INDEX
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import read_text


@dataclass(frozen=True)
class Recording:
    """The recording in a folder; of several generations, the last one with the most passes."""

    folder: Path
    passes: Mapping[DenoisingStep, Mapping[int, str]]  # mask file of each recorded layer, by step
    layers: int  # number of the model's layers
    stopped: str | None  # reason why it ended early

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Recording:
        """Reads the index. Raises UserError for a folder without a recording."""
        folder = Path(folder)
        inside = [] if (folder / INDEX).exists() else sorted(folder.glob(f"transformer*/{INDEX}"))
        if inside:
            names = " or ".join(str(index.parent) for index in inside)
            raise UserError(f"{folder} has recordings of several transformers; choose one of {names}")
        try:
            content = json.loads(read_text(folder / INDEX))
            if (layers := int(content["layers"])) < 1:
                raise ValueError(f"of a model with {layers} layers")
            return cls(folder, _longest(content["passes"]), layers, content["stopped"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            reason = f"no {INDEX}" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
            raise UserError(
                f"{folder} is not a recording of masks ({reason}); make one with DBSP_RECORD=OUT in the environment "
                "of a run"
            ) from error

    @property
    def recorded_layers(self) -> tuple[int, ...]:
        """The layers recorded in every pass."""
        common = set.intersection(*(set(layers) for layers in self.passes.values())) if self.passes else set()
        return tuple(sorted(common))

    def mask(self, layer: int, moment: DenoisingStep) -> BlockMask:
        """Reads the mask of one attention. Raises UserError if it was not recorded or cannot be read."""
        name = self.passes.get(moment, {}).get(layer)
        if name is None:
            steps = sorted({at.step for at in self.passes})
            raise UserError(
                f"{self.folder} has no mask of layer {layer} at step {moment.step}, branch {moment.cfg_branch}; it "
                f"has layers {list(self.recorded_layers)}, steps {steps}"
            )
        try:
            return MaskFile(self.folder / f"{Path(name).name}.safetensors").layer(0)
        except UserError as error:
            raise UserError(f"the recording {self.folder} is damaged: {error}") from error


def _longest(passes: list[dict[str, Any]]) -> dict[DenoisingStep, dict[int, str]]:
    """Returns the passes of the last generation among those with the most passes."""
    generations: dict[int, dict[DenoisingStep, dict[int, str]]] = {}
    for recorded in passes:
        moment = DenoisingStep(int(recorded["step"]), int(recorded["cfg_branch"]))
        masks = {int(layer): str(name) for layer, name in recorded["masks"].items()}
        generations.setdefault(int(recorded["generation"]), {})[moment] = masks
    most = max((len(each) for each in generations.values()), default=0)
    return next((each for each in reversed(list(generations.values())) if len(each) == most), {})
