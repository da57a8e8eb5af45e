"""xfuser's subclasses of diffusers' other transformers, which attach turns back: each equals one process."""

from __future__ import annotations

import pytest

from tests.xdit.xdit_cases import run_family, start_xfuser

TOLERANCE = 1e-6
FAMILIES = {
    "wan": "transformer_wan:xFuserWanTransformer3DWrapper",
    "vace": "transformer_wan_vace:xFuserWanVACETransformer3DWrapper",
    "hunyuan": "transformer_hunyuan_video:xFuserHunyuanVideoTransformer3DWrapper",
    "hunyuan1.5": "transformer_hunyuan_video15:xFuserHunyuanVideo15Transformer3DWrapper",
    "ltx2": "transformer_ltx2:xFuserLTX2VideoTransformer3DWrapper",
    "flux": "transformer_flux:xFuserFlux1Transformer2DWrapper",
    "flux2": "transformer_flux2:xFuserFlux2Transformer2DWrapper",
    "qwen": "transformer_qwen:xFuserQwenImageTransformerWrapper",
    "z-image": "transformer_z_image:xFuserZImageTransformer2DWrapper",
    "krea2": "transformer_krea2:xFuserKrea2Transformer2DWrapper",
    "minimax-h3": "transformer_minimax_h3:xFuserMiniMaxH3Transformer3DWrapper",
}


@pytest.mark.parametrize("model", FAMILIES)
def test_family_equals_one_process(pool, model):
    workers = pool(2)
    workers.run(start_xfuser)
    for difference, from_dense, calls in workers.run(run_family, model, FAMILIES[model]):
        assert difference <= TOLERANCE
        assert from_dense > 100 * TOLERANCE, "the mask must matter"
        assert calls > 0
