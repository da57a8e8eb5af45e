"""The session of an engine that shards the sequence itself: what plug-ins for serving engines share.

Such an engine gives each rank a run of consecutive tokens, the last rank's padded, and calls the attention of each
layer with them: no exchange of its own, no text apart.
"""

from __future__ import annotations

import os

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config.config import ConfigLike, DbspConfig
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.video import Video
from dbsp_core.runtime.session.session import AttentionSession
from dbsp_core.utils.compiling import not_compiled
from dbsp_core.utils.errors import UserError

__all__ = ["CONFIG_VARIABLE", "EngineSession"]

CONFIG_VARIABLE = "DBSP_CONFIG"
"""Environment variable that says what `DbspConfig.load` reads, for engines whose configuration has no room for it."""


class EngineSession:
    """One transformer's attentions: `begin` before the first layer of every forward pass, then `attend` once a layer.

    Args:
        group: The ranks that share the sequence, in the order of their shards.
        strategy: The engine's degrees, Ulysses × Ring; a strategy in the configuration goes before.
        heads, layers: Of the transformer.
        config: What `DbspConfig.load` reads. None: what $DBSP_CONFIG says, or the defaults.

    Raises:
        UserError: On all ranks, for a configuration that makes no sense here.
    """

    def __init__(
        self, group: SequenceGroup, strategy: Strategy, heads: int, layers: int, config: ConfigLike = None
    ) -> None:
        loaded = DbspConfig.load(os.environ.get(CONFIG_VARIABLE) if config is None else config)
        if loaded.layout not in (None, "contiguous"):
            raise UserError(
                f"layout: {loaded.layout} is not for engines, which shard the sequence by consecutive tokens "
                "themselves; leave it out"
            )
        self.session = AttentionSession(loaded, group, loaded.strategy_or(strategy), heads, layers)

    def __repr__(self) -> str:
        return f"<EngineSession of {self.session!r}>"

    def begin(
        self,
        video: Video,
        device: torch.device | str,
        step: int | None = None,
        cfg_branch: int | None = None,
    ) -> None:
        """Starts a forward pass.

        Args:
            video: Its token grid, and the tokens before it in the same sequence.
            step: Of the denoising; None: the engine does not say, and masks that change by step cannot be used.
            cfg_branch: Of the step's guidance passes; None: a step that comes again is the next one's.
        """
        self.session.begin(
            video,
            timestep=None if step is None else -float(step),  # timesteps fall
            device=device,
            cfg_branch=cfg_branch,
            streams=lambda: SequenceLayout.contiguous(video.tokens, self.session.group.size),
        )

    @not_compiled
    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        """Attention of one layer: q, k, v and the result are [B, shard, H, D], this rank's tokens with padding."""
        by_head = (one.transpose(1, 2) for one in (q, k, v))
        return self.session.attend(layer, *by_head, scale=scale).transpose(1, 2)
