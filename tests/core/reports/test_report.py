"""Reports of a run: numbers equal to what masks and plans say, gathered from all ranks, in both forms."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dbsp_para
from dbsp_cli.tiny_models import make_tiny
from dbsp_core import BlockMask, SequenceGroup, Strategy, make_plan
from dbsp_core.config import DbspConfig
from dbsp_core.cost.prediction import traffic_of
from dbsp_core.masks.grid import Video
from dbsp_core.reports.collect import make_report
from dbsp_core.reports.observer import observed_session
from dbsp_core.reports.page import headline, in_a_line, report_page
from dbsp_core.reports.run_report import CallColumns, Environment, RankTotals, RunReport
from dbsp_core.runtime import session as sessions
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from tests.support.models.tiny_pipelines import latents, load
from tests.support.workers import WorkerPool

LAYERS, HEADS, WIDTH = 2, 4, 16
BYTES = ("bytes_to_owners", "bytes_chunks", "bytes_to_sources")


def recounted_session(
    rank: int, world: int, settings: dict[str, Any], strategy: str | None, batch: int = 1
) -> tuple[RunReport, list[tuple[dict[str, Any], list[int]]]]:
    """Runs three steps of two passes over two layers, and one over a video of another size; rank 0 counts again."""
    config = DbspConfig.load(settings | {"report": "nowhere"})
    chosen = None if strategy is None else Strategy.parse(strategy)
    session = observed_session(config, SequenceGroup.from_group(), chosen, HEADS, LAYERS)
    masks: dict[Any, BlockMask] = {}
    found = []
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
    executor: PreparedAttention, mask: BlockMask, session: AttentionSession, q: torch.Tensor, now: tuple[int, int, int]
) -> tuple[dict[str, Any], list[int]]:
    """Returns a call's row of the report, counted from its mask and plan alone, and the work of ranks."""
    plan, strategy = executor.plan, executor.plan.strategy
    work = plan.counted(mask).work
    before = make_plan(mask, strategy, "contiguous").work
    traffic = traffic_of(plan, session.layout)
    items = q.shape[0] * q.shape[1] // plan.heads  # 1 where items of the batch have masks of their own
    to_others = ~np.eye(strategy.world, dtype=bool) * (items * q.shape[3] * q.element_size())
    by_kind = traffic.dispatch, 2 * traffic.keys[1:].sum(axis=0), traffic.queries.T
    row = dict(zip(("layer", "step", "branch"), now, strict=True)) | {
        "strategy": str(strategy),
        "density": float(mask.bits.float().mean()),
        "rho_before": float(before.max() * strategy.world / before.sum()),
        "rho": float(work.max() * strategy.world / work.sum()),
    }
    return row | {name: int((n * to_others).sum()) for name, n in zip(BYTES, by_kind, strict=True)}, work.tolist()


def fail_on_one_rank(rank: int, world: int, folder: str, config: dict[str, Any], odd: int) -> tuple[str, str]:
    """Fails on rank `odd` after all attentions. Returns what is raised, and standard error."""
    pipe = load("wan", folder)
    dbsp_para.parallelize_pipe(pipe, config=config)

    def at_the_end(_: Any, step: int, *__: Any) -> dict[str, Any]:
        if rank == odd and step == 1:
            raise ZeroDivisionError("a full disk")
        return {}

    said, raised = io.StringIO(), ""
    soon = mock.patch.object(SequenceGroup, "timeout", timedelta(seconds=3))  # not before all ranks have come this far
    with contextlib.redirect_stderr(said), soon:
        try:
            latents(pipe, guidance_scale=1.0, callback_on_step_end=at_the_end)
        except ZeroDivisionError as error:
            raised = str(error)
    return raised, said.getvalue()


SPARGE = {"source": "sparge", "cdf": 0.6, "similarity": -1.0, "block_q": 16, "block_k": 8}
DRIFTING = {"source": "synthetic", "density": 0.4, "drift": 0.2, "block_q": 16, "block_k": 8}


