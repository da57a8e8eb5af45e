"""Unions of a window and predicted blocks, beside `sparge` of the same density, on recorded queries and keys.

The queries and keys are those of one denoising step of the small trained model under dense attention. Of each mask:
its density, how much of the attention is in its blocks, and ρ_s of plain Ulysses and Ring and of planner `dbsp`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dbsp_core import BlockMask, make_plan
from dbsp_core.config.config import DbspConfig
from dbsp_core.sources import LocalQK, MaskRequest, NablaSource, SpargeSource, UnionSource, WindowSource
from dbsp_core.sources.base import DynamicMaskSource
from dbsp_core.sources.lowrank import predicted_mass
from scripts.results.result import FOLDER, write_csv
from scripts.training.trained_model.prediction import BLOCK, Kept
from scripts.training.trained_model.small_model import FRAMES, HEIGHT, PROMPTS, WIDTH, load_pipeline
from tests.support.single_process import attach_single_process

STRATEGIES = ("U4R1", "U1R4")
SIZES = {"block_q": BLOCK, "block_k": BLOCK}
NEAR = WindowSource(**SIZES, window=(1, 3, 5))
UNIONS: dict[str, DynamicMaskSource] = {
    **{
        f"window 1×3×5 + sparge cdf {cdf}": UnionSource((NEAR, SpargeSource(**SIZES, cdf=cdf, similarity=-1.0)))
        for cdf in (0.3, 0.6, 0.85)
    },
    **{f"nabla cdf {cdf}, window 3×3×3": NablaSource(**SIZES, cdf=cdf, window=(3, 3, 3)) for cdf in (0.3, 0.6)},
}


@dataclass(frozen=True)
class Row:
    """Means over layers. held: attention in its blocks;  before, after: ρ_s of the contiguous plan and of `dbsp`"""

    mask: str
    density: float
    held: float
    before_u4r1: float
    after_u4r1: float
    before_u1r4: float
    after_u1r4: float
    label: str = "masks predicted from a trained model's queries and keys; ρ_s counted"


def record(steps: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor, float]], tuple[int, int, int]]:
    """Queries, keys and scale of each layer at the last of `steps` steps, and the video's token grid."""
    pipeline, kept = load_pipeline(), Kept((steps - 1,))
    attached = attach_single_process(pipeline.transformer, DbspConfig(mask=kept))
    size = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES, "num_inference_steps": steps}
    draws = torch.Generator().manual_seed(0)
    pipeline(prompt=PROMPTS[0], negative_prompt="", **size, guidance_scale=3.0, generator=draws, output_type="latent")
    attached.detach()
    patch = pipeline.transformer.config.patch_size
    scale = (pipeline.vae_scale_factor_temporal, pipeline.vae_scale_factor_spatial, pipeline.vae_scale_factor_spatial)
    latent = ((FRAMES - 1) // scale[0] + 1, HEIGHT // scale[1], WIDTH // scale[2])
    t, h, w = (size // each for size, each in zip(latent, patch, strict=True))
    return [kept.tensors[key] for key in sorted(kept.tensors)], (t, h, w)


def at_density(wanted: float, request: MaskRequest, tokens: LocalQK) -> BlockMask:
    """The mask of `sparge` whose density is nearest, by halving its cdf."""
    low, high, found = 0.0, 1.0, None
    for _ in range(14):
        middle = (low + high) / 2
        found = SpargeSource(**SIZES, cdf=middle, similarity=-1.0).mask(request, tokens)
        low, high = (middle, high) if found.density < wanted else (low, middle)
    assert found is not None
    return found


def held(mask: BlockMask, mass: dict[str, torch.Tensor]) -> float:
    """Share of the attention that is in the mask's blocks, mean over heads and rows of blocks."""
    return float((mass[str(mask.grid.orders[0])] * mask.bits).sum(-1).mean())


def measure(steps: int) -> Iterator[Row]:
    layers, thw = record(steps)
    sums: dict[str, list[list[float]]] = {}
    for number, (q, k, scale) in enumerate(layers):
        request, tokens = MaskRequest(number, len(q), thw), LocalQK.alone(q[None], k[None], scale)
        mass = {}
        for name, source in UNIONS.items():
            mask = source.mask(request, tokens)
            for kind, one in (
                (name, mask),
                (f"sparge, as dense as {name}", at_density(mask.density, request, tokens)),
            ):
                order = str(one.grid.orders[0])
                if order not in mass:
                    place = torch.from_numpy(one.grid.token_permutation(order))
                    heads = zip(q[:, place], k[:, place], strict=True)
                    found = [predicted_mass(*head, one.grid, scale, every_query=True) for head in heads]
                    mass[order] = torch.stack(found)
                plans = [make_plan(one, strategy) for strategy in STRATEGIES]
                ratios = [ratio for plan in plans for ratio in (plan.metrics.rho_before, plan.metrics.rho)]
                sums.setdefault(kind, []).append([one.density, held(one, mass), *ratios])
    for kind, values in sums.items():
        yield Row(kind, *map(float, np.mean(values, axis=0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="denoising steps; the last one's are recorded")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV")
    options = parser.parse_args()
    for record in write_csv("union", list(measure(options.steps)), options.out):
        print(*record.values(), sep="  ")


if __name__ == "__main__":
    main()
