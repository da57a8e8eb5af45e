"""Videos decoded in parallel: bitwise what the serial tiled decode makes, and rejections on all ranks together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch

import dbsp_diffusers
from dbsp_core import SequenceGroup
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.patching import PatchSet
from dbsp_diffusers.sharding.generation_checks import GenerationChecks
from dbsp_diffusers.sharding.tiled_decode import AUTOENCODERS, NOT_SHARED, owners_of_tiles, share_decoding
from tests.support.models.tiny_pipelines import SIZE, load, state_of
from tests.support.outcomes import said
from tests.support.workers import WorkerError

_WAN = {"base_dim": 3, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
_WAN |= {"temperal_downsample": [False, True, True]}
_RESIDUAL = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
_BLOCKS = {"layers_per_block": 1, "norm_num_groups": 2, "latent_channels": 4}
_COGVIDEOX = _BLOCKS | {"block_out_channels": (8,) * 4}
_COGVIDEOX_BLOCKS = {"down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4}
_IMAGE = _BLOCKS | {"block_out_channels": (4, 4), "sample_size": 8}
_IMAGE |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_HUNYUAN_IMAGE = {"in_channels": 3, "out_channels": 3, "block_out_channels": (64, 64), "sample_size": 8}
_WIDE = {"latent_channels": 32, "layers_per_block": 1, "spatial_compression_ratio": 2}
_REFINER = {"block_out_channels": (32, 32), "temporal_compression_ratio": 1}
_LTX = {"block_out_channels": (8,) * 4, "latent_channels": 8, "patch_size": 1, "layers_per_block": (1,) * 5}
_LTX_DECODER = {"decoder_block_out_channels": (8,) * 4, "decoder_layers_per_block": (1,) * 5}
_LTX2_DECODER = {"decoder_block_out_channels": (8, 16, 32), "decoder_layers_per_block": (1,) * 4}
_MINIMAX = _BLOCKS | {"block_out_channels": (4,) * 6, "decoder_num_layers": 1, "decoder_num_attention_heads": 2}
_MINIMAX |= {"decoder_attention_head_dim": 24}
_TILES = {"tile_sample_min_height": 32, "tile_sample_min_width": 32}
_TILES |= {"tile_sample_stride_height": 24, "tile_sample_stride_width": 24}
_IN_TIME = {"tile_sample_min_num_frames": 8, "tile_sample_stride_num_frames": 4}
_OF_LATENTS = {"tile_latent_min_height": 4, "tile_latent_min_width": 4}


def _tile(*sizes: int, **named: int) -> Callable[[Any], None]:
    return lambda vae: vae.enable_tiling(*sizes, **named)


def _tile_ltx(vae: Any) -> None:
    space, time = vae.spatial_compression_ratio, vae.temporal_compression_ratio
    vae.enable_tiling(4 * space, 4 * space, 2 * time, 3 * space, 3 * space, time)
    vae.use_framewise_decoding = True


KINDS: dict[str, tuple[str, dict[str, Any], Callable[[Any], None], tuple[int, ...]]] = {
    "wan": ("Wan", _WAN, _tile(**_TILES), (2, 16, 3, 5, 6)),
    "wan2.2-ti2v": ("Wan", _WAN | _RESIDUAL, _tile(64, 64, 48, 48), (1, 16, 2, 5, 6)),
    "qwen": ("QwenImage", _WAN, _tile(**_TILES), (1, 16, 1, 5, 6)),
    "cogvideox": ("CogVideoX", _COGVIDEOX | _COGVIDEOX_BLOCKS, _tile(32, 32), (2, 4, 5, 5, 6)),
    "hunyuan": ("HunyuanVideo", _COGVIDEOX, _tile(**_TILES, **_IN_TIME), (1, 4, 4, 5, 6)),
    "hunyuan1.5": (
        "HunyuanVideo15",
        {"block_out_channels": (16, 16, 32, 32, 32), "layers_per_block": 1, "latent_channels": 32},
        _tile(64, 64, **_OF_LATENTS),
        (1, 32, 1, 4, 8),  # diffusers' own attention there takes one video
    ),
    "image": ("", _IMAGE, _tile(), (1, 4, 5, 6)),
    "flux2": ("Flux2", _IMAGE, _tile(), (1, 4, 5, 6)),
    "hunyuan-image": ("HunyuanImage", _HUNYUAN_IMAGE | _WIDE, _tile(), (1, 32, 5, 6)),
    "hunyuan-image-refiner": ("HunyuanImageRefiner", _WIDE | _REFINER, _tile(8, 8, 6, 6), (1, 32, 2, 5, 6)),
    "ltx": ("LTXVideo", _LTX | _LTX_DECODER, _tile_ltx, (1, 8, 3, 5, 6)),
    "ltx2": ("LTX2Video", _LTX | _LTX2_DECODER, _tile_ltx, (1, 8, 3, 5, 6)),
    "magvit": ("Magvit", _BLOCKS | {"block_out_channels": (4,) * 4}, _tile(**_TILES), (1, 4, 2, 5, 6)),
    "minimax-h3": ("MiniMaxH3", _MINIMAX, _tile(64, 64, 16, 16), (1, 4, 7, 5, 6)),
}
"""An autoencoder's class and sizes, how it gets tiles of four by four latents, and latents of several tiles, the last
ones short. Hunyuan's, LTX's and MiniMax's tiles are also cut into runs of frames."""


