"""Step caches of diffusers and cache-dit, and denoising steps in which they skip blocks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Cache:
    """enable(transformer, threshold) and disable(transformer)."""

    enable: Callable[[Any, float], None]
    disable: Callable[[Any], None] = lambda transformer: transformer.disable_cache()


def _first_block(transformer: Any, threshold: float) -> None:
    from diffusers.hooks import FirstBlockCacheConfig

    transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))


def cache_dit_config(threshold: float, steps: int = 6) -> Any:
    os.environ.setdefault("CACHE_DIT_LOG_LEVEL", "ERROR")
    import cache_dit

    config = {"Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 1, "num_inference_steps": steps}
    return cache_dit.DBCacheConfig(**config, residual_diff_threshold=threshold)


def enable_cache_dit(transformer: Any, threshold: float, steps: int = 6) -> None:
    config = cache_dit_config(threshold, steps)
    import cache_dit

    adapter = cache_dit.BlockAdapter(
        pipe=None,
        transformer=transformer,
        blocks=transformer.blocks,
        forward_pattern=cache_dit.ForwardPattern.Pattern_2,
        check_forward_pattern=False,
        has_separate_cfg=False,
    )
    cache_dit.enable_cache(adapter, cache_config=config)


def _without_cache_dit(transformer: Any) -> None:
    import cache_dit

    cache_dit.disable_cache(transformer)


CACHES = {"first block": Cache(_first_block), "cache-dit": Cache(enable_cache_dit, _without_cache_dit)}


class Denoising:
    """Steps of a transformer alone, in which it changes its input by less and less. counts: whether blocks are counted

    Attributes:
        timestep: The current one.
    """

    def __init__(
        self, transformer: Any, inputs: dict[str, Any], steps: int, device: torch.device = CPU, counts: bool = True
    ) -> None:
        self.transformer, self.inputs, self.steps, self.device = transformer, inputs, steps, device
        self.counts, self.timestep = counts, 0

    def run(self) -> tuple[list[torch.Tensor], list[int]]:
        """Returns the samples after each step, and the number of blocks that each pass has computed."""
        sample, samples, computed = self.inputs["hidden_states"], [], []

        def count(*_: Any) -> None:
            computed[-1] += 1

        blocks = getattr(self.transformer, "blocks", None) or self.transformer.transformer_blocks
        last = [getattr(block, "ffn", None) or block.ff for block in blocks] if self.counts else []
        handles = [part.register_forward_hook(count) for part in last]
        newer = "kwargs" in inspect.signature(type(self.transformer).cache_context).parameters
        with torch.no_grad():
            for step in range(self.steps):
                computed.append(0)
                self.timestep = 900 - 100 * step
                moment = {"step_index": step, "sigma": self.timestep / 1000, "num_inference_steps": self.steps}
                given = {"hidden_states": sample, "timestep": torch.full_like(self.inputs["timestep"], self.timestep)}
                with self.transformer.cache_context("cond", **(moment if newer else {})):
                    sample = sample - 0.5**step * self.transformer(**self.inputs | given)[0]
                samples.append(sample.cpu())
        for handle in handles:
            handle.remove()
        if self.transformer.is_cache_enabled:
            self.transformer._reset_stateful_cache()
        return samples, computed