@pytest.mark.parametrize(
    ("world", "strategy", "settings", "batch"),
    [
        (1, "U1R1", {"mask": SPARGE}, 2),
        (2, "U1R2", {"mask": DRIFTING, "planner": "contiguous"}, 2),
        (4, "U2R2", {"mask": SPARGE, "reuse": 1.02}, 1),
        (4, None, {"mask": SPARGE, "machine": "a800"}, 1),
    ],
    ids=lambda value: str(value)[:40],
)
def test_report_equals_counts_of_masks_and_plans(pool, world, strategy, settings, batch):
    results = pool(world).run(recounted_session, settings, strategy, batch)
    reports = [report for report, _ in results]
    assert len({tuple(report.calls.seconds) for report in reports}) == 1, "times of all ranks, on every rank"
    for report in reports:
        _require_recounted(report, results[0][1], world)
    if settings["mask"] is SPARGE:
        assert len(set(reports[0].calls.density)) > 4, "masks must differ from call to call"


def _require_recounted(report, expected, world):
    calls = report.calls
    sent = [sum(row[name] for name in BYTES) for row, _ in expected]
    assert len(calls) == len(expected) == 14
    for index, (row, _) in enumerate(expected):
        assert {name: getattr(calls, name)[index] for name in row} == pytest.approx(row), index
        assert 0 < calls.seconds_mean[index] <= calls.seconds[index]
        assert 1 <= calls.rho_bound[index] <= calls.rho[index] + 1e-9
        assert (calls.plan_ms[index] > 0) <= bool(calls.replanned[index])
    for layer in ("0", "1"):
        columns = zip(*(work for row, work in expected if str(row["layer"]) == layer), strict=True)
        assert report.ranks.work[layer] == [sum(column) for column in columns]
        assert sum(report.ranks.work_before[layer]) == sum(report.ranks.work[layer])
    assert len(report.ranks.attention_s) == len(report.environment.hardware) == world
    assert min(report.ranks.attention_s) > 0
    assert sum(report.ranks.bytes_sent) == report.totals.bytes_sent == sum(sent)
    assert report.totals.calls == sum(report.totals.strategies.values()) == 14


def test_kept_plans_are_not_counted_as_new(pool):
    settings = {"mask": SPARGE, "reuse": 100.0}
    (report, _), *_ = pool(2).run(recounted_session, settings, "U1R2")
    assert report.calls.replanned == [int(step in (0, 3)) for step in report.calls.step]  # 3: another size of video
    (eager, _), *_ = pool(2).run(recounted_session, {**settings, "reuse": 1.0}, "U1R2")
    assert eager.totals.replans > report.totals.replans


def test_rank_that_fails_at_the_end_leaves_no_report_and_no_hang(tmp_path):
    model = str(make_tiny("wan", tmp_path / "tiny-wan"))
    config = {"mask": SPARGE, "strategy": "U1R2", "report": str(tmp_path / "report")}
    with contextlib.closing(WorkerPool(2)) as workers:
        (fine, said), (raised, silent) = workers.run(fail_on_one_rank, model, config, 1)
    assert (fine, raised, silent) == ("", "a full disk", "")
    assert "dbsp: no report in" in said
    assert "not all ranks came within 3 s" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "report").exists()


