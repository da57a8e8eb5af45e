"""Features of other libraries in random orders around `enable`: the samples of one process, and no trace left."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dbsp_core import Strategy
from scripts.checks.stress.frame import WORLDS, Failed, Outcome, Part, in_one_line
from tests.gpu_node.node import GpuNode, NodeError
from tests.simulated.feature_cases import COMPILED, FEATURES, Order, Together, alone, feature_named, together

TOLERANCE = 1e-5
MOST_FEATURES = 3


@dataclass(frozen=True)
class Draw:
    """One order of features on so many ranks: of gloo where a feature compiles, else of the simulated node."""

    world: int
    order: Order

    @property
    def compiles(self) -> bool:
        return any(name in COMPILED for name in self.order.features)


def _draw(rng: random.Random) -> Draw:
    names = rng.sample(sorted(FEATURES), rng.randint(1, MOST_FEATURES))
    if rng.random() < 0.25:
        names.insert(rng.randint(0, len(names)), rng.choice(sorted(COMPILED)))
    world = rng.choice(WORLDS)
    blocks = {"block_q": rng.choice([8, 16, 24]), "block_k": rng.choice([8, 16, 24])}
    mask = {"source": "synthetic", "density": rng.choice([0.2, 0.4, 0.7]), **blocks}
    config = {"mask": mask, "strategy": str(rng.choice(Strategy.all_for(world)))}
    return Draw(world, Order(tuple(names), rng.randint(0, len(names)), config))


def _sensible(case: Draw) -> bool:
    """Returns True if the features are of different kinds, and of what devices there are."""
    parts = [feature_named(name) for name in case.order.features]
    offloads, caches = sum(one.offloads for one in parts), sum(one.steps > 2 for one in parts)
    loras = sum("LoRA" in name for name in case.order.features)
    return offloads <= (0 if case.compiles else 1) and caches <= 1 and loras <= 1


class Features(Part):
    """Orders of features on a simulated node or on processes."""

    name = "features"
    most_tries = 12
    _node: GpuNode | None = None

    def draw(self, seed: int, number: int) -> Draw:
        rng = random.Random(f"{seed}:{number}")
        case = _draw(rng)
        while not _sensible(case):
            case = _draw(rng)
        return case

    def smaller(self, case: Draw) -> Iterator[Draw]:
        """Yields cases with one feature less, fewer ranks, or Ulysses alone."""
        order = case.order
        for number in range(len(order.features)) if len(order.features) > 1 else ():
            fewer = order.features[:number] + order.features[number + 1 :]
            yield replace(case, order=replace(order, features=fewer, before=order.before - (number < order.before)))
        for world in sorted({2, case.world}):
            simple = replace(order, config={**order.config, "strategy": f"U{world}R1"})
            if replace(case, world=world, order=simple) != case:
                yield replace(case, world=world, order=simple)

    def close(self) -> None:
        super().close()
        if self._node is not None:
            self._node.close()
        self._node = None

    def outcome(self, case: Draw) -> Outcome:
        """Judges a case; features that do not go together without db-SP prove nothing."""
        try:
            self._ask(case, alone)
        except Failed:
            return Outcome(None, {"impossible without db-SP": 1.0})
        found: list[Together] = self._ask(case, together)
        difference = max(one.difference for one in found)
        wrong = [f"samples differ by {difference:.3g}"] if not difference <= TOLERANCE else []
        wrong += ["ranks skip other blocks than one process"] if any(o.computed != o.expected for o in found) else []
        wrong += [f"left: {one.left[0]}" for one in found if one.left][:1]
        wrong += ["other bits after disable"] if not all(one.identical_bits for one in found) else []
        return Outcome("; ".join(wrong) or None, {"difference": difference})

    def _ask(self, case: Draw, function: Callable[..., Any]) -> list[Any]:
        """Calls a function on all ranks, and returns its results by rank. Raises Failed."""
        if case.compiles:
            return self.ask(case.world, function, case.order, False)
        self._node = self._node or GpuNode()
        try:
            return self._node.run(case.world, function, case.order)
        except (NodeError, EOFError, OSError) as error:
            self.close()  # what a failed call leaves on the node must not reach the next
            raise Failed(in_one_line(error)) from error
