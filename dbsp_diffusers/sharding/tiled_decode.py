"""Decodes a video in parallel: distributes the tiles of diffusers' tiled decode over ranks.

diffusers' loop, which places and blends tiles, runs twice: first with a decoder that only records its calls; then,
after each rank has decoded its tiles and all have exchanged them, with a decoder that returns the results. Every rank
gets the whole video, bitwise equal to the serial tiled decode. vLLM-Omni, TensorRT-LLM and DistVAE distribute tiles,
too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dbsp_core.comm.consistency import attempt, gather_texts, needs_gradients, run_consistently
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import log
from dbsp_diffusers.patching import PatchSet, reject_copies
from dbsp_diffusers.sharding.generation_checks import GenerationChecks

CLEARED = "_clear_conv_cache"  # method that ends a tile in loops whose layers keep the tile's state
AUTOENCODERS: dict[str, str | None] = {
    "AutoencoderKL": None,
    "AutoencoderKLCogVideoX": "conv_cache",
    "AutoencoderKLFlux2": None,
    "AutoencoderKLHunyuanImage": None,
    "AutoencoderKLHunyuanImageRefiner": None,
    "AutoencoderKLHunyuanVideo": None,
    "AutoencoderKLHunyuanVideo15": None,
    "AutoencoderKLLTX2Video": None,
    "AutoencoderKLLTXVideo": None,
    "AutoencoderKLMagvit": CLEARED,
    "AutoencoderKLMiniMaxH3": None,
    "AutoencoderKLQwenImage": "feat_cache",
    "AutoencoderKLWan": "feat_cache",
}
"""By class, how a tile's decoder calls (some frames each) pass on their state.

feat_cache: a list argument that they fill; conv_cache: an argument with the result of the last call; `CLEARED`: within
layers, until the autoencoder's loop ends the tile. None: one call per tile."""
NOT_SHARED = {"AutoencoderKLCosmos": "it has no tiled decode"}
"""Autoencoders of known models without parallel decoding, with the reason."""


def owners_of_tiles(areas: Sequence[int], ranks: int) -> list[int]:
    """Assigns tiles to ranks, largest first, each to the rank with the least load."""
    load, owners = [0] * ranks, [0] * len(areas)
    for tile in sorted(range(len(areas)), key=lambda tile: -areas[tile]):
        owners[tile] = load.index(min(load))
        load[owners[tile]] += areas[tile]
    return owners


def share_decoding(pipe: Any, checks: GenerationChecks, patches: PatchSet) -> None:
    """Makes the ranks of `checks` decode a pipeline's videos together, and enables tiling.

    All ranks must then call its autoencoder's `decode` together; `checks` compares their latents. Raises UserError if
    the pipeline has no autoencoder, or if its decoder is unknown or already distributed.
    """
    vae = getattr(pipe, "vae", None)
    if vae is None:
        raise UserError("vae=True needs a pipeline with an autoencoder `pipe.vae`; remove it for a transformer")
    names = [cls.__name__ for cls in type(vae).__mro__]
    for name in filter(NOT_SHARED.__contains__, names):
        if checks.group.rank == 0:
            said = "vae: %s does not support parallel decoding (%s); each rank decodes the whole video"
            log.warning(said, name, NOT_SHARED[name])
        return
    kinds = [name for name in names if name in AUTOENCODERS]
    if not kinds:
        raise UserError(
            f"vae=True: db-SP does not know the decoder of {type(vae).__name__}, only those of "
            f"{', '.join(AUTOENCODERS)}; remove vae"
        )
    if any(name in vars(vae) for name in ("_decode", "tiled_decode", "_dbsp_decoding")):
        raise UserError(
            "vae=True: the autoencoder's decode is already replaced (by another pipeline with db-SP, or para-attn's "
            "parallelize_vae); undo that first, or load the autoencoder again"
        )
    patches.set_attribute(vae, "use_tiling", True)
    patches.set_attribute(vae, "_dbsp_decoding", True)
    reject_copies(vae, patches)
    patches.set_attribute(vae, "decode", _Decoding(vae, vae.decode, AUTOENCODERS[kinds[0]], checks))


@dataclass
class _Call:
    """One decoder call; `state` is passed to it (a list) or returned by it (a placeholder)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: object
    out: torch.Tensor | None = None


class _Noting:
    """Replaces a decoder's forward: records calls by tile, and returns empty frames, which blend instantly."""

    def __init__(self, carries: str | None) -> None:
        self.tiles: list[list[_Call]] = []
        self._carries = carries
        self._within = False  # True within a tile, for autoencoders that end tiles by a method

    def end_tile(self) -> None:
        self._within = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = None if self._carries is None else kwargs.get(self._carries)
        returns = self._carries == "conv_cache"
        call = _Call(args, kwargs, object() if returns else state)
        goes_on = bool(self.tiles) and state is not None and state is self.tiles[-1][-1].state
        if goes_on or self._within:
            self.tiles[-1].append(call)
        else:
            self.tiles.append([call])
        self._within = self._carries == CLEARED
        frames = args[0].new_empty(args[0].shape[0], *[0] * (args[0].ndim - 1))
        return (frames, call.state) if returns else frames


