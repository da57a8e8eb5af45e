"""Session for serving engines that shard the sequence themselves, shared by their plug-ins.

Such an engine gives each rank consecutive slots and calls each layer's attention with them, without exchanging
anything. Text is part of that sequence, or replicated on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dbsp_core.comm.consistency import ConcurrencyGuard, attempt
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import ConfigLike, DbspConfig
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid, Video
from dbsp_core.masks.steps import Progress, StepClock
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import DenseSource, MaskRequest, MaskSource, UnionSource
from dbsp_core.sources.base import Changes
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import not_compiled

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v, [B, tokens, H, D] each."""

CONFIG_VARIABLE = "DBSP_CONFIG"
"""Environment variable with the argument of `DbspConfig.load`, for engines without a place for it."""


@dataclass(frozen=True)
class EngineLayout:
    """Distribution of a forward pass's tokens over an engine's ranks.

    Rank r has the r-th `shard` slots of the sequence; the last slots are padding. Text outside the sequence comes
    before or after the shard, split over ranks or whole on each.
    """

    thw: tuple[int, int, int]  # The video's token grid
    before: int = 0  # Tokens of the sequence before the video: text, audio, input images
    after: int = 0  # Tokens of the sequence after the video
    shard: int | None = None  # Slots per rank. None: as few as hold the sequence.
    text: int = 0  # Text tokens outside the sequence, without padding
    text_last: bool = False  # True if that text comes after the shard, False: before it
    text_shares: tuple[int, ...] = ()  # Text tokens on each rank, padding at the end; (): every rank has all of them
    # Tokens of each kind before the video, if known; mask source vsa does not pool across kinds
    runs: tuple[int, ...] = ()

    @property
    def video(self) -> Video:
        """The video for masks, with all other tokens as text."""
        runs = tuple(filter(None, (self.text, *self.runs, self.after))) if self.runs else ()
        return Video(self.thw, self.text + self.before + self.after, runs)

    def text_share(self, world: int) -> int:
        """Returns the text slots per rank; replicated text is split, with padding on the last rank."""
        return max(self.text_shares) if self.text_shares else -(-self.text // world)

    @lru_cache(maxsize=8)  # noqa: B019  bounded, and of few objects
    def on(self, world: int) -> SequenceLayout:
        """Returns the sequence layout in which each rank has its share of the text with its shard.

        Raises UserError if the sequence has more tokens than the ranks have slots.
        """
        # 1. Canonical positions: text, tokens before and after the video, video
        text, others, tokens = self.text, self.before + self.after, self.video.tokens
        before, after = text + np.arange(self.before), text + np.arange(self.before, others)
        sequence = np.concatenate([before, np.arange(text + others, tokens), after])
        # 2. Cut the sequence and the text into shards
        shard, share = self.shard or -(-len(sequence) // world), self.text_share(world)
        if len(sequence) > shard * world:
            raise UserError(
                f"the engine has {world} ranks of {shard} tokens for a sequence of {len(sequence)}, a sharding of "
                "this model that db-SP does not support; use another attention backend"
            )
        rank, local = np.empty(tokens, dtype=np.int64), np.empty(tokens, dtype=np.int64)
        rank[sequence], local[sequence] = np.divmod(np.arange(len(sequence)), shard)
        held = np.array(self.text_shares or np.diff(np.minimum(np.arange(world + 1) * share, text)))
        rank[:text] = np.repeat(np.arange(world), held)
        local[:text] = np.arange(text) - np.repeat(np.cumsum(held) - held, held)
        # 3. Join sequence and text
        if self.text_last:
            local[:text] += shard
        else:
            local[text:] += held[rank[text:]] if self.text_shares else share
        return SequenceLayout(rank, local, world, shard + share)


@dataclass(frozen=True)
class _HeadsOf:
    """Static masks of a run of heads of a source whose masks may differ by head."""

    source: MaskSource
    first: int
    all_heads: int

    @property
    def changes(self) -> Changes:
        return self.source.changes

    def cache_key(self, request: MaskRequest) -> Hashable:
        return self.source.cache_key(replace(request, heads=self.all_heads))

    def grid(self, request: MaskRequest) -> BlockGrid:
        return self._own(self.source.grid(replace(request, heads=self.all_heads)), request)

    def mask(self, request: MaskRequest) -> BlockMask:
        mask = self.source.mask(replace(request, heads=self.all_heads))
        return BlockMask(mask.bits[self.first : self.first + request.heads], self._own(mask.grid, request))

    def _own(self, grid: BlockGrid, request: MaskRequest) -> BlockGrid:
        orders = grid.orders[self.first : self.first + request.heads]
        return replace(grid, orders=orders) if len(grid.orders) > 1 else grid


def _of_heads(source: MaskSource, first: int, all_heads: int) -> MaskSource:
    if isinstance(source, UnionSource):
        return UnionSource(tuple(_of_heads(part, first, all_heads) for part in source.of))
    is_same = isinstance(source, DenseSource) or source.changes == "per_call"
    return source if is_same else _HeadsOf(source, first, all_heads)


def generation_of(request: Any) -> object:
    """Returns an object that identifies an engine's request, stored as its attribute; None without a request."""
    return None if request is None else vars(request).setdefault("_dbsp_generation", object())


class EngineSession:
    """One transformer's attentions: call `begin` before each forward pass, then `attend` once per layer.

    Args:
        group: The ranks that share the sequence, in order of their shards.
        strategy: The engine's Ulysses and ring degrees; the configuration's strategy takes precedence.
        heads, layers: Heads and layers of the transformer.
        head_slice: With tensor parallelism, the index of the first of these `heads` and the total number.
        config: Argument of `DbspConfig.load`. None: $DBSP_CONFIG, or the defaults.
        clock: Step clock shared by transformers that alternate in a denoising. None: one transformer.
        transformer: "transformer", or "transformer_2" for the second of two, whose settings may differ.

    Raises:
        UserError: The configuration is invalid here; raised on all ranks.
    """

    def __init__(
        self,
        group: SequenceGroup,
        strategy: Strategy,
        heads: int,
        layers: int,
        config: ConfigLike = None,
        clock: StepClock | None = None,
        transformer: str = "transformer",
        head_slice: tuple[int, int] | None = None,
    ) -> None:
        source = os.environ.get(CONFIG_VARIABLE) if config is None else config
        loaded, problem = attempt(lambda: DbspConfig.load(source).for_transformer(transformer))
        loaded = loaded or DbspConfig()
        if head_slice is not None:
            loaded = replace(loaded, mask=_of_heads(loaded.mask, *head_slice))
        self._steps: int | None = None
        self.session = AttentionSession(
            config=loaded,
            group=group,
            strategy=loaded.strategy_or(strategy),
            heads=heads,
            layers=layers,
            steps=lambda: self._steps,
            clock=clock or StepClock(),
            problem=problem,
        )
        self._layout = EngineLayout((0, 0, 0))

    def __repr__(self) -> str:
        return f"<EngineSession of {self.session!r}>"

    def begin(
        self,
        tokens: Video | EngineLayout,
        device: torch.device | str,
        step: int | None = None,
        cfg_branch: int | None = None,
        timestep: torch.Tensor | float | None = None,
        *,
        steps: int | None = None,
        generation: object = None,
    ) -> None:
        """Starts a forward pass.

        Args:
            tokens: Layout of the tokens; a `Video` means one sequence with its text first.
            step: Denoising step from 0, if known. A transformer may begin at any step.
            cfg_branch: CFG pass within the step. None: a repeated step is the next pass.
            timestep: Distinguishes steps if `step` is None; falls from step to step.
            steps: Number of denoising steps, if known.
            generation: A different object for each generation, if known.

        Raises:
            UserError: Masks depend on the step, but neither step nor timestep is known; raised on all ranks.
        """
        session = self.session
        if step is None and timestep is None and session.by_step:
            raise UserError(
                "these masks depend on the denoising step, which the engine does not provide for this model; choose a "
                "mask that does not, and leave dense_schedule's first_steps and last_steps at 0"
            )
        self._layout = EngineLayout(tokens.thw, before=tokens.text) if isinstance(tokens, Video) else tokens
        self._steps = steps
        session.clock.progress = lambda: Progress(generation, step, first_index=0)
        session.begin(
            self._layout.video,
            timestep=timestep if step is None else -float(step),
            device=device,
            cfg_branch=cfg_branch,
            streams=self._layout.on(session.group.size),
        )

    @not_compiled
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
        text: QKV | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention of one layer.

        Args:
            q, k, v: [B, shard, H, D], this rank's tokens with padding, including its share of split text.
            text: q, k and v of replicated text, [B, slots, H, D]: tokens, then padding (not attended to; outputs are
                0). None: no replicated text, or a single rank has it in its sequence.
            gate: For mask source vsa the gate of the coarse branch, of q's shape; for sla [D + 1, D].

        Returns:
            [B, shard, H, D]; with text [B, slots + shard, H, D], or [B, shard + slots, H, D] if text is last. The
            text's outputs are equal on all ranks.
        """
        slots = q.shape[1]
        if self._layout.text_shares:
            unused = self._layout.on(self.session.group.size).shard - slots  # if this rank has less text than others
            q, k, v = (F.pad(tensor, (0, 0, 0, 0, 0, unused)) if unused else tensor for tensor in (q, k, v))
        elif text is None and self._layout.text:
            (q, k, v), text = self._without_text((q, k, v))
        local = (q, k, v) if text is None else map(self._with_share, (q, k, v), text)
        gate = gate.transpose(1, 2) if gate is not None and gate.ndim == q.ndim else gate
        with ConcurrencyGuard(self.session.group):
            out = self.session.attend(layer, *(tensor.transpose(1, 2) for tensor in local), scale=scale, gate=gate)
            out = out.transpose(1, 2)
            return out[:, :slots] if text is None else self._with_all_text(out, text[0].shape[1])

    def _without_text(self, qkv: QKV) -> tuple[QKV, QKV]:
        """Splits one rank's [B, slots + shard, H, D] (or shard first) into shard and text."""
        tokens, last = self._layout.video.tokens - self._layout.text, self._layout.text_last
        others = qkv[0].shape[1] - tokens
        q, k, v = (tensor.split((tokens, others) if last else (others, tokens), dim=1) for tensor in qkv)
        shard, text = (0, 1) if last else (1, 0)
        return (q[shard], k[shard], v[shard]), (q[text], k[text], v[text])

    def all_agree(self, answer: bool) -> bool:
        """Returns True if `answer` is True on all ranks, for step caches; compares on the host. Collective."""
        with ConcurrencyGuard(self.session.group):
            return all(bool(vote) for (vote,) in self.session.group.gather_integers([answer]))

    def _with_share(self, shard: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Joins a rank's shard and its share of the text."""
        share = self._layout.text_share(self.session.group.size)
        first = self.session.group.rank * share
        mine = text[:, first : min(first + share, self._layout.text)]
        mine = F.pad(mine, (0, 0, 0, 0, 0, share - mine.shape[1]))
        return torch.cat([shard, mine] if self._layout.text_last else [mine, shard], dim=1)

    def _with_all_text(self, out: torch.Tensor, slots: int) -> torch.Tensor:
        """Inverts `_with_share` and gathers the text, zero at padding. Collective."""
        share, last = self._layout.text_share(self.session.group.size), self._layout.text_last
        sizes = (out.shape[1] - share, share) if last else (share, out.shape[1] - share)
        shard, mine = out.split(sizes, dim=1)[:: 1 if last else -1]
        whole = torch.cat(self.session.group.all_gather(mine), dim=1)[:, : self._layout.text] if share else mine
        whole = F.pad(whole, (0, 0, 0, 0, 0, slots - self._layout.text))
        return torch.cat([shard, whole] if last else [whole, shard], dim=1)