def _small(kind: str) -> tuple[Any, torch.Tensor]:
    """Returns an autoencoder and latents."""
    cls, sizes, tile, shape = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = getattr(diffusers, f"AutoencoderKL{cls}")(**sizes).eval()
    tile(vae)
    return vae, torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _shared(vae, patches):
    share_decoding(SimpleNamespace(vae=vae), GenerationChecks(SequenceGroup.from_group()), patches)


@torch.no_grad()
def _decode(rank, world, vae, z, change=lambda rank, vae, z: z):
    """Decodes on a rank by an autoencoder of its own, which `change` may spoil."""
    vae, patches = copy.deepcopy(vae), PatchSet()
    _shared(vae, patches)
    z = change(rank, vae, z)
    first = vae.decode(z, return_dict=False)[0]
    assert torch.equal(vae.decode(z).sample, first), "nothing is left over for the next video"
    patches.detach()
    assert not {"decode", "_dbsp_decoding"} & set(vars(vae))
    return first


def _serially(threads, vae, z):
    """Decodes in a thread, as ranks are: the number of torch's threads decides about last bits."""
    return threads(1).run(_serial, vae, z)[0]


@torch.no_grad()
def _serial(rank, world, vae, z):
    return vae.decode(z).sample


USUAL = ("wan", "cogvideox", "hunyuan", "minimax-h3")
"""Autoencoders that are tiled in different ways; all others are tried in the long part."""


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        pytest.param(kind, 2 + number % 2, marks=() if kind in USUAL else pytest.mark.long)
        for number, kind in enumerate(KINDS)
    ],
)
def test_shared_decode_is_bitwise_identical_to_the_serial_one(threads, kind, world):
    vae, z = _small(kind)
    expected = _serially(threads, vae, z)
    assert expected.std() > 0
    assert all(torch.equal(one, expected) for one in threads(world).run(_decode, vae, z))


def test_shared_decode_with_slicing_and_more_ranks_than_tiles_is_identical(threads):
    vae, z = _small("cogvideox")
    vae.enable_slicing()
    z = z[..., :4, :5]  # two tiles an item
    assert all(torch.equal(one, _serially(threads, vae, z)) for one in threads(5).run(_decode, vae, z))


def test_spoiled_decoder_of_another_rank_changes_the_video(threads):
    vae, z = _small("wan")
    expected = _serially(threads, vae, z)

    def spoil(rank, vae, z):
        if rank == 1:
            vae.decoder.conv_out.bias.data += 0.1
        return z

    one, other = threads(2).run(_decode, vae, z, spoil)
    assert torch.equal(one, other)
    assert not torch.equal(one, expected), "rank 1 must have decoded some"


def test_single_tile_and_untiled_video_are_decoded_by_every_rank(threads):
    vae, z = _small("wan")
    one = z[..., :4, :4]
    assert all(torch.equal(got, _serially(threads, vae, one)) for got in threads(2).run(_decode, vae, one))
    found = threads(2).run(_decode, vae, z, lambda rank, vae, z: _off(vae, z))
    vae.disable_tiling()
    assert all(torch.equal(got, _serially(threads, vae, z)) for got in found)


def _off(vae, z):
    vae.disable_tiling()
    return z


