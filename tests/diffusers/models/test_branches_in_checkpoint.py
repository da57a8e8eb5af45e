"""A Wan with FastWan's gates or TurboWan's projections, put in by hand or from a checkpoint: diffusers drops them."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from torch import nn

import dbsp_diffusers
from dbsp_core.config import DbspConfig
from dbsp_core.sources import vsa
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.gates import branch_layers_in_checkpoint
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import alone, apart, assert_near, outputs, said

VSA = {"source": "vsa", "sparsity": 0.5, "tile": [2, 2, 4], "block_q": 16, "block_k": 16}
WINDOW = {"source": "window", "window": [1, 3, 3], "tile": [2, 2, 4], "block_q": 16, "block_k": 16}
UNION = {"source": "union", "of": [VSA, WINDOW]}
_WITHOUT = {"vsa": {"coarse": False}, "union": {"of": [VSA | {"coarse": False}, WINDOW]}}
THW = {"vsa": (3, 5, 7), "union": (4, 4, 8)}
"""A window's blocks are whole tiles where tiles divide the video."""
REPOSITORY = "some-lab/tiny-fastwan"
FASTWAN21, FASTWAN22 = "to_gate_compress", "attn1.to_gate_compress"
TURBOWAN = "attn1.attn_op.local_attn.proj_l"
"""What the checkpoints of that name call the layer of a block."""
Weights = list[dict[str, torch.Tensor]]
"""By block."""


def drawn(transformer: Any, seed: int = 5, heads: int = 1) -> Weights:
    """Returns weight and bias of each block's gate, or of its projection of a head's channels."""
    generator = torch.Generator().manual_seed(seed)
    width = transformer.blocks[0].attn1.to_q.in_features // heads
    sizes = {"weight": (width, width), "bias": (width,)}
    return [
        {part: torch.randn(size, generator=generator) * width**-0.5 for part, size in sizes.items()}
        for _ in transformer.blocks
    ]


def put(transformer: Any, path: str, weights: Weights) -> Any:
    """Gives blocks a layer, as a user may."""
    for block, values in zip(transformer.blocks, weights, strict=False):
        *parents, name = path.split(".")
        for parent in parents:
            if not hasattr(block, parent):
                block.add_module(parent, nn.Module())
            block = getattr(block, parent)
        sizes = values["weight"].shape[::-1]
        layer = nn.utils.skip_init(nn.Linear, *sizes, bias="bias" in values)  # torch's generator is all threads'
        for part, value in values.items():
            setattr(layer, part, nn.Parameter(value, requires_grad=value.is_floating_point()))
        block.add_module(name, layer)
    return transformer


def put_gates(transformer: Any) -> Any:
    return put(transformer, FASTWAN22, drawn(transformer))


def save(transformer: Any, folder: Path, path: str, weights: Weights, **options: Any) -> Path:
    """Saves a transformer with a layer in its blocks, which it has not itself."""
    put(copy.deepcopy(transformer), path, weights).save_pretrained(folder, **options)
    return folder


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
    return save(wan, tmp_path_factory.mktemp("fastwan"), FASTWAN21, drawn(wan))


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
        source = str(save(wan, tmp_path / "shards", FASTWAN22, drawn(wan), max_shard_size="100KB"))
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
    save(wan, tmp_path, FASTWAN21, [{"weight": gate["weight"]} for gate in drawn(wan)])
    assert [gate.bias for gate in branch_layers_in_checkpoint(load(tmp_path), mask).values()] == [None, None]


SPOILED = {
    "a layer is missing": "for 1 of 2 layers, but not for blocks.1; load",
    "another shape": r"to_gate_compress.weight is torch.float32 of shape \[144, 143\], expected",
    "whole numbers": "to_gate_compress.weight is torch.int8 of shape",
    "a shard is missing": "cannot be read from .*-of-.*; download the checkpoint again",
}
"""What is wrong with a checkpoint's gates, and what is said of it."""


def spoil(kind: str, folder: Path, wan: Any) -> None:
    gates, options = drawn(wan), {}
    if kind == "a layer is missing":
        del gates[1]
    elif kind == "another shape":
        gates[0]["weight"] = gates[0]["weight"][:, 1:].contiguous()
    elif kind == "whole numbers":
        gates[0]["weight"] = gates[0]["weight"].to(torch.int8)
    elif kind == "a shard is missing":
        options = {"max_shard_size": "100KB"}
    save(wan, folder, FASTWAN21, gates, **options)


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
        for file in tmp_path.glob("*.safetensors"):
            file.unlink()
    for answer in threads(2).run(unsupported, transformers):
        assert re.match(rf"UserError: rank\(s\) \[1\]: .*{SPOILED[kind]}.* or set coarse: false", answer)


def test_ranks_must_all_find_them(threads, wan, checkpoint, tmp_path):
    wan.save_pretrained(tmp_path)
    for answer in threads(3).run(unsupported, [load(checkpoint), load(checkpoint), load(tmp_path)]):
        assert "weights differ in name, shape, dtype, adapters or branches on rank(s) [2]" in answer


def test_gates_of_two_transformers_are_their_own(wan, tmp_path):
    for number, name in enumerate(("transformer", "transformer_2")):
        save(wan, tmp_path / name, FASTWAN21, drawn(wan, number))
    mask = DbspConfig.load({"mask": VSA}).mask
    pipe = SimpleNamespace(
        transformer=load(tmp_path, subfolder="transformer"), transformer_2=load(tmp_path, subfolder="transformer_2")
    )
    dbsp_diffusers.enable(pipe, {"mask": VSA})
    for number, transformer in enumerate((pipe.transformer, pipe.transformer_2)):
        first = drawn(wan, number)[0]["weight"]
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


SLA = {"source": "sla", "topk": 0.3, "block_q": 16, "block_k": 16}


def projected(rank: int, world: int, loaded: list[Any], expected: Any, plain: Any) -> None:
    """Compares ranks that have a transformer each with one process."""
    transformer = loaded[rank]
    dbsp_diffusers.enable(transformer, {"mask": SLA, "strategy": "U2R2"})
    assert transformer.blocks[0].attn1.proj_l.weight.dtype == torch.float32
    with torch.no_grad():
        assert_near(outputs(transformer, tiny_inputs("wan", (3, 5, 7), 2)), expected, plain)
    dbsp_diffusers.disable(transformer)
    assert not hasattr(transformer.blocks[0].attn1, "proj_l")


def test_projections_of_a_checkpoint_equal_those_put_in_by_hand(threads, wan, tmp_path):
    projections = drawn(wan, heads=wan.blocks[0].attn1.heads)
    stock = put(copy.deepcopy(wan), "attn1.proj_l", projections)
    expected, plain = (
        alone(stock, tiny_inputs("wan", (3, 5, 7), 2), {"mask": SLA | {"linear": linear}}) for linear in (True, False)
    )
    loaded = [load(save(wan, tmp_path, TURBOWAN, projections)) for _ in range(4)]
    threads(4).run(projected, loaded, expected, plain)


def test_a_projection_of_another_size_is_rejected(wan, tmp_path):
    transformer = load(save(wan, tmp_path, TURBOWAN, [{"weight": torch.zeros(3, 3)} for _ in range(2)]))
    with pytest.raises(UserError, match=r"proj_l.weight is torch.float32 of shape \[3, 3\].*linear: fal"):
        dbsp_diffusers.enable(transformer, {"mask": SLA})