@dataclass
class _Decoding:
    """Parallel `decode` of an autoencoder, with the interface of its own (`serial`)."""

    vae: nn.Module
    serial: Callable[..., Any]
    carries: str | None
    checks: GenerationChecks

    @torch.compiler.disable
    def __call__(self, z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.checks.group.size == 1:
            return self.serial(z, *args, **kwargs)
        # 1. Record the tiles, and check that ranks agree
        tiles = self._checked_tiles(z, *args, **kwargs)
        if len(tiles) < 2:
            return self.serial(z, *args, **kwargs)
        # 2. Decode this rank's tiles in serial order
        areas = [sum(call.args[0].numel() for call in tile) for tile in tiles]
        owners = owners_of_tiles(areas, self.checks.group.size)

        def decode() -> None:
            for tile, owner in zip(tiles, owners, strict=True):
                if owner == self.checks.group.rank:
                    self._decode(tile)

        run_consistently(self.checks.group.control(), decode)
        # 3. Exchange tiles, and blend all: the decoder returns the frames of each call, in order
        self._exchange(tiles, owners, z.device)
        calls = iter([call for tile in tiles for call in tile])

        def decoded(*_: Any, **__: Any) -> Any:
            frames = next(calls).out
            return (frames, None) if self.carries == "conv_cache" else frames

        with self._decoder_replaced(decoded):
            return self.serial(z, *args, **kwargs)

    def _checked_tiles(self, z: torch.Tensor, *args: Any, **kwargs: Any) -> list[list[_Call]]:
        """Returns the decoder calls of a serial decode, by tile. Raises on all ranks if they differ."""
        noting = _Noting(self.carries)

        def note() -> None:
            if needs_gradients(z, *self.vae.parameters()):
                raise UserError(
                    "a video decoded in parallel has no gradients; decode it under torch.no_grad(), or call disable "
                    "first"
                )
            with self._decoder_replaced(noting, ends_tile=noting.end_tile):
                self.serial(z, *args, **kwargs)

        _, problem = attempt(note)
        shapes = [[tuple(call.args[0].shape) for call in tile] for tile in noting.tiles]
        latents = [z] if isinstance(z, torch.Tensor) else []
        try:
            self.checks.check_decoding((repr(problem), shapes, getattr(z, "dtype", None)), latents)
        finally:
            if problem is not None:
                raise problem
        return noting.tiles

    def _decode(self, tile: Sequence[_Call]) -> None:
        """Runs the calls of one tile, passing on their state."""
        decoder: Any = self.vae.decoder
        state = None
        for call in tile:
            if self.carries == "conv_cache":
                call.out, state = decoder(*call.args, **{**call.kwargs, "conv_cache": state})
            else:
                call.out = decoder(*call.args, **call.kwargs)
        if self.carries == CLEARED:
            getattr(self.vae, CLEARED)()
        for call in tile:  # free caches, as large as some frames at every layer
            call.args, call.kwargs, call.state = (), {}, None

    def _exchange(self, tiles: Sequence[Sequence[_Call]], owners: Sequence[int], device: torch.device) -> None:
        """Distributes the decoded frames of every call to all ranks. Collective."""
        # 1. Exchange shapes and dtype of frames
        calls: list[list[_Call]] = [[] for _ in range(self.checks.group.size)]
        for tile, owner in zip(tiles, owners, strict=True):
            calls[owner] += tile
        mine = [call.out for call in calls[self.checks.group.rank] if call.out is not None]
        described = [list(frames.shape) for frames in mine], str(mine[0].dtype if mine else "")
        of_ranks = [json.loads(text) for text in gather_texts(self.checks.group.control(), json.dumps(described))]
        dtype = getattr(torch, max(dtype for _, dtype in of_ranks).removeprefix("torch."))
        # 2. Gather frames, padded to equal lengths
        longest = max(sum(map(math.prod, shapes)) for shapes, _ in of_ranks)
        sent = torch.empty(longest, dtype=dtype, device=device)
        flat = [sent[:0], *(frames.reshape(-1) for frames in mine)]
        torch.cat(flat, out=sent[: sum(map(len, flat))])
        received = self.checks.group.all_gather(sent)
        for (shapes, _), of_rank, frames in zip(of_ranks, calls, received, strict=True):
            parts = frames[: sum(map(math.prod, shapes))].split([math.prod(shape) for shape in shapes])
            for call, part, shape in zip(of_rank, parts, shapes, strict=True):
                call.out = part.view(shape)

    @contextmanager
    def _decoder_replaced(
        self, forward: Callable[..., Any], ends_tile: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Replaces the decoder's forward in the body, keeping the module, since some autoencoders count its parts."""
        patches = PatchSet()
        patches.set_attribute(self.vae.decoder, "forward", forward)
        if self.carries == CLEARED:
            patches.set_attribute(self.vae, CLEARED, ends_tile)
        try:
            yield
        finally:
            patches.detach()
