"""Cases of the library: an act in one phase of a program of ranks, or a value that differs on one; and their ends."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dbsp_core import Strategy
from scripts.checks.stress.faults.fault_injection import RAISED, Injection
from scripts.checks.stress.faults.keeper import Ended, Fault
from scripts.checks.stress.faults.phases import MAKES_A_GROUP, PHASES, WRITERS, Divergence
from scripts.checks.stress.faults.programs import DONE, PROGRAMS, Values, have_another_version_of

TIMEOUT_S = 4.0
"""Of the process group."""
SPARE_S = 5.0
"""Within the group's timeout and these seconds all must have ended."""
CONNECTS_S = 5 * TIMEOUT_S
"""After which gloo gives up making a group with ranks that have gone: a rank that was stopped comes to that."""
TOLERANCE = 1e-5
CLEAR = (
    "communication between the ranks of the sequence broke off",
    "injected",
    "rank(s) [",
    "not all ranks came",
)
"""What the last line of a rank that lives on must say one of."""
SIZES_DIFFER = "Received data size doesn't match expected size"
"""What gloo says as it ends a process that is sent more than it expects."""
ENDS = {"kill": (-9,), "terminate": (-15,), "interrupt": (-2, 130)}
"""Exit codes of a rank by what happens to it."""
_RANK = re.compile(r"^\[rank\d+\]: ")
_ERROR = re.compile(r"[\w.]*Error: ")


@dataclass(frozen=True)
class RankFault(Fault):
    """Something that goes wrong on one rank.

    title: in words;  program: in `faults.programs`;  processes: ranks;  odd: the rank that it happens to
    how: required end: "success", every rank is right; "failure", each rank ends with an error; "harmless", all but
    the odd rank end well, and one says what is lacking; "quiet", nothing is said
    differs: what the odd rank is given instead, by field of `Values`
    words: on every rank's last line, before any attention was done
    silent: whether nobody is left who could say what is lacking
    """

    title: str
    program: str
    values: Values
    processes: int
    odd: int
    how: str
    injection: Injection | None = None
    differs: Mapping[str, Any] = field(default_factory=dict)
    words: str = ""
    silent: bool = False
    odd_limit_s: float = 0.0

    limit_s, after_s = TIMEOUT_S + SPARE_S, CONNECTS_S

    def __str__(self) -> str:
        return self.title

    @property
    def act(self) -> str:
        return self.injection.act if self.injection else ""

    @property
    def stopped(self) -> int | None:  # type: ignore[override]
        return self.odd if self.act == "stop" else None

    @property
    def ends_by(self) -> str:  # type: ignore[override]
        """Words of gloo where what differs unseen, as a predicted mask without debug, can change sizes of messages."""
        return SIZES_DIFFER if self.differs and not self.words else ""

    def main(self, number: int, folder: Path) -> None:
        """Is a rank."""
        torch.set_num_threads(1)
        os.chdir(folder)
        if self.injection is not None:
            self.injection.arm(number, folder)
        values = replace(self.values, **self.differs) if number == self.odd else self.values
        if values.version is not None:
            have_another_version_of(values.version)
        dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=TIMEOUT_S), self.processes, number)
        error = PROGRAMS[self.program](values)
        (folder / f"result{number}").write_text(repr(error), encoding="utf-8")
        dist.destroy_process_group()

    def message_about(self, ended: Ended, folder: Path) -> str | None:
        how = "success" if self.act and not ended.fired else self.how
        found = [one for rank in range(len(ended.codes)) if (one := self._of_rank(rank, ended, how))]
        said = any(line.startswith("dbsp: ") for text in ended.errors for line in text.splitlines())
        if how == "harmless" and not said and not self.silent:
            found.append("nobody says what is lacking")
        return found[0] if found else None

    def _of_rank(self, rank: int, ended: Ended, how: str) -> str | None:
        code, last, odd = ended.codes[rank], _last(ended, rank), rank == self.odd
        ends = f"rank {rank} ends with {code}: {last}"
        if odd and self.act in ENDS and how in ("failure", "harmless"):
            return None if code in ENDS[self.act] else ends
        if how != "failure":
            result = ended.results[rank]
            wrong = how == "success" and (result is None or not float(result) <= TOLERANCE)
            return ends if code else f"rank {rank} is wrong by {result}" if wrong else None
        if code == 0:
            return f"rank {rank} ends with 0, the odd one with {ended.codes[self.odd]}: {_last(ended, self.odd)}"
        if self.ends_by and self.ends_by in ended.errors[rank]:
            return None
        if code != 1:
            return ends
        if self.words and DONE in ended.outputs[rank]:
            return f"rank {rank} says {last!r} only after an attention"
        if odd and self.act in RAISED and "injected" not in ended.errors[rank]:
            return f"rank {rank} does not say what was raised in it: {last}"
        clear = self.words in last and _ERROR.match(last) if self.words else any(word in last for word in CLEAR)
        return None if clear else f"rank {rank} says {last!r}"


def _last(ended: Ended, rank: int) -> str:
    lines = [line for line in ended.errors[rank].splitlines() if line.strip()]
    return _RANK.sub("", lines[-1]) if lines else ""


def fault(
    name: str, act: str, world: int, odd: int = 1, nth: int | None = None, draw: random.Random | None = None
) -> RankFault:
    """Returns the case of one act in one phase. nth: in which of its calls; None: as the phase says"""
    phase = PHASES[name]
    odd = 0 if name in WRITERS else odd
    strategy = f"U1R{world}"
    if draw is not None and phase.program != "attention":
        strategy = str(draw.choice(Strategy.all_for(world)))
    injection = Injection(act, odd, phase.target, nth or phase.nth)
    how = "success" if act == "slow" else "failure"
    if how == "failure" and phase.harmless:
        how = "failure" if name == "recording" and act in ("stop", *ENDS) else "harmless"
    return RankFault(
        f"{act} in {name}, call {injection.nth}, on rank {odd} of {world}, {strategy}",
        phase.program,
        Values(strategy, **phase.values),
        world,
        odd,
        how,
        injection,
        silent=name in WRITERS and act in ("stop", *ENDS),
        odd_limit_s=CONNECTS_S + SPARE_S if act == "stop" and name in MAKES_A_GROUP else 0.0,
    )


def divergence(one: Divergence, debug: bool, world: int = 3, odd: int = 1) -> RankFault:
    """Returns the case of something that differs on one rank."""
    other = {"strategy": f"U{world}R1", "debug": not debug}
    file = "whole" if "mask_file" in one.odd else ""
    return RankFault(
        f"{one} on rank {odd} of {world}, debug {debug}",
        one.program,
        Values(f"U1R{world}", settings=one.settings, debug=debug, mask_file=file),
        world,
        odd,
        "quiet" if one.quiet and not debug else "failure",
        differs={name: other[name] if value == "other" else value for name, value in one.odd.items()},
        words="" if one.later and not debug else f"rank(s) [{odd}]",
    )
