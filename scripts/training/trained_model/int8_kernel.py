"""Cost of kernel `triton-int8` in accuracy: errors of single attentions on activations of the small trained model.

Queries and keys are rounded as the kernel rounds them (tests compare the kernel with the same function), with keys as
they are, or less their mean as `precision: int8` sends them; dense attention, blocks of 64 keys. Also attention of
bfloat16 inputs, and synthetic keys with a large common part in a few channels, which trained models are known for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention

import dbsp_diffusers
from dbsp_core.runtime import session as sessions
from dbsp_core.runtime.prepared import PreparedAttention
from scripts.bench.rounding_error import drawn
from scripts.results.result import FOLDER, write_csv
from scripts.training.trained_model.small_model import MEASURED_HERE, PROMPTS, generate, load_pipeline
from tests.kernels.packed_inputs import int8_and_back

BLOCK = 64


@dataclass(frozen=True)
class Row:
    """Relative errors ‖out − exact‖ / ‖exact‖ of `attentions` dense attentions, mean and largest.

    tokens: that were rounded; keys: as they are, or less their mean
    """

    tokens: str
    inputs: str
    keys: str
    attentions: int
    mean_error: str
    worst_error: str
    label: str


def errors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[tuple[str, str], float]:
    """By inputs and keys: the relative error of attention of q, k and v [B, H, n, D]."""
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double())

    def error(*rounded: torch.Tensor) -> float:
        return float((scaled_dot_product_attention(*(one.double() for one in rounded)) - exact).norm() / exact.norm())

    return {
        ("int8", "as they are"): error(int8_and_back(q, (3,)), _blocks_and_back(k), v),
        ("int8", "less their mean"): error(int8_and_back(q, (3,)), _blocks_and_back(k - k.mean(2, keepdim=True)), v),
        ("bfloat16", "as they are"): error(q.bfloat16(), k.bfloat16(), v.bfloat16()),
    }


def _blocks_and_back(k: torch.Tensor) -> torch.Tensor:
    return torch.cat([int8_and_back(block, (2, 3)) for block in k.split(BLOCK, dim=2)], dim=2)


def of_trained_model(options: argparse.Namespace) -> Iterator[dict[tuple[str, str], float]]:
    """Yields the errors of each attention of dense videos."""
    pipeline, attend, found = load_pipeline(), sessions.attend, []

    def watched(executor: PreparedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> Any:
        found.append(errors(q.float(), k.float(), v.float()))
        return attend(executor, q, k, v, *more)

    dbsp_diffusers.enable(pipeline.transformer, {"mask": {"source": "dense"}})
    with mock.patch.object(sessions, "attend", watched):
        for prompt in PROMPTS[: options.prompts]:
            generate(pipeline, prompt, 0, options.steps)
    yield from found


def of_synthetic_keys(heads: int = 3, tokens: int = 3072) -> Iterator[dict[tuple[str, str], float]]:
    """Yields the errors of each head, by itself."""
    for head in range(heads):
        yield errors(*(one[None, None] for one in drawn(tokens, head, outliers=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--prompts", type=int, default=3, help="how many of the prompts, with seed 0")
    parser.add_argument("--steps", type=int, default=4, help="denoising steps")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV")
    options = parser.parse_args()
    rows = []
    for tokens, found, label in (
        ("small trained model", list(of_trained_model(options)), MEASURED_HERE),
        ("synthetic, outliers in keys", list(of_synthetic_keys()), "measured on synthetic tokens"),
    ):
        for inputs, keys in found[0]:
            those = [one[inputs, keys] for one in found]
            mean, worst = f"{sum(those) / len(those):.1e}", f"{max(those):.1e}"
            rows.append(Row(tokens, inputs, keys, len(those), mean, worst, label))
            print(f"{tokens}, {inputs}, keys {keys}: mean {mean}, worst {worst}")
    write_csv("int8-kernel", rows, options.out)


if __name__ == "__main__":
    main()
