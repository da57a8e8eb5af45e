"""What plug-ins for engines do that needs no engine: shards on ranks that are threads, rejections, versions."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dbsp_engines.lightx2v
import dbsp_engines.sglang
import dbsp_engines.vllm_omni_plugin
from dbsp_core import SequenceGroup
from dbsp_core.utils import expected_host
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.expected_host import ExpectedHost
from dbsp_engines.lightx2v import DbspAttention
from scripts.checks.engines.reference import attend_under
from tests.support.repository import ROOT
from tests.support.thread_ranks import ThreadRanks

MASK, THW, LAYERS, HEADS, STEPS = "sparge:cdf=0.6,block_q=16,block_k=8", (3, 5, 5), 2, 3, 2


def scheduler(config: dict[str, Any] | None = None) -> SimpleNamespace:
    settings = {"num_layers": LAYERS, "parallel": {"dbsp": MASK}, "enable_cfg": True}
    return SimpleNamespace(config=settings | (config or {}), step_index=0, infer_condition=True)


def whole(step: int, layer: int, branch: bool) -> list[torch.Tensor]:
    """q, k and v of all tokens, [tokens, heads, D]."""
    seed = 100 * step + 10 * layer + branch
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3 * 5 * 5, HEADS, 8, generator=generator) for _ in range(3)]


def of_lightx2v(rank: int, world: int) -> float:
    """LightX2V's calls of two transformers one after another: the largest difference from one process."""
    models = [[DbspAttention() for _ in range(LAYERS)] for _ in range(2)]
    now, worst = scheduler(), 0.0
    for step in range(STEPS):
        now.step_index = step
        for now.infer_condition in (True, False):
            for layer, attention in enumerate(models[step % 2]):
                tokens = whole(step, layer, now.infer_condition)
                padded = [F.pad(one, (0, 0, 0, 0, 0, -len(one) % world)).chunk(world)[rank] for one in tokens]
                context = {"block_idx": layer, "scheduler": now, "grid_sizes": THW}
                out, _ = attention.apply_new(*padded, attention_kwargs=context, tensor_fusion=False)
                expected = attend_under(MASK, layer, LAYERS, THW, *(one[None] for one in tokens))[0].flatten(1)
                gathered = torch.cat(SequenceGroup.from_group().all_gather(out))[: len(expected)]
                worst = max(worst, float((gathered - expected).abs().max()))
    return worst