def _failing(vae, z):
    def out_of_memory(*args, **options):
        raise MemoryError("no memory left")

    vae.decoder.forward = out_of_memory
    return z


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda vae, z: z[..., :-1], r"decoded latents differ in size, dtype or tiles on rank\(s\) \[1\]"),
        (_off, r"tiles on rank\(s\) \[1\]"),
        (lambda vae, z: z[0], r"or cannot be decoded there"),
        (lambda vae, z: z.flip(0), r"latents that are decoded differ on rank\(s\) \[1\]"),
        (_failing, r"rank\(s\) \[1\]: MemoryError: no memory left"),
    ],
    ids=["smaller", "untiled", "malformed", "other", "failing"],
)
def test_ranks_that_differ_are_rejected_together(threads, change, message):
    vae, z = _small("wan")
    with pytest.raises(WorkerError, match=message) as raised:
        threads(2).run(_decode, vae, z, lambda rank, vae, z: change(vae, z) if rank else z)
    assert [rank for rank, *_ in raised.value.errors] == [0, 1]


def test_decode_that_cannot_be_shared_is_rejected():
    vae, _ = _small("wan")
    with pytest.raises(UserError, match="does not know the decoder of AutoencoderKLMochi, only those of"):
        _shared(object.__new__(type("AutoencoderKLMochi", (), {})), PatchSet())
    with pytest.raises(UserError, match="remove it for a transformer"):
        share_decoding(SimpleNamespace(), GenerationChecks(SequenceGroup(0, 1)), PatchSet())
    vae.disable_tiling()
    patches = PatchSet()
    _shared(vae, patches)
    assert vae.use_tiling
    with pytest.raises(UserError, match="already replaced"):
        _shared(vae, PatchSet())
    patches.detach()
    assert not vae.use_tiling


def test_decode_with_gradients_is_rejected(threads):
    vae, z = _small("wan")

    def with_gradients(rank, world):
        own, patches = copy.deepcopy(vae), PatchSet()
        _shared(own, patches)
        return said(lambda: own.decode(z))

    assert all("no gradients; decode it under" in answer for answer in threads(2).run(with_gradients))


def test_every_known_class_is_diffusers():
    assert all(hasattr(diffusers, name) for name in (*AUTOENCODERS, *NOT_SHARED))
    assert {type(_small(kind)[0]).__name__ for kind in KINDS} == set(AUTOENCODERS), "each is tried"


def test_owners_of_tiles():
    # 9 to rank 0, 7 to rank 1, 5 to rank 1 (12), 4 to rank 0 (13), 3 to rank 1 (15).
    assert owners_of_tiles([3, 9, 5, 7, 4], 2) == [1, 0, 1, 1, 0]
    assert owners_of_tiles([1, 1], 4) == [0, 1]
    assert owners_of_tiles([2, 2, 2, 2], 2) == [0, 1, 0, 1]


def decoded_by_pipelines(rank: int, world: int, folder: str) -> None:
    """Decodes a pipeline's video together, in both ways to ask for it, as one process decodes tile by tile."""
    pipe, config = load("wan", folder), {"mask": {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}}
    call = SIZE | {"prompt": "the sea at dusk", "max_sequence_length": 16, "num_frames": 5, "num_inference_steps": 1}
    pipe(**call, output_type="pt")  # a call leaves attributes of its own
    before, frames = [*state_of(pipe), sorted(vars(pipe.vae))], []
    pipe.vae.enable_tiling(32, 32, 24, 24)
    for settings, options in (({}, {}), ({"vae": True}, {}), ({}, {"vae": True})):
        dbsp_diffusers.enable(pipe, config | settings, **options)
        frames.append(pipe(**call, generator=torch.Generator().manual_seed(3), output_type="pt").frames)
        dbsp_diffusers.disable(pipe)
    assert torch.equal(frames[1], frames[0])
    assert torch.equal(frames[2], frames[0])
    assert [*state_of(pipe), sorted(vars(pipe.vae))] == before
    answer = said(lambda: dbsp_diffusers.enable(pipe.transformer, config, vae=True))
    assert answer.startswith("UserError: vae=True needs a pipeline with an autoencoder")


def test_pipelines_on_processes_share_and_restore_their_decode(pool, folder):
    pool(2).run(decoded_by_pipelines, folder)
