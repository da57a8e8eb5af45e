"""Requests to an engine with two experts: each attention is that of the request's own step, and padding is no key."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from dbsp_core import BlockMask, SequenceGroup, Strategy
from dbsp_core.config import DbspConfig
from dbsp_core.masks.steps import StepClock
from dbsp_core.runtime.engine_session import EngineLayout, EngineSession
from dbsp_core.sources import MaskRequest
from scripts.checks.stress.frame import WORLDS, Outcome, Part
from tests.support.oracle import largest_difference
from tests.support.single_process import masked_attention

BOUND = 1e-5
HEADS, WIDTH = 3, 8
SOURCE = {"source": "callable", "function": "tests.support.user_masks:band", "depends_on": "step"}


@dataclass(frozen=True)
class Request:
    """One denoising, which may start late or be cut short.

    steps: of a whole one, of which those from `first` to before `end` run;  passes: of guidance, `left_out` of which
    the last step does not reach
    """

    steps: int
    first: int
    end: int
    passes: int
    left_out: int


@dataclass(frozen=True)
class Draw:
    """Requests one after another. boundary: the second expert's first step;  spare: slots of padding more on a rank"""

    strategy: str
    thw: tuple[int, int, int]
    spare: int
    boundary: int
    dense: tuple[int, int]
    names_branches: bool
    requests: tuple[Request, ...]
    seed: int

    @property
    def world(self) -> int:
        return Strategy.parse(self.strategy).world


def _request(rng: random.Random) -> Request:
    steps, passes = rng.randint(1, 6), rng.randint(1, 2)
    first = rng.choice([0, 0, rng.randrange(steps)])
    end = rng.choice([steps, steps, rng.randint(first + 1, steps)])
    return Request(steps, first, end, passes, rng.randrange(passes))


class Engines(Part):
    """Sessions of engines on pools of processes."""

    name = "engines"
    most_tries = 30
    preloaded = ("tests.support.interpreter", "scripts.checks.stress.engines_part")

    def draw(self, seed: int, number: int) -> Draw:
        rng = random.Random(f"{seed}:{number}")
        strategy = str(rng.choice(Strategy.all_for(rng.choice(WORLDS[:7]))))
        thw = rng.randint(1, 4), rng.randint(2, 5), rng.randint(2, 5)
        dense, requests = (rng.randint(0, 2), rng.randint(0, 2)), [_request(rng) for _ in range(rng.randint(2, 5))]
        spare, boundary, names = rng.choice([0, 0, 7]), rng.randint(1, 4), rng.random() < 0.5
        return Draw(strategy, thw, spare, boundary, dense, names, tuple(requests), rng.randrange(99))

    def smaller(self, case: Draw) -> Iterator[Draw]:
        """Yields cases with one request less, or a simpler layout."""
        for number in range(len(case.requests)) if len(case.requests) > 1 else ():
            fewer = replace(case, requests=case.requests[:number] + case.requests[number + 1 :])
            if number == 0 or case.requests[number] != case.requests[number - 1]:
                yield fewer
        for changed in ({"spare": 0}, {"strategy": "U2R1"}):
            if replace(case, **changed) != case:
                yield replace(case, **changed)

    def outcome(self, case: Draw) -> Outcome:
        worst = max(self.ask(case.world, error_of, case))
        return Outcome(None if worst <= BOUND else f"wrong by {worst:.3g}", {"error": worst})


def error_of(rank: int, world: int, case: Draw, late: int = 0) -> float:
    """Returns the largest error of this rank's attentions. late: of the steps that are told, for a negative control"""
    mask = SOURCE | {"block_q": 8, "block_k": 8}
    first_steps, last_steps = case.dense
    config = {"mask": mask, "dense_schedule": {"first_steps": first_steps, "last_steps": last_steps}}
    group, clock, source = SequenceGroup.from_group(), StepClock(shared=True), DbspConfig.load(config).mask
    experts = [EngineSession(group, Strategy.parse(case.strategy), HEADS, 1, config, clock=clock) for _ in range(2)]
    tokens, worst = EngineLayout(case.thw).video.tokens, 0.0
    shard = -(-tokens // world) + case.spare
    q, k, v = torch.randn(3, 1, tokens, HEADS, WIDTH, generator=torch.Generator().manual_seed(case.seed))
    padded = [F.pad(x, (0, 0, 0, 0, 0, world * shard - tokens), value=1e4) for x in (q, k, v)]
    mine = slice(rank * shard, min((rank + 1) * shard, tokens))
    for request in case.requests:
        generation = object()
        for step in range(request.first, request.end):
            for branch in range(request.passes - (request.left_out if step == request.end - 1 else 0)):
                # 1. The attention of the expert that runs in this step.
                session = experts[step >= case.boundary]
                session.begin(
                    EngineLayout(case.thw, shard=shard),
                    "cpu",
                    step=step + late,
                    cfg_branch=branch if case.names_branches else None,
                    steps=request.steps,
                    generation=generation,
                )
                out = session.attend(0, *(x[:, rank * shard : (rank + 1) * shard] for x in padded))
                # 2. That of one process, under the mask of the step.
                asked = MaskRequest(0, HEADS, case.thw, 0, step, branch, 1)
                is_dense = step < first_steps or step >= request.steps - last_steps
                allowed = BlockMask.dense(HEADS, source.grid(asked)) if is_dense else source.mask(asked)
                expected = masked_attention(*(x.transpose(1, 2) for x in (q, k, v)), allowed).transpose(1, 2)
                count = max(0, mine.stop - mine.start)
                worst = max(worst, largest_difference(out[:, :count], expected[:, mine]) if count else 0.0)
    return worst