@pytest.mark.parametrize("world", [2, 3, 4])
def test_lightx2v_equals_one_process(world):
    assert max(ThreadRanks(world).run(of_lightx2v)) <= 1e-5


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"aux_k": torch.zeros(1)}, "whose ranks all hold the text"),
        ({"quant_scheme": "fp8"}, "set precision: int8 in"),
        ({"attention_kwargs": {"block_idx": 0, "scheduler": None, "grid_sizes": None}}, "a grid of video tokens"),
        ({"k": torch.zeros(100, HEADS, 8)}, "keys of earlier frames"),
    ],
)
def test_lightx2v_setting_that_is_not_supported_is_rejected_in_one_line(changed, said):
    q = torch.zeros(75, HEADS, 8)
    call = {"q": q, "k": q, "v": q, "attention_kwargs": {"block_idx": 0, "scheduler": scheduler(), "grid_sizes": THW}}
    with pytest.raises(UserError, match=said) as rejected:
        DbspAttention().apply_new(**call | changed)
    assert "\n" not in str(rejected.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"feature_caching": "Ada"}, "feature_caching Ada decides by the tokens of one rank"),
        (
            {"feature_caching": "Tea", "model_cls": "wan2.2", "task": "i2v"},
            "feature_caching Tea decides",
        ),
        ({"tensor_parallel": True}, "leave out parallel.tensor_p_size"),
    ],
)
def test_settings_that_do_not_go_with_it_are_rejected_on_every_rank(settings, said):
    def rejection(rank: int, world: int) -> str:
        q = torch.zeros(38, HEADS, 8)
        context = {"block_idx": 0, "scheduler": scheduler(settings), "grid_sizes": THW}
        with pytest.raises(UserError) as rejected:
            DbspAttention().apply_new(q, q, q, attention_kwargs=context)
        return str(rejected.value)

    assert all(said in one and "\n" not in one for one in ThreadRanks(2).run(rejection))


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A stub on the path for an engine, of version 1.2.3, which cannot be imported; and what is expected of it."""
    package = tmp_path / "engine_stub" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "engine_stub" / "__init__.py").write_text("raise RuntimeError\nfrom x import helper as renamed\n")
    source = "LIMIT = 1\nclass Layer:\n    size: int\n    def __init__(self):\n        self.kernel = local = 1\n"
    (package / "layer.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(expected_host, "installed_version", lambda package: "1.2.3")
    names = ("inner.layer:Layer.__init__", "inner.layer:Layer.kernel", "inner.layer:Layer.size", "inner.layer:LIMIT")
    of_package = [f"engine_stub.{name}" for name in names]
    return ExpectedHost("Engine", "engine", "1.2", (*of_package, "engine_stub:renamed"))


def test_engine_that_is_as_expected_is_read_and_not_imported(engine):
    assert engine.problem() is None
    assert "engine_stub" not in sys.modules


@pytest.mark.parametrize(
    "gone", ["inner.layer:Layer.gone", "inner.layer:Gone", "inner.gone:Layer", "inner.layer:gone"]
)
def test_a_name_that_is_gone_is_found_and_said_in_one_line(engine, gone):
    problem = replace(engine, names=(*engine.names, f"engine_stub.{gone}")).problem()
    assert problem.startswith(f"db-SP expects engine_stub.{gone}, which this Engine (1.2.3) does not define; install")
    assert "\n" not in problem


def test_engine_that_is_not_installed_or_of_no_release_is_a_problem_by_its_names_alone(engine, monkeypatch):
    monkeypatch.setattr(expected_host, "installed_version", lambda package: None)
    assert "this is of unknown version; install" in engine.problem()
    assert replace(engine, version=None).problem() is None
    assert "expects no_such_engine:Layer" in replace(engine, version=None, names=("no_such_engine:Layer",)).problem()


@pytest.mark.parametrize("known", ["1.2.3", "1.2", "1"])
def test_a_release_admits_its_corrections(engine, known):
    assert replace(engine, version=known).problem() is None


@pytest.mark.parametrize("known", ["1.2.30", "1.20", "1.2.3.4", "0.1"])
def test_another_release_is_a_problem(engine, known):
    assert (
        replace(engine, version=known)
        .problem()
        .startswith(f"db-SP expects Engine {known}, and this is 1.2.3; install")
    )


@pytest.fixture
def gone(engine):
    return replace(engine, names=("engine_stub:gone",))


def test_sglang_is_left_alone_without_a_configuration(monkeypatch, gone):
    monkeypatch.delenv("DBSP_CONFIG", raising=False)
    monkeypatch.setattr(dbsp_engines.sglang, "EXPECTED", gone)
    dbsp_engines.sglang.register()


def test_another_sglang_stops_its_workers(monkeypatch, gone):
    monkeypatch.setenv("DBSP_CONFIG", MASK)
    monkeypatch.setattr(dbsp_engines.sglang, "EXPECTED", gone)
    with pytest.raises(SystemExit, match=r"expects engine_stub:gone.*, or unset DBSP_CONFIG to run without db-SP$"):
        dbsp_engines.sglang.register()


def test_another_lightx2v_gets_no_attention(monkeypatch, gone):
    monkeypatch.setattr(dbsp_engines.lightx2v, "EXPECTED", gone)
    with pytest.raises(UserError, match="expects engine_stub:gone"):
        dbsp_engines.lightx2v.register()


def test_another_vllm_omni_gets_no_backend_and_one_line(monkeypatch, gone, capfd):
    monkeypatch.setattr(dbsp_engines.vllm_omni_plugin, "EXPECTED", gone)
    dbsp_engines.vllm_omni_plugin.register()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("dbsp: db-SP expects engine_stub:gone")
    assert line.endswith("; attention backend DBSP is not there")


def test_each_plugin_expects_its_own_engine_in_the_version_that_its_extra_installs():
    text = (ROOT / "pyproject.toml").read_text()
    for plugin in (dbsp_engines.sglang, dbsp_engines.vllm_omni_plugin):
        expected = plugin.EXPECTED
        assert re.search(rf'"{expected.package}(\[\w+\])?>={re.escape(expected.version)},<', text)
    assert dbsp_engines.lightx2v.EXPECTED.version is None, "it has no releases"
