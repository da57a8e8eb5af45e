"""A Wan with the gates of FastWan's coarse branch, put in by hand or read from a checkpoint, which diffusers drops."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch

import dbsp_diffusers
from dbsp_core.config import DbspConfig
from dbsp_core.sources import vsa
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.gates import branch_layers_in_checkpoint
from tests.support.models.gated_wan import (
    FASTWAN21,
    FASTWAN22,
    VSA,
    add_to_checkpoint,
    gate_weights,
    named_gates,
    put_gates,
    save_gated,
)
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import alone, apart, assert_near, outputs, said

WINDOW = {"source": "window", "window": [1, 3, 3], "tile": [2, 2, 4], "block_q": 16, "block_k": 16}
UNION = {"source": "union", "of": [VSA, WINDOW]}
_WITHOUT = {"vsa": {"coarse": False}, "union": {"of": [VSA | {"coarse": False}, WINDOW]}}
THW = {"vsa": (3, 5, 7), "union": (4, 4, 8)}
"""A window's blocks are whole tiles where tiles divide the video."""
REPOSITORY = "some-lab/tiny-fastwan"


def load(source: str | Path, **options: Any) -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel.from_pretrained(str(source), local_files_only=True, **options)


def one_process(transformer: Any, mask: dict[str, Any], batch: int = 1) -> list[torch.Tensor]:
    return alone(transformer, tiny_inputs("wan", THW[mask["source"]], batch), {"mask": mask})


@pytest.fixture(scope="module")
def wan() -> Any:
    return make_tiny_transformer("wan")


@pytest.fixture(scope="module")
def checkpoint(wan, tmp_path_factory) -> Path:
    """Saves one file, with the names of FastWan2.1."""
    return save_gated(wan, tmp_path_factory.mktemp("fastwan"))


