"""What the workers run: masks by step group with a token order per head, over several denoising steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import dbsp_para
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import apart
from tests.support.single_process import attach_single_process

TIMESTEPS = (900, 900, 600, 600, 300, 300)
"""Three steps of two CFG passes each."""


def run_steps(transformer: Any, model: str, thw: tuple[int, int, int], text_tokens: int) -> list[torch.Tensor]:
    """The transformer's output at each timestep."""
    inputs = tiny_inputs(model, thw)
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, :text_tokens]
    outputs = []
    for timestep in TIMESTEPS:
        inputs["timestep"] = torch.full((1,), timestep)
        outputs.append(transformer(**inputs)[0])
    return outputs


def largest(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[float]:
    return [apart(a, b) for a, b in zip(left, right, strict=True)]


def alone(model: str, thw: tuple[int, int, int], text_tokens: int, mask: dict[str, Any]) -> list[np.ndarray]:
    """The output at each timestep in one process."""
    transformer = make_tiny_transformer(model)
    attach_single_process(transformer, {"mask": mask})
    with torch.no_grad():
        return [out.numpy() for out in run_steps(transformer, model, thw, text_tokens)]


def run_paro_case(
    rank: int,
    world: int,
    model: str,
    thw: tuple[int, int, int],
    text_tokens: int,
    config: dict[str, Any],
    expected: list[list[np.ndarray]],
) -> list[list[float]]:
    """Per pass, the largest difference in parallel from each of these outputs of one process."""
    with torch.no_grad():
        transformer = make_tiny_transformer(model)
        dbsp_para.parallelize_transformer(transformer, config=config)
        out = run_steps(transformer, model, thw, text_tokens)
    return [largest(out, [torch.from_numpy(one) for one in single]) for single in expected]


def run_bad_file(
    rank: int, world: int, path: str, bad: str | None, culprit: int | None, mask: dict[str, Any], **steps: Any
) -> None:
    """A run whose mask file is at `path`, and at `bad` on the culprit."""
    mine = bad if bad is not None and rank == culprit else path
    transformer = make_tiny_transformer("wan")
    with torch.no_grad():
        dbsp_para.parallelize_transformer(transformer, config={"mask": {**mask, "path": mine}})
        run_steps(transformer, "wan", (3, 5, 7), 7)


def run_recorded(
    rank: int, world: int, folder: str, config: dict[str, Any], environment: dict[str, str]
) -> list[float]:
    """Per pass, the largest difference that recording makes."""
    with torch.no_grad():
        outputs = []
        for variables in ({}, {**environment, "DBSP_RECORD": folder}):
            transformer = make_tiny_transformer("wan")
            with mock.patch.dict(os.environ, variables):
                dbsp_para.parallelize_transformer(transformer, config=config)
                outputs.append(run_steps(transformer, "wan", (3, 5, 7), 7))
    return largest(*outputs)


def files_of(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
