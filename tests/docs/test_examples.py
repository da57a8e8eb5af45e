"""The files of examples/ run as they are, on two processes with the tiny model; commands that need GPUs are read."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dbsp_cli.tiny_models import make_tiny
from dbsp_core import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.sources import LocalQK, MaskRequest
from tests.docs.ranks import run_on_ranks
from tests.support.ports import free_port
from tests.support.repository import ROOT

EXAMPLES = ROOT / "examples"
LESS = {
    r'("num_inference_steps": |"sparge.*", )12\b': r"\g<1>1",
    r'"height": 144, "width": 240, "num_frames": \d+': '"height": 64, "width": 96, "num_frames": 9',
}
"""Fewer steps of a smaller video, for time's sake."""
ON_CPU = """import runpy, sys
from dbsp_xdit.runner import allow_all_degrees, install
allow_all_degrees(install())  # xfuser cannot be imported without a GPU otherwise
sys.argv = ["xdit_wan.py", *sys.argv[1:]]
runpy.run_path({file!r}, run_name="__main__")
"""
SMALL = "--model tiny --ring_degree 2 --height 64 --width 96 --num_frames 9 --num_inference_steps 1 --prompt ball"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes a folder with the tiny model in it."""
    folder = tmp_path_factory.mktemp("examples")
    make_tiny("wan-trained", folder / "tiny")
    return folder


def require(package: str) -> None:
    if importlib.util.find_spec(package) is None:  # xfuser cannot be imported without a GPU
        pytest.skip(f"{package} is not installed")


def start(folder: Path, name: str, *arguments: str, ranks: int = 2) -> dict[str, str]:
    """Runs a copy of an example on some processes, and returns what each rank wrote, by rank."""
    text = (EXAMPLES / name).read_text()
    if name in ("diffusers_wan.py", "paraattention_wan.py", "packed.py"):
        for large, small in LESS.items():
            text, replaced = re.subn(large, small, text)
            assert replaced
    if name.startswith("xdit"):
        require("xfuser")
        (folder / "original.py").write_text(text)
        text = ON_CPU.format(file=str(folder / "original.py"))
    (folder / name).write_text(text)
    for helper in ("data_codes.py", "denoise_packed.py", "encode_balanced.py"):
        shutil.copy(EXAMPLES / helper, folder)
    return run_on_ranks(ranks, folder, name, *arguments)[0]


def videos(folder: Path) -> list[str]:
    """Returns names of the videos that are there, and removes them."""
    found = sorted(folder.glob("*.mp4"))
    assert all(path.stat().st_size > 1000 for path in found)
    for path in found:
        path.unlink()
    return [path.name for path in found]


def test_the_attention_alone_equals_torch_s_own(tmp_path):
    said = start(tmp_path, "attention.py")
    for rank in ("0", "1"):
        (found,) = re.findall(rf"rank {rank}: ρ_s (\S+) → (\S+), largest difference (\S+)\n", said[rank])
        before, after, difference = map(float, found)
        assert 1 <= after < before
        assert 0 < difference < 1e-5


def test_the_method_prints_what_both_plans_give(tmp_path):
    said = start(tmp_path, "method.py", "--ulysses", "2", "--tokens", "203")
    lines = re.findall(r"(.+): ρ_s (\S+), K/V received (\S+) MB, difference (\S+)\n", said["0"])
    assert [name for name, *_ in lines] == ["plain USP", "balanced"]
    (before, *_), (after, *_) = [map(float, numbers) for _, *numbers in lines]
    assert 1 <= after < before
    assert said["1"] == ""


def test_the_method_fails_if_outputs_differ_from_dense_attention(monkeypatch):
    """Runs one rank in this process, with a wrong scale."""
    text, scale = (EXAMPLES / "method.py").read_text(), "rows.shape[-1] ** -0.5"
    assert text.count(scale) == 1
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["method.py", "--ulysses", "1", "--tokens", "203"])
    method: dict[str, Any] = {"__name__": "method"}
    exec(compile(text.replace(scale, "rows.shape[-1] ** -0.4"), "method.py", "exec"), method)
    with pytest.raises(SystemExit, match=r"^plain USP: largest difference from dense attention is \S+, above 1e-5$"):
        method["main"]()
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments", "made"),
    [
        ("diffusers_wan.py", "", ["video.mp4"]),
        ("xdit_wan.py", SMALL, ["video.mp4"]),
        ("paraattention_wan.py", "", ["video.mp4"]),
        ("packed.py", "", ["video0.mp4", "video1.mp4"]),
        ("train.py", "", []),
    ],
)
def test_a_script_makes_its_videos_or_ends_with_a_loss(folder, name, arguments, made):
    if name.startswith("para"):
        require("para_attn")
    said = start(folder, name, *arguments.split())
    assert videos(folder) == made
    if name == "diffusers_wan.py":
        shown = ast.literal_eval(said["0"].strip().splitlines()[-1])
        assert shown["calls"] > 0
        assert 1 <= shown["mean_rho"] < 1.5
    if name == "train.py":
        assert re.findall(r"step (\d): loss \d+\.\d+", said["0"]) == ["0", "1", "2"]


@pytest.mark.long
def test_training_in_two_stages_is_that_of_one_process(folder):
    line = re.compile(
        r"stage (\d), step \d+: loss (\d+\.\d+), approximation loss (\d\.\d+), sparsity (\d\.\d+), "
        r"(\d) sparse layers, K/V received (\d\.\d+)\n"
    )
    alone, shared = (
        [tuple(map(float, step)) for step in line.findall(start(folder, "two_stages.py", ranks=ranks)["0"])]
        for ranks in (1, 2)
    )
    *first, last = [approximation for stage, _, approximation, *_ in shared if stage == 1]
    assert last <= 0.01 <= min(first)
    assert [step[:5] for step in shared] == [pytest.approx(step[:5], abs=1e-4) for step in alone]
    assert [sparse for stage, *_, sparse, _ in shared if stage == 2] == [4] * 8


def learn_masks(rank: int, world: int) -> tuple[list[float], np.ndarray, float]:
    """Trains predictors on queries and keys of ten dimensions. Returns the losses of stage 1, stage 2's first mask,
    and the share of the attention that its blocks hold of what the best blocks, as many, would hold.
    """
    source = runpy.run_path(str(EXAMPLES / "two_stages.py"))["TwoStages"](1, 5, 24)
    request, draws = MaskRequest(0, 5, (3, 8, 8), layers=1), torch.Generator().manual_seed(0)
    bases = torch.randn(2, 5, 10, 24, generator=draws)
    layout = SequenceLayout.contiguous(request.tokens, world)
    token, slot = layout.tokens_at(rank)
    losses = []
    while True:
        q, k = (torch.randn(1, 5, request.tokens, 10, generator=draws) @ basis for basis in bases)
        shards = torch.zeros(2, 1, 5, layout.shard, 24)
        shards[:, :, :, slot] = torch.stack([q, k])[:, :, :, token]
        sparse = source.is_sparse(source.layers[0])
        mask = source.mask(request, LocalQK(*shards, layout, SequenceGroup.from_group(), 24**-0.5))
        if sparse:
            break
        assert mask.bits.all()
        losses.append(source.end_step())
    mean = q[0].unflatten(1, (-1, 16)).mean(dim=2)
    mass = torch.softmax(mean @ k[0].mT * 24**-0.5, dim=-1).unflatten(2, (-1, 16)).sum(dim=3)
    best = mass.sort(dim=-1, descending=True).values * (torch.arange(12) < mask.bits.sum(dim=-1, keepdim=True))
    return losses, mask.bits.numpy(), float((mass * mask.bits).sum() / best.sum())


def test_predictors_learn_the_same_on_any_ranks(pool):
    (alone,) = pool(1).run(learn_masks)
    losses, bits, held = alone
    assert losses[-1] < 0.01 <= min(losses[:-1])
    assert 0.3 < 1 - bits.mean() < 0.9
    assert held > 0.95
    for of_rank in pool(2).run(learn_masks):
        assert of_rank[0] == pytest.approx(losses, abs=1e-6)
        assert (of_rank[1] == bits).all()


def knapformer(folder: Path, ranks: int, bags: str, streams: str) -> list[list[float]]:
    """Returns what each step prints: loss, gradient norm, WIR before and after, FBL and TPS."""
    given = ("--streams", streams, "--bags", bags, "--gamma", "0.5", "--steps", "2")
    said = start(folder, "train_knapformer.py", *given, ranks=ranks)["0"]
    number = r"([\d.]+|inf)"
    line = rf"loss {number}, gradient norm {number}, WIR {number} → {number}, FBL {number} s, TPS {number}, HFU"
    return [list(map(float, step)) for step in re.findall(line, said)]


@pytest.mark.long
def test_training_by_data_codes_is_that_of_one_process(folder):
    """Trains on images, a clip and nothing; compares losses and gradients."""
    streams = "g1b2i128f1s0,g1b1i192f17s1,g1b3i64f1s0,g1b0i64f1s0"
    alone = knapformer(folder, 1, "g1n1", streams)
    assert len(alone) == 2
    for bags in ("g4n1", "g1n2+g2n1"):
        for (loss, norm, before, after, *_), one in zip(knapformer(folder, 4, bags, streams), alone, strict=True):
            assert [loss, norm] == pytest.approx(one[:2], rel=1e-4), bags
            assert before == np.inf, "one loader has nothing"
            assert 1 <= after < np.inf


@pytest.mark.long
def test_encoders_of_packed_training_share_their_work(folder):
    """Lets one rank load a clip of nine frames and an image, the other one five images."""
    said = start(folder, "train_packed.py")
    found = [re.findall(r"rank \d: loaded (\d), encoded (\d) prompts and (\d) clips\n", said[rank]) for rank in "01"]
    assert sorted(found) == [[("2", "4", "1")] * 2, [("5", "3", "6")] * 2]
    assert [step for step, _ in re.findall(r"step (\d): loss of all samples (\d+\.\d+)", said["0"])] == ["0", "1"]


LOADS = [([[7, 2, 3], [1, 1]], [7, 7]), ([[4, 4, 4, 4], []], [8, 8]), ([[], []], [0, 0]), ([[5], [5]], [5, 5])]
"""Sizes of two ranks' items, and the work of each rank when it is balanced."""