def cached(folder: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Puts a pipeline's folder where Hugging Face's cache has that of REPOSITORY."""
    repository = cache / f"models--{REPOSITORY.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))


def run(
    rank: int, world: int, transformers: list[Any], mask: dict[str, Any], expected: list[torch.Tensor], batch: int = 1
) -> None:
    """Compares ranks that have a transformer each with one process; disabled again, they leave nothing."""
    transformer = transformers[rank]
    before, names = fingerprint(transformer), list(transformer.state_dict())
    dbsp_diffusers.enable(transformer, {"mask": mask, "strategy": f"U1R{world}"})
    with torch.no_grad():
        assert_near(outputs(transformer, tiny_inputs("wan", THW[mask["source"]], batch)), expected)
    dbsp_diffusers.disable(transformer)
    assert fingerprint(transformer) == before, "disable left something behind"
    assert list(transformer.state_dict()) == names


@pytest.mark.usefixtures("debug")
def test_gates_put_in_by_hand_equal_one_process(threads):
    transformers = [put_gates(make_tiny_transformer("wan")) for _ in range(3)]
    expected, plain = (one_process(transformers[0], VSA | {"coarse": coarse}, 2) for coarse in (True, False))
    assert apart(expected, plain) > 1e-3, "the branch must matter"
    threads(3).run(run, transformers, VSA, expected, 2)


@pytest.mark.parametrize(
    ("kind", "mask"), [("file", VSA), ("shards", UNION), ("cache", VSA)], ids=["file", "shards", "cache"]
)
def test_equals_gates_put_in_by_hand(threads, wan, checkpoint, tmp_path, monkeypatch, kind, mask):
    source, options = str(checkpoint), {}
    if kind == "shards":
        source = str(save_gated(wan, tmp_path / "shards", FASTWAN22, max_shard_size="100KB"))
        assert len(list(Path(source).glob("*.safetensors"))) > 2
    if kind == "cache":
        shutil.copytree(checkpoint, tmp_path / "pipeline" / "transformer")
        cached(tmp_path / "pipeline", monkeypatch, tmp_path / "cache")
        source, options = REPOSITORY, {"subfolder": "transformer"}
    expected = one_process(put_gates(load(source, **options)), mask)
    loaded = [load(source, **options) for _ in range(2)]  # not on threads: diffusers patches torch meanwhile
    assert apart(one_process(loaded[0], mask | _WITHOUT[mask["source"]]), expected) > 1e-3, "the gates must matter"
    assert apart(one_process(loaded[0], mask), expected) == 0
    threads(2).run(run, loaded, mask, expected)


def test_gates_are_read_where_the_mask_needs_them_and_the_layer_is_lacking(wan, checkpoint, tmp_path):
    mask = DbspConfig.load({"mask": VSA}).mask
    assert branch_layers_in_checkpoint(load(checkpoint), DbspConfig.load({"mask": VSA | {"coarse": False}}).mask) == {}
    assert branch_layers_in_checkpoint(put_gates(load(checkpoint)), mask) == {}
    assert branch_layers_in_checkpoint(make_tiny_transformer("flux"), mask) == {}
    wan.save_pretrained(tmp_path)
    add_to_checkpoint(tmp_path, {name: one for name, one in named_gates(wan).items() if name.endswith("weight")})
    assert [gate.bias for gate in branch_layers_in_checkpoint(load(tmp_path), mask).values()] == [None] * len(
        wan.blocks
    )


SPOILED = {
    "a layer is missing": "for 1 of 2 layers, but not for blocks.1; load",
    "another shape": r"to_gate_compress.weight is torch.float32 of shape \[144, 143\], expected",
    "whole numbers": "to_gate_compress.weight is torch.int8 of shape",
    "a shard is missing": "cannot be read from .*-00001-of-.*; download the checkpoint again",
}
"""What is wrong with a checkpoint's gates, and what is said of it."""


def spoil(kind: str, folder: Path, wan: Any) -> None:
    gates, first = named_gates(wan), f"{FASTWAN21.format(0)}.weight"
    if kind == "a layer is missing":
        gates = {name: one for name, one in gates.items() if not name.startswith("blocks.1.")}
    elif kind == "another shape":
        gates[first] = gates[first][:, 1:].contiguous()
    elif kind == "whole numbers":
        gates[first] = gates[first].to(torch.int8)
    wan.save_pretrained(folder, **({"max_shard_size": "100KB"} if kind == "a shard is missing" else {}))
    add_to_checkpoint(folder, gates)


def unsupported(rank: int, world: int, transformers: list[Any]) -> str:
    """Returns the error that is raised on each rank; its transformer is as it was."""
    before = fingerprint(transformers[rank])
    answer = said(lambda: dbsp_diffusers.enable(transformers[rank], {"mask": VSA}))
    assert fingerprint(transformers[rank]) == before
    return answer


@pytest.mark.parametrize("kind", SPOILED)
def test_mistake_on_one_rank_is_rejected_on_all(threads, wan, checkpoint, tmp_path, kind):
    spoil(kind, tmp_path, wan)
    transformers = [load(checkpoint), load(tmp_path)]
    if kind == "a shard is missing":
        min(tmp_path.glob("*.safetensors")).unlink()
    for answer in threads(2).run(unsupported, transformers):
        assert re.match(rf"UserError: rank\(s\) \[1\]: .*{SPOILED[kind]}.* or set coarse: false", answer)


def test_ranks_must_all_find_them(threads, wan, checkpoint, tmp_path):
    wan.save_pretrained(tmp_path)
    for answer in threads(3).run(unsupported, [load(checkpoint), load(checkpoint), load(tmp_path)]):
        assert "weights differ in name, shape, dtype, adapters or branches on rank(s) [2]" in answer


def test_gates_of_two_transformers_are_their_own(wan, tmp_path):
    for number, name in enumerate(("transformer", "transformer_2")):
        save_gated(wan, tmp_path / name, seed=number)
    mask = DbspConfig.load({"mask": VSA}).mask
    pipe = SimpleNamespace(
        transformer=load(tmp_path, subfolder="transformer"), transformer_2=load(tmp_path, subfolder="transformer_2")
    )
    dbsp_diffusers.enable(pipe, {"mask": VSA})
    for number, transformer in enumerate((pipe.transformer, pipe.transformer_2)):
        first = gate_weights(wan, number)[0]["weight"]
        assert torch.equal(transformer.blocks[0].attn1.to_gate_compress.weight, first)
    dbsp_diffusers.disable(pipe)
    with pytest.raises(UserError, match="has two transformers, and db-SP cannot tell which"):
        branch_layers_in_checkpoint(pipe.transformer_2, mask)
    assert branch_layers_in_checkpoint(load(tmp_path / "transformer_2"), mask)


def test_checkpoint_without_gates_is_unchanged(threads, wan, tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(vsa.log, "warning", said.append)
    vsa._say_without_gate.cache_clear()
    wan.save_pretrained(tmp_path)
    expected = one_process(load(tmp_path), VSA | {"coarse": False})
    threads(2).run(run, [load(tmp_path), load(tmp_path)], VSA, expected)
    assert len(said) == 1
    assert "no gate (attn1.to_gate_compress) found" in said[0]
