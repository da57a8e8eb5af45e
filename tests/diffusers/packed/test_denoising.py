"""examples/denoise_packed.py: requests denoised together give what the pipeline makes of each."""

from __future__ import annotations

import pytest

from tests.diffusers.packed.denoising_cases import denoised


@pytest.mark.parametrize(
    ("world", "kind", "enabled", "output_type", "bags"),
    [
        (1, "a14b", False, "np", None),
        pytest.param(1, "ti2v", False, "latent", None, marks=pytest.mark.long),
        pytest.param(2, "a14b", True, "latent", "g1n2", marks=pytest.mark.long),
        (2, "ti2v", True, "latent", None),
        pytest.param(4, "ti2v", True, "latent", "g1n2+g2n1", marks=pytest.mark.long),
    ],
)
def test_requests_together_give_what_the_pipeline_gives_for_each(
    pool, folder, world, kind, enabled, output_type, bags
):
    for difference in pool(world).run(denoised, kind, folder, enabled, output_type, bags):
        assert difference <= 1e-5