def encode_items(rank: int, world: int) -> None:
    """Encodes items of `LOADS` with balanced work, and compares with each item encoded alone."""
    example = runpy.run_path(str(EXAMPLES / "encode_balanced.py"))
    worked: list[int] = []

    def encode(item: torch.Tensor) -> torch.Tensor:
        worked.append(len(item))
        return item.cumsum(0)[: len(item) // 2 + 1] @ torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    for loads, busy in LOADS:
        worked.clear()
        items = [torch.full((size, 3), 10.0 * rank + at) + torch.arange(3) for at, size in enumerate(loads[rank])]
        found, count = example["encode_balanced"](items, loads[rank], encode, "cpu")
        assert count == len(worked)
        assert example["gathered"](sum(worked)) == busy, loads
        assert len(found) == len(items)
        assert all(torch.equal(one, encode(item)) for one, item in zip(found, items, strict=True))


def test_items_are_encoded_with_balanced_work_and_the_results_of_one_process(pool):
    pool(2).run(encode_items)


def test_the_mask_is_what_its_words_say(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "my_masks", raising=False)
    source = DbspConfig.load(EXAMPLES / "my_masks.yaml").mask
    mask = source.mask(MaskRequest(0, 4, (5, 8, 8)))  # four blocks of 16 tokens a frame
    frame = mask.grid.q_axis.starts // 64
    expected = (abs(frame[:, None] - frame) <= 1) | (frame == 0)
    assert (mask.bits.numpy() == expected).all()
    assert mask.bits.shape[0] == 4


def test_command_of_the_table_has_a_plan(tmp_path, monkeypatch, dbsp):
    monkeypatch.chdir(shutil.copytree(EXAMPLES, tmp_path / "examples"))
    (line,) = re.findall(r"`((?:\w+=\S+ )*dbsp [^`]+)`(?= \|)", Path("README.md").read_text(encoding="utf-8"))
    assert line.startswith("PYTHONPATH=. dbsp ")
    monkeypatch.syspath_prepend(".")
    monkeypatch.delitem(sys.modules, "my_masks", raising=False)
    code, out, err = dbsp(*shlex.split(line)[2:], "--dry-run")
    assert code == 0, err
    assert "my_masks" in out + err
    assert videos(tmp_path / "examples") == []


def scripts() -> dict[str, str]:
    """Returns Python programs that a user may copy, by location: files of examples/, code in pages."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    blocks = {
        f"{page.name} {number}": block
        for page in pages
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
    }
    return blocks | {path.name: path.read_text() for path in sorted(EXAMPLES.glob("*.py"))}


def unknown_names(program: str) -> list[str]:
    """Returns what a program imports of ours, or calls with such arguments, and we do not have."""
    ours, unknown = {}, []
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            ours |= {one.name: importlib.import_module(one.name) for one in node.names if one.name[:5] == "dbsp_"}
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("dbsp_"):
            module = importlib.import_module(node.module)
            unknown += [one.name for one in node.names if not hasattr(module, one.name)]
            ours |= {one.asname or one.name: getattr(module, one.name, None) for one in node.names}
    for call in (node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)):
        package, _, name = ast.unparse(call.func).rpartition(".")
        if (package or name) not in ours:
            continue
        function = getattr(ours[package], name, None) if package else ours[name]
        taken = inspect.signature(function).parameters if function else {}
        unknown += [f"{name}({one.arg})" for one in call.keywords if one.arg and one.arg not in taken]
        unknown += [] if function else [name]
    return unknown


def test_programs_use_names_and_arguments_that_we_have():
    ours = re.compile(r"^ *(import|from) dbsp_", re.M)
    found = {name: unknown_names(text.replace("…", "...")) for name, text in scripts().items() if ours.search(text)}
    assert len(found) >= 8
    assert {name: names for name, names in found.items() if names} == {}


def test_scripts_for_gpus_set_the_device_before_they_join_the_ranks():
    joining = re.compile(r"init_process_group\((?!\"gloo\"\))")
    found = {name: text for name, text in scripts().items() if joining.search(text)}
    assert len(found) >= 8
    for name, text in found.items():
        before = text[: joining.search(text).start()]
        assert 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))' in before, name
        assert "get_node_local_rank" not in text, name
