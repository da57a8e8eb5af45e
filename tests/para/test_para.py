"""dbsp_para: stock diffusers transformers over 2 to 4 ranks equal one process, and come back unchanged."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from dbsp_core.utils.errors import UserError
from tests.para.para_cases import (
    ParaCase,
    run_para_case,
    run_pipeline_case,
    run_sparge_case,
    run_through_para_attn,
    run_twice,
    run_with_grad_enabled,
    unseeded_noise,
)
from tests.support.models.shallow import make_shallow
from tests.support.repository import ROOT, child_environment

TOLERANCE = 1e-5
MASK = {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}
BY_STEP = MASK | {"drift": 0.05}
"""In a striped layout, with all keys; `MASK`, which never changes, in a contiguous one with selective KV exchange."""
SPARGE = {"source": "sparge", "cdf": 0.6, "similarity": 0.1, "block_q": 16, "block_k": 8, "dense_text": False}


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(
    ("model", "world", "strategy", "mask", "text_tokens"),
    [
        ("wan", 2, "U2R1", BY_STEP, 7),
        ("wan", 4, "U1R4", MASK, 7),
        ("wan", 8, "U4R2", BY_STEP, 7),
        ("cogvideox", 4, "U2R2", BY_STEP, 226),
        ("cogvideox", 6, "U2R3", MASK, 3),
        ("cogvideox1.0", 3, "U3R1", MASK, 5),
        ("cogvideox1.0", 4, "U2R2", BY_STEP, 5),
    ],
)
def test_equals_one_process(pool, model, world, strategy, mask, text_tokens):
    """tests/diffusers/models has every strategy of each class."""
    config = {"mask": mask, "strategy": strategy}
    case = ParaCase(model, (5, 3, 7), config, batch=4, text_tokens=text_tokens)
    for difference, from_dense in pool(world).run(run_para_case, case):
        assert difference <= TOLERANCE
        assert from_dense > 100 * TOLERANCE, "the mask must matter"


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(("model", "strategy"), [("wan", "U2R1"), ("cogvideox", "U2R2"), ("cogvideox1.0", "U1R3")])
def test_parallelized_again_it_gives_the_same_by_name_as_well(pool, model, strategy):
    config = {"mask": BY_STEP, "strategy": strategy}
    world = int(strategy[1]) * int(strategy[3])
    pool(world).run(run_twice, ParaCase(model, thw=(3, 5, 7), config=config, batch=2))


@pytest.mark.parametrize("model", ["wan", "cogvideox"])
def test_whole_pipelines_equal_one_process_and_share_their_noise(pool, tmp_path, model):
    folder = make_shallow(model, tmp_path / model)
    results = pool(3).run(run_pipeline_case, model, folder, {"mask": MASK, "strategy": "U1R3"})
    assert all(difference <= TOLERANCE for difference, *_ in results), results
    assert len({unseeded for *_, unseeded in results}) == 1


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(("model", "strategy"), [("wan", "U1R3"), ("wan", "U2R2"), ("cogvideox", "U2R1")])
def test_masks_predicted_from_queries_and_keys_equal_one_process(pool, model, strategy):
    case = ParaCase(model, (4, 5, 7), {"mask": SPARGE, "strategy": strategy}, batch=2 if model == "cogvideox" else 1)
    for rank in pool(int(strategy[1]) * int(strategy[3])).run(run_sparge_case, case):
        for difference, from_dense, density in rank:
            assert difference <= TOLERANCE, (case, rank)
            assert from_dense > 100 * TOLERANCE, "the mask must matter"
            assert 0.2 < density < 0.8, rank


@pytest.mark.parametrize(
    ("model", "schedules"),
    [
        ("wan", ({}, {"last_steps": 1, "first_layers": 1})),
        ("cogvideox", ({"first_steps": 1}, {"first_steps": 9})),
    ],
)
def test_whole_pipelines_with_predicted_masks_and_dense_ends(pool, tmp_path, model, schedules):
    folder = make_shallow(model, tmp_path / model)
    mask = {"source": "sparge", "cdf": 0.5, "similarity": -1.0, "block_q": 8, "block_k": 8}
    videos = set()
    for dense in schedules:
        config = {"mask": mask, "strategy": "U1R3", "dense_schedule": dense}
        results = pool(3).run(run_pipeline_case, model, folder, config)
        assert all(difference <= TOLERANCE for difference, *_ in results), (dense, results)
        videos.add(results[0][1])
    assert len(videos) == len(schedules), "every schedule must make a video of its own"


def test_noise_is_shared_and_drawn_where_the_pipeline_computes(pool):
    """Also where its weights wait on another device, on which this group of ranks could not meet."""
    results = pool(2).run(unseeded_noise)
    assert results[0] == results[1]


@pytest.mark.parametrize("model", ["wan", "cogvideox"])
def test_outside_no_grad_where_nothing_requires_a_gradient(pool, model):
    assert pool(2).run(run_with_grad_enabled, model) == [(0.0, False)] * 2


@pytest.mark.usefixtures("debug")
def test_through_para_attn_with_its_mesh(pool):
    pytest.importorskip("para_attn")
    for ring in (1, 2, 4):
        differences = pool(4).run(run_through_para_attn, ring, {"mask": MASK})
        assert all(difference <= TOLERANCE for difference in differences), (ring, differences)


def test_para_attn_learns_the_argument_and_forgets_it():
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


def test_para_attn_that_lacks_a_name_is_left_as_it_is(monkeypatch):
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


def test_para_attn_knows_the_argument_before_anything_of_ours_is_imported(tmp_path):
    """torch finds the entry points of pyproject.toml in an installation's metadata."""
    tomllib = pytest.importorskip("tomllib", reason="from Python 3.11 on")
    pytest.importorskip("para_attn")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / f"{project['name'].replace('-', '_')}-0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: 0.0\n")
    entries = [f"{name} = {place}\n" for name, place in project["entry-points"]["torch.backends"].items()]
    (metadata / "entry_points.txt").write_text("".join(["[torch.backends]\n", *entries]))
    done = subprocess.run(
        [sys.executable, "-c", FRESH], env=child_environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["WindowSource", "as it was"]