def small_report(**changes):
    """Returns the report of two layers, three steps and two ranks."""
    steps, layers = 3, 2
    count = steps * layers
    calls = CallColumns(
        layer=[0, 1] * steps,
        step=[0, 0, 1, 1, 2, 2],
        branch=[0] * count,
        strategy=["U2R1"] * 4 + ["U1R2"] * 2,
        replanned=[1, 1, 0, 0, 1, 0],
        plan_ms=[0.5, 0.25, 0, 0, 0.25, 0],
        density=[0.5] * count,
        rho_before=[1.25, 1.5] * steps,
        rho=[1.0, 1.125] * steps,
        rho_bound=[1.0] * count,
        row_share=[0.5, 1.0] * steps,
        slots=[132] * count,
        seconds=[0.5] * count,
        seconds_mean=[0.375] * count,
        bytes_to_owners=[1000] * count,
        bytes_chunks=[0, 0, 0, 0, 512, 512],
        bytes_to_sources=[300] * count,
        bytes_usp=[1300] * count,
    )
    work = {"0": [100, 100], "1": [60, 50]}
    settings = {"mask": {"source": "sparge", "cdf": 0.6}, "planner": "dbsp", "report": "here"}
    values = {
        "model": "a/model",
        "framework": "para",
        "world_size": 2,
        "strategy": "auto: 4 U2R1, 2 U1R2",
        "planner": "dbsp",
        "max_abs_diff": None,
        "seconds": 6.0,
        "environment": Environment(settings, {"torch": "2.13.0"}, ["a GPU", "a GPU"], "cpu", "float32"),
        "calls": calls,
        "ranks": RankTotals([2.0, 2.5], [3900, 3900], work, {"0": [125, 75], "1": [80, 30]}),
    }
    return RunReport(**values | changes)


def test_totals_equal_sums_by_hand():
    totals = small_report().totals
    assert (totals.calls, totals.replans, totals.steps, totals.bytes_sent) == (6, 3, 3, 6 * 1300 + 1024)
    assert (totals.rho_before, totals.rho) == pytest.approx((1.375, 1.0625))
    assert (totals.attention_s, totals.attention_share, totals.plan_s) == pytest.approx((3.0, 0.5, 0.001))
    assert totals.saved_s == pytest.approx(3 * 0.5 * (0.25 + 1.5 / 1.125 - 1))
    assert totals.left_s == pytest.approx(3 * 0.5 * (1 - 1 / 1.125))
    assert totals.strategies == {"U1R2": 2, "U2R1": 4}


