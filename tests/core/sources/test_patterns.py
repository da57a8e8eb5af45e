"""Sources window (with tiles), radial and svg, against masks of tokens written out from their papers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsp_core.sources import MaskRequest, RadialSource, SvgSource, WindowSource
from tests.core.sources import token_masks
from tests.support.generators import BLOCK_SIZES, examples

SIZES = st.tuples(*[st.integers(1, 5)] * 3)
WAN = MaskRequest(layer=0, heads=40, thw=(21, 45, 80))


@st.composite
def requests(draw, most_heads=1):
    return MaskRequest(0, draw(st.integers(1, most_heads)), draw(SIZES), draw(st.integers(0, 9)))


def assert_covers(mask, request):
    """Checks that text and each token's own block are active: no row or column is empty."""
    grid = mask.grid
    bits = mask.bits.numpy()
    assert bits[:, grid.q_axis.starts < request.text_tokens].all()
    assert bits[:, :, grid.k_axis.starts < request.text_tokens].all()
    assert bits[:, grid.q_axis.block_of, grid.k_axis.block_of].all()


class TestTiles:
    @given(requests(), BLOCK_SIZES, BLOCK_SIZES, SIZES, SIZES)
    @examples(50)
    def test_blocks_are_those_of_the_formula(self, request, block_q, block_k, window, tile):
        mask = WindowSource(block_q, block_k, window, tile).mask(request)
        rule = token_masks.sliding_tiles(request.thw, window, tile)
        assert np.array_equal(mask.bits.numpy(), token_masks.active_blocks([rule], mask.grid, request))
        assert_covers(mask, request)

    @given(requests(), BLOCK_SIZES, BLOCK_SIZES, SIZES, SIZES)
    @examples(40)
    def test_windows_that_are_not_shifted_are_cut_off_at_borders(self, request, block_q, block_k, window, tile):
        mask = WindowSource(block_q, block_k, window, tile, shifted=False).mask(request)
        rule = token_masks.tiles_near(request.thw, window, tile)
        assert np.array_equal(mask.bits.numpy(), token_masks.active_blocks([rule], mask.grid, request))
        assert_covers(mask, request)

    def test_window_defaults_to_three_tiles(self):
        request = MaskRequest(0, 1, (10, 10, 10))
        given, default = (WindowSource(8, 8, w, (2, 2, 2)).mask(request) for w in ((3, 3, 3), None))
        assert given.fingerprint == default.fingerprint
        assert given.density < 0.3


class TestRadial:
    @given(
        requests(),
        BLOCK_SIZES,
        BLOCK_SIZES,
        st.sampled_from([1.0, 0.5, 0.3, 2.0, 0.01]),
        st.sampled_from([0.5, 0.25, 0.7, 1.0]),
        st.integers(0, 2),
        st.integers(1, 19),
    )
    @examples(50)
    def test_blocks_are_those_of_the_formula(self, request, block_q, block_k, width, decay, sink_frames, frames):
        request = replace(request, thw=(frames, *(min(size, 3) for size in request.thw[1:])))
        mask = RadialSource(block_q, block_k, width, decay, sink_frames).mask(request)
        rule = token_masks.radial(request.thw, width, decay, sink_frames, max(block_q, block_k))
        assert np.array_equal(mask.bits.numpy(), token_masks.active_blocks([rule], mask.grid, request))
        assert_covers(mask, request)

    @pytest.mark.parametrize("thw", [(20, 1, 3), (9, 2, 2), (17, 2, 1)])
    def test_blocks_of_one_token_give_the_papers_mask(self, thw):
        request = MaskRequest(0, 1, thw)
        mask = RadialSource(1, 1, sink_frames=0).mask(request)
        expected = token_masks.active_blocks([token_masks.radial_as_printed(thw)], mask.grid, request)
        assert np.array_equal(mask.bits.numpy(), expected)
        assert not expected.all()

    def test_thin_bands_keep_a_block_of_every_other_frame(self):
        # 8 tokens a frame, blocks of 4: b is 8, 8, 4, 4, 2, 2, 2, 2, 1 at distances 0 to 8.
        bits = RadialSource(4, 4, sink_frames=0).mask(MaskRequest(0, 1, (9, 2, 4))).bits[0].numpy()
        seen = bits.reshape(9, 2, 9, 2)[0].any(axis=(0, 2))
        assert seen.tolist() == [True] * 4 + [True, False, True, False] + [True]


class TestSvg:
    @given(
        requests(most_heads=4),
        BLOCK_SIZES,
        BLOCK_SIZES,
        st.integers(1, 5),
        st.floats(0.01, 1),
        st.integers(0, 2),
        st.floats(0, 1),
    )
    @examples(50)
    def test_blocks_are_those_of_the_formula(self, request, block_q, block_k, frames, band, sink_frames, share):
        source = SvgSource(block_q, block_k, frames, band, sink_frames, share)
        mask = source.mask(request)
        rules = [
            token_masks.temporal(request.thw, band) if is_temporal else token_masks.spatial(frames, sink_frames)
            for is_temporal in source.temporal(request.heads)
        ]
        assert np.array_equal(mask.bits.numpy(), token_masks.active_blocks(rules, mask.grid, request))
        assert_covers(mask, request)

    @given(st.integers(1, 60), st.floats(0, 1))
    @examples(100)
    def test_fraction_of_heads_is_spread_equally(self, heads, share):
        numbers = np.flatnonzero(SvgSource(temporal_heads=share).temporal(heads))
        assert len(numbers) == round(share * heads)
        if len(numbers) > 1:
            steps = np.diff(np.append(numbers, numbers[0] + heads))
            assert steps.max() - steps.min() <= 1

    def test_heads_can_be_named(self):
        source = SvgSource(temporal_heads=(0, 3))
        assert source.temporal(4).tolist() == [True, False, False, True]
        assert source.grid(MaskRequest(0, 4, (2, 2, 2))).orders == ("hwt", "thw", "thw", "hwt")
        assert not SvgSource(temporal_heads=()).temporal(4).any()

    def test_missing_head_raises(self):
        with pytest.raises(ValueError, match="has a head that the model lacks; its 4 heads are 0 to 3"):
            SvgSource(temporal_heads=(1, 4)).grid(MaskRequest(0, 4, (2, 2, 2)))


@pytest.mark.parametrize(
    "source", [RadialSource(), SvgSource(), WindowSource(120, 120, (3, 5, 5), (3, 5, 8))], ids=repr
)
def test_layers_and_steps_share_one_mask(source):
    keys = {source.cache_key(replace(WAN, layer=layer, step=step)) for layer in (0, 39) for step in (0, 9)}
    assert (len(keys), source.changes) == (1, "never")
    assert source.grid(WAN) == source.mask(WAN).grid
