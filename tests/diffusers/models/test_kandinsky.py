"""Kandinsky 5 with NABLA: what the model does by itself, on several ranks; and with other masks."""

from __future__ import annotations

import pytest
import torch

from dbsp_core.config import DbspConfig
from dbsp_core.masks.grid import video_order
from dbsp_core.sources import LocalQK, MaskRequest, NablaSource, WindowSource
from dbsp_diffusers.resolve import resolve_config
from tests.diffusers.models.kandinsky_cases import CONFIGS, MODEL, THW, by_itself, compute, run_nabla, run_pipeline
from tests.support.models.tiny_transformers import make_tiny_transformer
from tests.support.single_process import attach_single_process

OWN = ("no mask named", "its own, named", "in a union")


@pytest.mark.parametrize("name", ["no mask named", "its own, named", "dense, named"])
def test_nabla_in_one_process_equals_the_models_own(name):
    transformer = make_tiny_transformer(MODEL)
    single = attach_single_process(transformer, CONFIGS[name])
    out = compute(transformer, 2)
    single.detach()
    own, dense = by_itself(2)
    assert float((out - (dense if "dense" in name else own)).abs().max()) <= 1e-5
    assert float((own - dense).abs().max()) > 1e-2, "the mask must matter"


@pytest.mark.parametrize(
    ("world", "strategy", "name", "batch"),
    [
        (2, "U2R1", "no mask named", 2),
        (3, "U1R3", "its own, named", 1),
        (4, "U2R2", "in a union", 1),
        pytest.param(2, "U1R2", "dense, named", 1, marks=pytest.mark.long),
        (2, "U2R1", "sparge", 2),
        pytest.param(3, "U3R1", "others of NABLA's numbers", 1, marks=pytest.mark.long),
    ],
)
def test_nabla_on_several_ranks_equals_one_process_with_that_mask(threads, world, strategy, name, batch):
    is_own, is_dense, is_sparge = name in OWN, name.startswith("dense"), name == "sparge"
    for found in threads(world).run(run_nabla, strategy, name, batch):
        for what, same in (("own", is_own), ("dense", is_dense), ("sparge", is_sparge)):
            assert (found[what] <= 1e-5) == same, (what, found)
            assert same or found[what] > 1e-3, (what, found)


def test_pipeline_with_nabla_equals_one_process(pool):
    for from_single, from_dense, reached in pool(2).run(run_pipeline, "U1R2"):
        assert from_single <= 1e-5
        assert from_dense > 1e-3, "the mask must matter"
        assert reached == 2


def settled(config):
    return resolve_config(config, make_tiny_transformer(MODEL))


def test_nabla_settings_left_out_are_the_checkpoints():
    of_checkpoint = NablaSource(cdf=0.4, window=(1, 1, 3))
    assert settled(None).mask == settled({"strategy": "U1R1"}).mask == settled("nabla").mask == of_checkpoint
    assert settled("nabla:window=[3,3,3]").mask == NablaSource(cdf=0.4, window=(3, 3, 3))
    assert settled("nabla:cdf=0.7+window:tile=[1,8,8]").mask.of[0] == NablaSource(cdf=0.7, window=(1, 1, 3))
    assert settled("dense").mask == DbspConfig().mask


def test_checkpoint_without_nabla_stays_dense():
    dense = make_tiny_transformer("kandinsky5")
    assert resolve_config({}, dense).mask == DbspConfig().mask
    assert resolve_config("nabla", dense).mask == NablaSource()


def test_nabla_bits_are_the_models_own():
    """Block by block: from the queries and keys of the model's own layers."""
    from diffusers.models.transformers import transformer_kandinsky

    transformer, seen, made = make_tiny_transformer(MODEL), [], transformer_kandinsky.nablaT_v2
    order = torch.from_numpy(video_order("tile:1x8x8", THW).argsort())

    def watched(q, k, sta, thr):
        mask = made(q, k, sta, thr)
        seen.append((q, k, mask.to_dense().bool()))
        return mask

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(transformer_kandinsky, "nablaT_v2", watched)
        patches.setattr(transformer_kandinsky, "dispatch_attention_fn", lambda q, k, v, **options: v)
        for block in transformer.visual_transformer_blocks:
            block.cross_attention.forward = lambda x, **options: x
        compute(transformer, 2)
    assert len(seen) == 2
    for q, k, theirs in seen:
        in_rows = (x.transpose(1, 2)[:, :, order] for x in (q, k))
        request = MaskRequest(0, q.shape[2], THW)
        ours = NablaSource(cdf=0.4, window=(1, 1, 3)).mask(request, LocalQK.alone(*in_rows)).bits.view(theirs.shape)
        assert torch.equal(ours, theirs)
        near = WindowSource(window=(1, 1, 3), tile=(1, 8, 8), shifted=False).mask(request)
        assert float(ours.float().mean()) > 1.5 * near.density, "the window alone must not decide"
