"""Costs of steps on simulated GPUs: host waits, of which steady steps make none, launches and operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dbsp_diffusers
from dbsp_core import SequenceGroup
from dbsp_core.comm.consistency import agree, gather_texts
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.reports.observer import observed_session
from dbsp_core.runtime.consistency_checks import check_attention
from dbsp_core.runtime.engine_session import EngineSession
from dbsp_diffusers import packed_forward
from tests.core.runtime.session_cases import WIDTH
from tests.diffusers.packed.packed_model_cases import PackedCase
from tests.diffusers.packed.packed_model_cases import moved as moved_sample
from tests.gpu_node.faults import recorded
from tests.gpu_node.node import GpuNode
from tests.simulated import model_cases
from tests.simulated.model_cases import brief_inputs, own_device
from tests.simulated.test_sessions import BLOCKS, MASKS, SPARGE, WINDOW
from tests.support.models.tiny_transformers import make_brief_transformer
from tests.support.outcomes import assert_near, said
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

LONG = pytest.mark.long


@contextmanager
def counted() -> Iterator[SimpleNamespace]:
    """Counts what all ranks do within the block, from 0.

    waits: host waits of the ranks' own threads in the product's files, by line of code;  host_waits: all of them
    past_waits: those for work of the step before;  launches: of Triton and NCCL;  operators: torch's; all per rank
    variants: compiled ones, by kernel, since the test began;  new: kernels of which the block asked for one more
    """
    group, step = SequenceGroup.from_group().auxiliary("steps of tests"), SimpleNamespace()
    group.barrier()
    before = {kernel: len(variants) for kernel, variants in recorded.variants.items()}
    group.barrier()
    if group.rank == 0:
        recorded.begin_step()
    group.barrier()
    yield step
    group.barrier()
    step.waits, step.host_waits = recorded.waits_of_product(), dict(recorded.host_waits)
    for name in ("past_waits", "launches", "operators"):
        setattr(step, name, sum(getattr(recorded, name).values()) / group.size)
    step.variants = {kernel: len(variants) for kernel, variants in recorded.variants.items()}
    step.new = [kernel for kernel, count in step.variants.items() if count > before.get(kernel, 0)]
    group.barrier()


def comparisons(rank: int, world: int) -> None:
    """Compares what ranks compare, sent from host to host: numbers, a vote, and a text of each rank."""
    device, group = own_device(rank), SequenceGroup.from_group()
    session = EngineSession(group, Strategy(world, 1), 8, 1, {"mask": {"source": "dense"}})
    on_host = torch.ones(1, 8, 4, 16)
    q = on_host.to(device)

    def check(q: torch.Tensor) -> None:
        check_attention(group, q, q, q, None, None, prepared=None, debug=False)

    with counted() as step:
        check(q)
        agree(group, {"numbers differ on rank(s) {}": 1})
        votes = [session.all_agree(answer) for answer in (True, rank == 0)]
        texts = gather_texts(group, f"rank {rank}")
        answer = said(lambda: check(on_host if rank == 1 else q))
    assert votes == [True, False]
    assert texts == ["rank 0", "rank 1"]
    assert answer.startswith("UserError: batch, head size, dtype or device type of q, k and v")
    assert "differ on rank(s) [1]" in answer
    assert step.host_waits == {}


def test_comparisons_make_no_host_wait(gpu_node: GpuNode) -> None:
    gpu_node.run(2, comparisons)


def steady_step(
    rank: int, world: int, settings: dict[str, Any], strategy: str, launches: int, operators: int, waits: int = 0
) -> None:
    """Checks the forward pass of one layer after three others, with inputs that are on the device already."""
    device, heads, video = own_device(rank), 4, Video((3, 3, 5))
    config, chosen = DbspConfig.load(settings), Strategy.parse(strategy)
    session = observed_session(config, SequenceGroup.from_group(), chosen, heads, 1, lambda: 50)
    generator = torch.Generator().manual_seed(0)

    def draw(shard: int) -> list[torch.Tensor]:
        return [torch.randn(1, heads, shard, WIDTH, generator=generator).to(device) for _ in range(3)]

    for step in range(3):
        shard = session.begin(video, timestep=900.0 - step, device=device).shard
        session.attend(0, *draw(shard))
    qkv = draw(shard)
    with counted() as found:
        session.begin(video, timestep=897.0, device=device)
        session.attend(0, *qkv)
    session.flush()
    assert sum(found.waits.values()) == waits * world, found.waits
    assert all("mask_counts.py" in line for line in found.waits), found.waits
    assert found.past_waits == (settings["mask"]["source"] == "sparge" and not waits), (
        "but for row counts, whose copy began one step ago"
    )
    assert (found.launches <= launches, found.operators <= operators) == (True, True), found
    assert found.new == []
    assert all(count <= VARIANTS.get(kernel, 1) for kernel, count in found.variants.items()), found.variants


STEADY = {
    "sparge": {"mask": SPARGE, "reuse": 100.0},
    "window": {"mask": WINDOW},
    "int8 both ways": {"mask": WINDOW, "precision": {"qkv": "int8", "out": "int8"}},
    "sparge, report": {"mask": SPARGE, "reuse": 100.0, "report": "nowhere"},
}
COSTS = {
    ("U4R1", "window"): (8, 2),
    ("U2R2", "sparge"): (23, 16),
    ("U1R4", "window"): (20, 5),
    ("U1R4", "sparge"): (30, 18),
    ("U2R1", "int8 both ways"): (12, 10),
    ("U1R2", "sparge, report"): (23, 16),
}
"""Of one attention on one rank, at most: Triton launches and NCCL's collectives; torch's operators on the device."""
VARIANTS = {"copy_kernel": 5, "forward_kernel": 2, "quantise_kernel": 3}
"""Compiled variants of a kernel over all ranks and steps, at most; of the others one.

