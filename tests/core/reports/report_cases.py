"""What the workers run: sessions and pipelines that report, with their numbers counted a second time next to them."""

from __future__ import annotations

import contextlib
import io
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import dbsp_para
from dbsp_core import BlockMask, SequenceGroup, Strategy, make_plan
from dbsp_core.config import DbspConfig
from dbsp_core.cost.prediction import traffic_of
from dbsp_core.masks.grid import Video
from dbsp_core.reports.collect import make_report
from dbsp_core.reports.observer import observed_session, run_observer
from dbsp_core.reports.run_report import RunReport
from dbsp_core.runtime import session as sessions
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.runtime.session import AttentionSession
from tests.support.models.transformers_for_tests import Inputs, make_transformer

LAYERS, HEADS, WIDTH = 2, 4, 16
CALL = {"height": 64, "width": 96, "num_frames": 9, "max_sequence_length": 16, "output_type": "latent"}


@dataclass(frozen=True)
class Recount:
    """One attention, counted from its mask and plan alone. sent: to owners, ring, to homes; by all ranks"""

    layer: int
    step: int
    branch: int
    strategy: str
    density: float
    rho_before: float
    rho: float
    work: list[int]
    sent: tuple[int, int, int]


def recounted_session(
    rank: int, world: int, settings: dict[str, Any], strategy: str | None, batch: int = 1
) -> tuple[RunReport, list[Recount]]:
    """Three steps of two passes over two layers, and then one over a video of another size; rank 0 recounts."""
    config = DbspConfig.load(settings | {"report": "nowhere"})
    chosen = None if strategy is None else Strategy.parse(strategy)
    session = observed_session(config, SequenceGroup.from_group(), chosen, HEADS, LAYERS)
    masks: dict[Any, BlockMask] = {}
    found: list[Recount] = []
    take_mask, run = MaskProvider.mask, sessions.attend
    now: tuple[int, int, int] = (0, 0, 0)

    def kept_mask(feed: MaskProvider, layer: int, tokens: Any = None) -> BlockMask:
        mask = take_mask(feed, layer, tokens)
        masks[layer] = masks["last"] = mask
        return mask

    def counted(executor: PreparedAttention, q: torch.Tensor, *others: torch.Tensor, **options: Any) -> Any:
        if rank == 0:
            found.append(_recount(executor, masks.get(now[0], masks["last"]), session, q, now))
        return run(executor, q, *others, **options)

    draws = torch.Generator().manual_seed(rank)
    with (
        mock.patch.object(MaskProvider, "mask", kept_mask),
        mock.patch.object(sessions, "attend", counted),
    ):
        for step, branch, thw in [(s, b, (4, 6, 7)) for s in range(3) for b in range(2)] + [(3, 0, (3, 6, 7))]:
            layout = session.begin(Video(thw), timestep=torch.tensor([900.0 - 10 * step] * batch))
            for layer in range(LAYERS):
                now = layer, step, branch
                q, k, v = 3 * torch.randn(3, batch, HEADS, layout.shard, WIDTH, generator=draws)
                session.attend(layer, q, k, v)
    return make_report(session, "two layers", "test"), found


def _recount(
    executor: PreparedAttention,
    mask: BlockMask,
    session: AttentionSession,
    q: torch.Tensor,
    now: tuple[int, int, int],
) -> Recount:
    plan, strategy, layer = executor.plan, executor.plan.strategy, now[0]
    work = plan.counted(mask).work
    before = make_plan(mask, strategy, "contiguous").work
    traffic = traffic_of(plan, session.layout)
    items = q.shape[0] * q.shape[1] // plan.heads  # 1 where items of the batch have masks of their own
    token_bytes = items * q.shape[3] * q.element_size()
    apart = ~np.eye(strategy.world, dtype=bool)
    further: np.ndarray = 2 * traffic.keys[1:].sum(axis=0)
    to_owners, chunks, to_homes = (
        int((tokens * apart).sum()) for tokens in (traffic.dispatch, further, traffic.queries.T)
    )
    ratios = [float(w.max() * strategy.world / w.sum()) for w in (before, work)]
    return Recount(
        *(layer, now[1], now[2], str(strategy)),
        density=float(mask.bits.float().mean()),
        rho_before=ratios[0],
        rho=ratios[1],
        work=work.tolist(),
        sent=(to_owners * token_bytes, chunks * token_bytes, to_homes * token_bytes),
    )


def report_of_transformer(rank: int, world: int, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Two passes of a transformer without a pipeline. Returns whether it is observed, and the report's totals."""
    transformer = make_transformer("wan")
    inputs = Inputs.random("wan", (3, 5, 7), 1, 7).arguments
    with torch.no_grad():
        dbsp_para.parallelize_transformer(transformer, config=config)
        observed = run_observer(dbsp_para.session_of(transformer)) is not None
        for step in range(2):
            transformer(**{**inputs, "timestep": torch.tensor([900 - step])})
        try:
            dbsp_para.write_report(transformer, folder)
            outcome = ""
        except ValueError as error:
            outcome = str(error)
        dbsp_para.unparallelize(transformer)
    return {"observed": observed, "outcome": outcome}


def pipeline_reports(rank: int, world: int, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """A tiny pipeline: a call that fails everywhere, two that succeed, and one after db-SP was taken off.

    returns: by event, the files in the report's folder, and the report after each of the calls
    """
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    dbsp_para.parallelize_pipe(pipe, config=config)
    seen: dict[str, Any] = {}

    def generate(steps: int, **options: Any) -> None:
        pipe(prompt="the sea at dusk", num_inference_steps=steps, guidance_scale=2.0, **CALL, **options)
        if world > 1:
            torch.distributed.barrier()  # rank 0 has written

    def look() -> list[str]:
        return sorted(path.name for path in Path(config["report"]).glob("*"))

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("a callback of the user's")

    with contextlib.suppress(ZeroDivisionError):
        generate(2, callback_on_step_end=fail)
    seen["after a failure"] = look()
    generate(3)
    seen["after one call"] = look()
    seen["first"] = asdict(RunReport.read(Path(config["report"])))
    generate(2)
    seen["second"] = asdict(RunReport.read(Path(config["report"])))
    dbsp_para.unparallelize(pipe)
    assert type(pipe) is WanPipeline
    return seen


def fail_on_one_rank(rank: int, world: int, folder: str, config: dict[str, Any], odd: int) -> tuple[str, str]:
    """All attentions succeed; then rank `odd` fails and does not come. Returns what is raised, and standard error."""
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    dbsp_para.parallelize_pipe(pipe, config=config)

    def at_the_end(_: Any, step: int, *__: Any) -> dict[str, Any]:
        if rank == odd and step == 1:
            raise ZeroDivisionError("a full disk")
        return {}

    said, raised = io.StringIO(), ""
    soon = mock.patch.object(SequenceGroup, "timeout", timedelta(seconds=3))  # not before all ranks have come this far
    with contextlib.redirect_stderr(said), soon:
        try:
            pipe(prompt="the sea", num_inference_steps=2, guidance_scale=1.0, callback_on_step_end=at_the_end, **CALL)
        except ZeroDivisionError as error:
            raised = str(error)
    return raised, said.getvalue()
