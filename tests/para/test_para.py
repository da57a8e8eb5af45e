"""dbsp_para: transformers through its functions and para-attn's equal one process."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch

import dbsp_para
from dbsp_core.utils.errors import UserError
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.models.tiny_transformers import Thw, make_tiny_transformer, tiny_inputs
from tests.support.outcomes import alone, apart, assert_near, outputs, said
from tests.support.programs import run
from tests.support.references import by_first_rank
from tests.support.repository import ROOT, child_environment

MASK = {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}
BLOCKS = {"block_q": 16, "block_k": 8}
SOURCES = {
    "tiles": {"source": "window", "tile": [1, 3, 4], "window": [1, 1, 3], "block_q": 12, "block_k": 12},
    "svg": {"source": "svg", "frames": 1, "bandwidth": 0.2, "temporal_heads": [0, 1, 4], **BLOCKS},
}


@functools.cache
def para_mesh(world: int, **sizes: int) -> Any:
    """Returns para-attn's mesh of all ranks; one is kept, since the threads of its groups outlive it."""
    from para_attn.context_parallel import init_context_parallel_mesh

    return init_context_parallel_mesh("cpu", **sizes)


@by_first_rank
def one_process(model: str, thw: Thw, batch: int, mask: dict[str, Any]) -> tuple[list[torch.Tensor], ...]:
    """Returns outputs of dense attention, and with a mask."""
    transformer, inputs = make_tiny_transformer(model), tiny_inputs(model, thw, batch)
    with torch.no_grad():
        return outputs(transformer, inputs), alone(transformer, inputs, {"mask": mask})


def run_transformer(rank: int, world: int, model: str, config: dict[str, Any]) -> None:
    dense, expected = one_process(model, (5, 3, 7), 4, config["mask"])
    transformer, inputs = make_tiny_transformer(model), tiny_inputs(model, (5, 3, 7), 4)
    before = fingerprint(transformer)
    with torch.no_grad():
        dbsp_para.parallelize_transformer(transformer, config=config)
        assert_near(outputs(transformer, inputs), expected, dense)
        dbsp_para.unparallelize(transformer)
        assert fingerprint(transformer) == before, "unparallelize left something behind"
        assert apart(outputs(transformer, inputs), dense) == 0


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(
    ("model", "strategy", "source"),
    [("wan", "U1R2", "tiles"), ("cogvideox", "U2R1", "svg")],
)
def test_transformer_equals_one_process(pool, model, strategy, source):
    """Tries sources of patterns in whole models; tests/diffusers/models has every strategy of each class."""
    pool(2).run(run_transformer, model, {"mask": SOURCES[source], "strategy": strategy})


def run_through_para_attn(rank: int, world: int, ring: int) -> None:
    """Runs a transformer through para-attn's own function and device mesh, which also say the strategy."""
    from para_attn.context_parallel.diffusers_adapters import parallelize_transformer

    dense, expected = one_process("wan", (3, 5, 7), 1, MASK)
    transformer, mesh = make_tiny_transformer("wan"), para_mesh(world, max_ring_dim_size=ring)
    with torch.no_grad():
        parallelize_transformer(transformer, mesh=mesh, attn="dbsp", config={"mask": MASK})
        assert dbsp_para.session_of(transformer).strategy.ring == ring
        assert_near(outputs(transformer, tiny_inputs("wan")), expected, dense)


@pytest.mark.usefixtures("debug")
def test_para_attn_with_its_own_mesh_equals_one_process(pool):
    pytest.importorskip("para_attn")
    for ring in (1, 2):
        pool(2).run(run_through_para_attn, ring)


def run_mistakes(rank: int, world: int) -> None:
    from para_attn.context_parallel.diffusers_adapters import parallelize_transformer

    taken = parallelize_transformer(make_tiny_transformer("wan"), mesh=para_mesh(world))
    answer = said(lambda: dbsp_para.parallelize_transformer(taken))
    assert answer.startswith("UserError: this transformer is already parallelized")
    mesh, transformer = para_mesh(world, max_batch_dim_size=2), make_tiny_transformer("wan")
    answer = said(lambda: dbsp_para.parallelize_transformer(transformer, mesh=mesh))
    assert answer.startswith("UserError: the mesh splits the batch over 2 groups of ranks")
    assert dbsp_para.session_of(transformer) is None


def test_transformer_of_para_attn_and_mesh_that_splits_the_batch_are_rejected(pool):
    pytest.importorskip("para_attn")
    pool(2).run(run_mistakes)


@pytest.fixture
def adapters() -> list[Any]:
    pytest.importorskip("para_attn")
    package = "para_attn.context_parallel.diffusers_adapters"
    return [importlib.import_module(f"{package}.{name}") for name in ("wan", "cogvideox")]


def test_para_attn_accepts_the_argument_until_uninstalled(adapters):
    assert dbsp_para.install()
    wrapped = [adapter.parallelize_transformer for adapter in adapters]
    for parallelize in (wrapped[0], dbsp_para.parallelize_transformer, dbsp_para.parallelize_pipe):
        with pytest.raises(UserError, match="unknown attn 'flash'; pass attn=\"dbsp\""):
            parallelize(object(), attn="flash")
    dbsp_para.uninstall()
    assert all(a.parallelize_transformer is not w for a, w in zip(adapters, wrapped, strict=True))
    assert dbsp_para.install()


def test_para_attn_without_an_expected_name_is_left_unpatched(adapters, monkeypatch):
    wan, cogvideox = adapters
    dbsp_para.uninstall()
    own = cogvideox.parallelize_transformer
    monkeypatch.setattr(wan, "parallelize_transformer", lambda transformer: transformer)
    missing = r"wan:parallelize_transformer\(mesh\), which db-SP expects; install para-attn"
    with pytest.raises(UserError, match=missing):
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
    """Writes an installation's metadata, in which torch finds the entry points of pyproject.toml."""
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
