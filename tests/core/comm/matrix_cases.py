"""What the workers run: whole tiny pipelines from disk, through both hosts, against one process's latents."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from dbsp_core.runtime.session import AttentionSession
from tests.support.models.tiny_pipelines import alone, latents, load


@dataclass(frozen=True)
class MatrixCase:
    """One generation. reference: the name of the latents to compare with; break_with: a negative control's fault."""

    host: str
    model: str
    reference: str
    config: dict[str, Any] = field(default_factory=dict)
    break_with: str | None = None


def single_process_latents(folder: str, model: str, config: dict[str, Any]) -> torch.Tensor:
    """Final latents of stock diffusers in this process alone, under the same masks."""
    return alone(_stock_pipe(model, folder), config)


def run_matrix(
    rank: int, world: int, folders: dict[str, str], references: str, cases: Sequence[MatrixCase]
) -> list[float]:
    """By case, the largest difference of the final latents from the reference's, as this rank has them."""
    expected = load_file(references)
    differences = []
    for case in cases:
        with _broken(case.break_with):
            out = _parallel_latents(folders[case.model], case)
        differences.append(float((out - expected[case.reference]).abs().max()))
    return differences


def _parallel_latents(folder: str, case: MatrixCase) -> torch.Tensor:
    if case.host == "para":
        import dbsp_para

        pipe = _stock_pipe(case.model, folder)
        dbsp_para.parallelize_pipe(pipe, config=case.config)
        out = latents(pipe)
        dbsp_para.unparallelize(pipe)
        return out
    import dbsp_xdit

    pipe = _xdit_pipe(folder, case.model)
    dbsp_xdit.attach(pipe, case.config)
    out = latents(pipe)
    dbsp_xdit.detach(pipe)
    return out


_stock_pipe = functools.cache(load)


@functools.cache
def _xdit_pipe(folder: str, model: str) -> Any:
    """As xDiT's runner builds it: Wan with xfuser's wrapper, CogVideoX as diffusers has it."""
    if model != "wan":
        return _stock_pipe(model, folder)
    from diffusers import WanPipeline
    from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper

    transformer = xFuserWanTransformer3DWrapper.from_pretrained(
        folder, subfolder="transformer", attention_kwargs={"thw": None}
    )
    pipe = WanPipeline.from_pretrained(folder, transformer=transformer, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@contextmanager
def _broken(fault: str | None) -> Iterator[None]:
    """Within it, every session attends wrongly: a comparison that still passes would prove nothing."""
    right = AttentionSession.attend

    def attend(
        self: AttentionSession, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        if fault == "attends to its own tokens alone":
            self._reached.add(layer)
            return F.scaled_dot_product_attention(q, k, v, scale=options.get("scale"))
        return right(self, layer, q, k, v, scale=0.5 * q.shape[-1] ** -0.5)  # "scales wrongly"

    if fault is not None:
        AttentionSession.attend = attend  # type: ignore[method-assign]
    try:
        yield
    finally:
        AttentionSession.attend = right  # type: ignore[method-assign]
