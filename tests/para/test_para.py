"""dbsp_para: stock diffusers transformers over 2 and 4 ranks equal one process, and come back unchanged."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from dbsp_core.utils.errors import UserError
from tests.para.para_cases import (
    ParaCase,
    run_para_case,
    run_through_para_attn,
    run_twice,
    run_with_grad_enabled,
    unseeded_noise,
)
from tests.support.programs import run
from tests.support.repository import ROOT, child_environment

TOLERANCE = 1e-5
MASK = {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}
BY_STEP = MASK | {"drift": 0.05}
"""In a striped layout, with all keys; `MASK`, which never changes, in a contiguous one with selective KV exchange."""
BLOCKS = {"block_q": 16, "block_k": 8}
SOURCES = {
    "tiles": {"source": "window", "tile": [1, 3, 4], "window": [1, 1, 3], "block_q": 12, "block_k": 12},
    "tiles cut by blocks": {"source": "window", "tile": [2, 3, 4], "window": [1, 1, 1], **BLOCKS},
    "radial": {"source": "radial", "width": 0.4, "sink_frames": 0, **BLOCKS},
    "svg": {"source": "svg", "frames": 1, "bandwidth": 0.2, "temporal_heads": [0, 1, 4], **BLOCKS},
    "sparge": {"source": "sparge", "cdf": 0.6, "similarity": 0.1, "dense_text": False, **BLOCKS},
}


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(
    ("model", "strategy", "mask", "text_tokens"),
    [
        ("cogvideox", "U1R2", BY_STEP, 226),
        ("cogvideox1.0", "U2R1", MASK, 5),
        ("wan", "U1R2", SOURCES["tiles"], 7),
        ("cogvideox", "U2R1", SOURCES["tiles cut by blocks"], 7),
        ("wan", "U1R2", SOURCES["radial"], 7),
        ("cogvideox", "U1R2", SOURCES["svg"], 7),
        ("wan", "U2R1", SOURCES["sparge"], 7),
    ],
)
def test_transformer_equals_one_process(pool, model, strategy, mask, text_tokens):
    """tests/diffusers/models has every strategy of each class; whole models with sources of patterns are only here."""
    config = {"mask": mask, "strategy": strategy}
    case = ParaCase(model, (5, 3, 7), config, batch=4, text_tokens=text_tokens)
    for difference, from_dense in pool(2).run(run_para_case, case):
        assert difference <= TOLERANCE
        assert from_dense > 100 * TOLERANCE, "the mask must matter"


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(("model", "strategy"), [("wan", "U2R1"), ("cogvideox", "U1R2")])
def test_transformer_parallelized_again_gives_the_same(pool, model, strategy):
    config = {"mask": BY_STEP, "strategy": strategy}
    pool(2).run(run_twice, ParaCase(model, thw=(3, 5, 7), config=config, batch=2))


def test_noise_is_shared_where_weights_are_offloaded(pool):
    """Also where its weights wait on another device, on which this group of ranks could not meet."""
    results = pool(2).run(unseeded_noise)
    assert results[0] == results[1]


@pytest.mark.parametrize("model", ["wan", "cogvideox"])
def test_transformer_outside_no_grad_gives_outputs_without_gradients(pool, model):
    assert pool(2).run(run_with_grad_enabled, model) == [(0.0, False)] * 2


@pytest.mark.usefixtures("debug")
def test_para_attn_with_its_own_mesh_equals_one_process(pool):
    pytest.importorskip("para_attn")
    for ring in (1, 2, 4):
        differences = pool(4).run(run_through_para_attn, ring, {"mask": MASK})
        assert all(difference <= TOLERANCE for difference in differences), (ring, differences)


def test_para_attn_accepts_the_argument_until_uninstalled():
    pytest.importorskip("para_attn")
    dbsp_para = importlib.import_module("dbsp_para")
    adapters = [
        importlib.import_module(f"para_attn.context_parallel.diffusers_adapters.{name}")
        for name in ("wan", "cogvideox")
    ]
    assert dbsp_para.install()
    wrapped = [adapter.parallelize_transformer for adapter in adapters]
    for parallelize in (wrapped[0], dbsp_para.parallelize_transformer, dbsp_para.parallelize_pipe):
        with pytest.raises(UserError, match="unknown attn 'flash'; pass attn=\"dbsp\""):
            parallelize(object(), attn="flash")
    dbsp_para.uninstall()
    assert all(a.parallelize_transformer is not w for a, w in zip(adapters, wrapped, strict=True))
    assert dbsp_para.install()


def test_para_attn_without_an_expected_name_is_left_unpatched(monkeypatch):
    pytest.importorskip("para_attn")
    dbsp_para = importlib.import_module("dbsp_para")
    wan, cogvideox = (
        importlib.import_module(f"para_attn.context_parallel.diffusers_adapters.{name}")
        for name in ("wan", "cogvideox")
    )
    dbsp_para.uninstall()
    own = cogvideox.parallelize_transformer
    monkeypatch.setattr(wan, "parallelize_transformer", lambda transformer: transformer)
    with pytest.raises(
        UserError, match=r"wan:parallelize_transformer\(mesh\), which db-SP expects; install para-attn"
    ):
        dbsp_para.install()
    assert cogvideox.parallelize_transformer is own
    monkeypatch.undo()
    assert dbsp_para.install()


FRESH = """
from para_attn.context_parallel.diffusers_adapters import parallelize_pipe
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
sizes = dict(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=8)
transformer = WanTransformer3DModel(**sizes, ffn_dim=16, num_layers=1)
pipe = WanPipeline(None, None, None, UniPCMultistepScheduler(), transformer)
assert parallelize_pipe(pipe, attn="dbsp", config="window") is pipe
import dbsp_para
print(type(dbsp_para.session_of(pipe).config.mask).__name__)
dbsp_para.unparallelize(pipe)
dbsp_para.uninstall()
try:
    parallelize_pipe(pipe, attn="dbsp")
except TypeError:
    print("as it was")
"""


@pytest.mark.parametrize("start", [run, pytest.param(subprocess.run, marks=pytest.mark.long)])
def test_para_attn_accepts_the_argument_before_db_sp_is_imported(tmp_path, start):
    """torch finds the entry points of pyproject.toml in an installation's metadata."""
    tomllib = pytest.importorskip("tomllib", reason="from Python 3.11 on")
    pytest.importorskip("para_attn")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / f"{project['name'].replace('-', '_')}-0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: 0.0\n")
    entries = [f"{name} = {target}\n" for name, target in project["entry-points"]["torch.backends"].items()]
    (metadata / "entry_points.txt").write_text("".join(["[torch.backends]\n", *entries]))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = start([sys.executable, "-c", FRESH], env=child_environment(tmp_path), **pipes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["WindowSource", "as it was"]