Short segments are copied several at a time, by powers of four of a table's mean length: a variant each.
"""


@pytest.mark.parametrize(
    ("strategy", "name"), [pytest.param(*one, marks=LONG if one[0] == "U1R4" else ()) for one in COSTS]
)
def test_steady_step_makes_no_host_wait_and_few_launches(gpu_node: GpuNode, strategy: str, name: str) -> None:
    gpu_node.run(Strategy.parse(strategy).world, steady_step, STEADY[name], strategy, *COSTS[strategy, name])


def test_plan_of_the_calls_own_counts_makes_one_host_wait(gpu_node: GpuNode) -> None:
    settings = STEADY["sparge"] | {"plan": "current"}
    gpu_node.run(2, steady_step, settings, "U2R1", 19, 15, 1)


def known_generation(rank: int, world: int, settings: dict[str, Any], strategy: str, training: bool) -> None:
    """Checks the last pass of a second generation, whose timesteps are on the device, and its backward.

    Host waits do not depend on how many blocks there are: two of queries, three of keys.
    """
    device, heads, video = own_device(rank), 2, Video((2, 3, 4))
    config, chosen = DbspConfig.load(settings), Strategy.parse(strategy)
    session = observed_session(config, SequenceGroup.from_group(), chosen, heads, 1, lambda: 2)
    draws, shard = torch.Generator().manual_seed(0), session.begin(video, device=device).shard
    for _ in range(2):
        for timestep in torch.linspace(999.0, 0.0, 2).to(device):
            qkv = [torch.randn(1, heads, shard, WIDTH, generator=draws).to(device) for _ in range(3)]
            with torch.set_grad_enabled(training), counted() as step:
                session.begin(video, timestep=timestep.expand(2), device=device)
                out = session.attend(0, *(one.requires_grad_(training) for one in qkv))
                if training:
                    out.backward(torch.ones_like(out))
    session.flush()
    assert step.waits == {}


KEPT = {"reuse": 100.0}
SEVERAL = {"source": "union", "of": [MASKS[name] for name in ("window", "sparge", "sol")]}
BY_STEP = {"source": "synthetic", "density": 0.4, "drift": 0.2, **BLOCKS}
PASSES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "by step": ({"mask": BY_STEP, **KEPT}, "U1R2", False),
    "nabla": ({"mask": MASKS["nabla"], **KEPT}, "U1R2", False),
    "union, dense steps": ({"mask": SEVERAL, "dense_schedule": {"first_steps": 1}, **KEPT}, "U2R1", False),
    "vsa": ({"mask": MASKS["vsa"], **KEPT}, "U2R1", False),
    "training": ({"mask": SPARGE, **KEPT}, "U2R1", True),
}


@pytest.mark.parametrize(("settings", "strategy", "training"), PASSES.values(), ids=PASSES)
def test_pass_of_known_generation_makes_no_host_wait(
    gpu_node: GpuNode, settings: dict[str, Any], strategy: str, training: bool
) -> None:
    gpu_node.run(2, known_generation, settings, strategy, training)


CONFIG = {"mask": model_cases.MASKS["static"]}
TIMESTEPS = (900.0, 700.0, 500.0, 300.0, 800.0, 600.0)
"""Two generations."""
FRAMEWORKS = ("dbsp_diffusers/", "dbsp_core/comm/")
COMPARING = "dbsp_diffusers/sharding/generation_checks.py"


@shared
@torch.no_grad()
def passes_on_one_process() -> list[torch.Tensor]:
    transformer, inputs = make_brief_transformer("wan"), brief_inputs("wan")
    attach_single_process(transformer, CONFIG)
    return [transformer(**inputs | {"timestep": torch.tensor([one])})[0] for one in TIMESTEPS]


@torch.no_grad()
def passes(rank: int, world: int) -> None:
    """Runs a transformer in a loop of a user's own, with inputs off by rounding: all compute with the first rank's."""
    device, expected = own_device(rank), passes_on_one_process()
    transformer, waits = make_brief_transformer("wan").to(device), []
    dbsp_diffusers.enable(transformer, CONFIG)
    off = {
        name: (one * (1 + 1e-3 * rank)).to(device) if torch.is_tensor(one) else one
        for name, one in brief_inputs("wan").items()
    }
    for timestep, right in zip(TIMESTEPS, expected, strict=True):
        given = off | {"timestep": torch.full((1,), timestep, device=device)}
        with counted() as step:
            out = transformer(**given)[0]
        assert_near(out, right)
        waits.append([line for line in step.host_waits if line.partition(" at ")[2].startswith(FRAMEWORKS)])
    dbsp_diffusers.disable(transformer)
    assert any(COMPARING in line for line in waits[0]), "inputs are compared"
    assert any(COMPARING in line for line in waits[5]), "timesteps are known a pass later"
    assert waits[2] == waits[3] == [], waits


def test_steady_passes_use_the_first_ranks_inputs_without_host_waits(gpu_node: GpuNode) -> None:
    gpu_node.run(2, passes)


@torch.no_grad()
def guided_steps(rank: int, world: int) -> list[str]:
    """Runs both CFG passes of four steps on two halves, with latents that drift in the third. Returns what is said."""
    device, answers, expected = own_device(rank), [], passes_on_one_process()
    transformer = make_brief_transformer("wan").to(device)
    dbsp_diffusers.enable(transformer, CONFIG, guidance=True)
    inputs = {name: one.to(device) if torch.is_tensor(one) else one for name, one in brief_inputs("wan").items()}
    for number, timestep in enumerate(TIMESTEPS[:4]):
        given = inputs | {"timestep": torch.full((1,), timestep, device=device)}
        if number == 2:
            given["hidden_states"] = given["hidden_states"] * (1 + rank)
        outs: list[torch.Tensor] = []

        def both(given: dict[str, Any] = given, outs: list[torch.Tensor] = outs) -> None:
            for context in ("cond", "uncond"):
                with transformer.cache_context(context):
                    outs.append(transformer(**given)[0])

        with counted() as step:
            answers.append(said(both))
        if number < 2:
            assert_near(outs, [expected[number]] * 2)
        if number in (1, 2):
            assert not [line for line in step.host_waits if line.partition(" at ")[2].startswith(FRAMEWORKS)]
    dbsp_diffusers.disable(transformer)
    return answers


def test_steps_on_two_halves_compare_them_without_host_waits(gpu_node: GpuNode) -> None:
    for answers in gpu_node.run(2, guided_steps):
        assert answers[:3] == ["nothing"] * 3
        assert answers[3].startswith("UserError: the latents differ on rank(s) [1]")


@torch.no_grad()
def packed_calls(rank: int, world: int) -> None:
    """Checks the third of three packed calls."""
    device = own_device(rank)
    drawn, _ = PackedCase(model="hunyuan", samples=(3,), brief=True, dtype=torch.float32).step(0, 1)
    transformer, samples = make_brief_transformer("hunyuan").to(device), [moved_sample(one, device) for one in drawn]
    dbsp_diffusers.enable(transformer, CONFIG | {"bags": "g2n1"})
    for timestep in (900.0, 800.0, 700.0):
        with counted() as step:
            packed_forward(transformer, samples, timestep=timestep)
    dbsp_diffusers.disable(transformer)
    assert step.waits == {}


def test_steady_packed_call_makes_no_host_wait(gpu_node: GpuNode) -> None:
    gpu_node.run(2, packed_calls)