def test_json_is_read_back_equal_and_other_files_are_rejected(tmp_path):
    report, path = small_report(max_abs_diff=1e-7), tmp_path / "report.json"
    report.write(path)
    again, values = RunReport.read(path), json.loads(path.read_text())
    assert again == RunReport.read(tmp_path)
    again.write(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == values
    for added in ("skipped", "quantized", "compile_s", "video"):  # what older reports lack
        del values[added]
    path.write_text(json.dumps(values))
    assert RunReport.read(path) == again
    for change, message in (
        ({"format": "db-SP report 3"}, "expected format 'db-SP report 5'"),
        ({"calls": values["calls"] | {"rho": [1.0]}}, "columns have different lengths"),
        ({"ranks": values["ranks"] | {"attention_s": [1.0] * 9}}, "different numbers of ranks"),
        ({"seconds": "long"}, "unsupported operand"),
    ):
        path.write_text(json.dumps(values | change))
        with pytest.raises(UserError, match=rf"is not a db-SP report.*{message}"):
            RunReport.read(path)


def test_page_has_the_numbers_and_loads_nothing():
    html = report_page(small_report())
    for number in ("1.375 → 1.062", "0.500", "4 × U2R1", "8.62 KiB", "mask.cdf"):
        assert number in html, number
    assert not any(loading in html for loading in ("://", "@import", "url(", " src=", " href="))
    data = html.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert json.loads(data)["calls"]["rho"] == [1.0, 1.125] * 3
    assert "<script>alert" not in report_page(small_report(model='</script><script>alert("x")</script>'))


def test_plans_that_are_worse_than_an_equal_split_are_named():
    calls = small_report().calls
    swapped = dataclasses.replace(calls, rho=calls.rho_before, rho_before=calls.rho)
    for values, advised in (({"plan": "lagged"}, True), ({"plan": "current"}, False)):
        environment = dataclasses.replace(small_report().environment, settings=values)
        line = in_a_line(small_report(calls=swapped, environment=environment))
        assert ("worse" in line, "try plan: current" in line) == (True, advised)
    assert "worse" not in in_a_line(small_report())


def test_features_are_among_the_main_numbers_and_the_page_shows_the_video():
    counts = {"skipped": {"transformer": (10, 40), "transformer_2": (20, 40)}, "compile_s": 1.5}
    report = small_report(**counts, quantized={"transformer": (7, 4096, 1024)}, video="video.mp4")
    shown = {what: (value, note) for what, value, note in headline(report)}
    assert shown["skipped by the cache"] == ("30 of 80 blocks", "25% of transformer, 50% of transformer_2")
    assert shown["quantized weights"] == ("4 KiB → 1 KiB", "7 linear layers of transformer")
    assert shown["compiling"] == ("1.5 s", "of 6 s; rank 0")
    html = report_page(report, "data:image/jpeg;base64,AAAA")
    assert '<a href="video.mp4"><img class="frame" src="data:image/jpeg;base64,AAAA"' in html
    assert "30 of 80 blocks" in html


def test_longest_row_is_shown_from_a_quarter_of_a_slots_share():
    report = small_report()
    assert in_a_line(report).endswith("longest row 0.75 of a slot's share (132 slots)")
    assert ("longest row", "0.75 of a slot's share", "worst 1.00; 132 slots") in headline(report)
    short = dataclasses.replace(report.calls, row_share=[0.24] * len(report.calls))
    assert "longest row" not in in_a_line(small_report(calls=short))
    assert "longest row" not in {name for name, _, _ in headline(small_report(calls=short))}


def test_cli_with_one_run_prints_it(dbsp, tmp_path):
    small_report().write(tmp_path / "report.json")
    _, out, _ = dbsp("report", tmp_path)
    assert all(words in out for words in ("1.375 → 1.062", "a/model", "4 × U2R1"))
    values = json.loads(dbsp("report", tmp_path / "report.json", "--json")[1])
    assert values["totals"]["rho"] == pytest.approx(1.0625)
    assert [layer["replans"] for layer in values["layers"]] == [2, 1]


def test_cli_with_two_runs_compares_them(dbsp, tmp_path):
    a, b = tmp_path / "[red]a", tmp_path / "b[" / "red] [[b]"
    a.mkdir()
    b.mkdir(parents=True)
    report = small_report(model="[/x] a model")
    report.write(a / "report.json")
    settings = {"mask": {"source": "window"}, "planner": "paper", "report": "there"}
    environment = dataclasses.replace(report.environment, settings=settings)
    calls = dataclasses.replace(report.calls, seconds=[1.0] * 6)
    other = dataclasses.replace(report, environment=environment, calls=calls, seconds=9.0)
    other.write(b / "report.json")
    code, out, _ = dbsp("report", a, b)
    assert code == 0
    for text in ("+100.0%", f"A: {a}  ", f"B: {b}  ", f"videos not compared: {a} has no videos"):
        assert text in out
    assert "[/x] a model, db-SP in para" in dbsp("report", a)[1]
    values = json.loads(dbsp("report", a, b, "--json")[1])
    changed = {one["what"]: (one["a"], one["b"]) for one in values["settings"]}
    assert changed == {"mask.source": ("sparge", "window"), "mask.cdf": (0.6, None), "planner": ("dbsp", "paper")}
    numbers = {one["what"]: one for one in values["numbers"]}
    assert numbers["attention, slowest rank"]["change"] == pytest.approx(1.0)
    assert numbers["ρ_s used"]["change"] == 0
    assert (values["psnr"], values["ssim"], values["latents_psnr"]) == (None, None, None)
    for folder in (a, b):
        save_file({"latents": torch.randn(1, 2, 3)}, folder / "latents.safetensors")
    assert json.loads(dbsp("report", a, b, "--json")[1])["latents_psnr"] < 20
    same = " ".join(dbsp("report", a, a / "report.json")[1].split())
    assert "latents: PSNR equal" in same


def test_cli_mistakes_are_one_line(mistake):
    assert "report nowhere does not exist; give the report folder of a run" in mistake("report", "nowhere")
    assert "takes one or two runs" in mistake("report", "a", "a", "a")
