"""Cross-rank checks before exchanging q, k and v, and their error messages.

Ranks with different inputs, masks or plans would hang or exchange wrong data. They compare settings when a session is
made, and inputs and the pass's arguments at the first attention of a size or kind of inputs; under debug at every
attention, including values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from dbsp_core.comm.consistency import ConcurrencyGuard, agree, attempt, input_kind, needs_gradients
from dbsp_core.comm.groups import SequenceGroup, node_fingerprints, number_nodes
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_core.utils.process import version_fingerprints
from dbsp_kernels import Kernel, KernelRequirements, require_supported
from dbsp_kernels.kernel import supports

SETTINGS_DIFFER = "the settings differ on rank(s) {}; give all ranks the same configuration, heads and layers"
LAYERS_DIFFER = "rank(s) {} are at another layer's attention; all ranks must run the same layers in the same order"
LAYOUTS_DIFFER = "the sequence layout differs on rank(s) {}; give all ranks one layout"
INPUTS_DIFFER = (
    "batch, head size, dtype or device type of q, k and v, or whether they need gradients, differ on rank(s) {}; "
    "give all ranks the same"
)
SCALES_DIFFER = "the softmax scale differs on rank(s) {}; pass the same scale on all ranks"
SIZES_DIFFER = "the size of the video differs on rank(s) {}; give all ranks the same input"
STEPS_DIFFER = "the denoising step or CFG pass differs on rank(s) {}; give all ranks the same timesteps"
GRIDS_DIFFER = "the video's block grid differs on rank(s) {}; it must be the same on every rank"
HARDWARE_DIFFERS = "the hardware file differs on rank(s) {}; it must be the same on every rank"
LIMITS_DIFFER = (
    "the break-even density of dense attention differs on rank(s) {}; use one hardware file and torch version"
)
NEW_MASKS_DIFFER = "which masks are new differs on rank(s) {}; it must be the same on every rank"
MASKS_DIFFER = "the mask differs on rank(s) {}; give all ranks one mask"
NEW_MASK_DIFFERS = "the mask of layer {} differs on rank(s) {{}}; it must be the same on every rank"
PLANS_DIFFER = "the plan differs on rank(s) {}; give all ranks one mask, strategy, planner and keys"
KERNELS_DIFFER = (
    "rank(s) {} selected a different attention kernel; install the same packages there, or set kernel on all ranks"
)
INPUTS_NOT_FINITE = "q, k or v has values that are not finite"
GRADIENTS_NOT_FINITE = "the gradient of attention's output has values that are not finite"


class HasSettings(Protocol):
    """A session, or an object with the same settings."""

    config: DbspConfig
    group: SequenceGroup
    strategy: Strategy | None
    heads: int
    layers: int
    nodes: tuple[int, ...]
    report: bool


def check_settings(
    group: SequenceGroup,
    sessions: Sequence[HasSettings],
    problem: Exception | None = None,
    more: Mapping[str, int] | None = None,
    numbers: Sequence[int] = (),
) -> list[tuple[int, ...]]:
    """Checks that sessions' settings are equal on all ranks; sets the sessions' nodes and `report`. Collective.

    Args:
        group: The ranks; a session's group may be consecutive ranks of it.
        sessions: All sessions that the ranks make now; none on a rank with a problem.
        problem: Error found on this rank, if any.
        more: Further fingerprints to compare, by error message.
        numbers: Further numbers to exchange, which may differ; returned for every rank.

    Raises:
        UserError: Settings differ or do not fit the ranks; raised on all ranks.
    """
    supported, unfit = attempt(lambda: [_supported(session) for session in sessions])
    debug = any(session.config.debug for session in sessions)
    settings = [(session.config.fingerprint, session.strategy, session.heads, session.layers) for session in sessions]
    fingerprints = {
        SETTINGS_DIFFER: fingerprint_of(settings),
        KERNELS_DIFFER: fingerprint_of(supported),
        **version_fingerprints(debug),
    }
    report = any(session.config.report is not None for session in sessions)
    with ConcurrencyGuard(group):
        rows = agree(
            group.control(),
            {**(more or {}), **fingerprints},
            problem=problem or unfit,
            numbers=[int(report), *node_fingerprints(), *numbers],
        )
    nodes = number_nodes(group, [row[1:4] for row in rows])
    for session in sessions:
        first = group.rank - session.group.rank
        session.nodes = nodes[first : first + session.group.size]
        session.report = any(row[0] for row in rows)
    return [row[4:] for row in rows]


def _supported(session: HasSettings) -> tuple[bool, bool]:
    """Returns (kernel merges chunks, kernel supports only whole heads), on which plans depend.

    Raises UserError if strategy, group, kernel and masks do not fit.
    """
    strategy, config = session.strategy, session.config
    if strategy is not None:
        strategy.require_world(session.group.size)
    lse = config.absent_keys or (strategy is not None and strategy.ring > 1)
    gpu = torch.device("cuda") if torch.cuda.is_available() else None
    require_supported(config.kernel, KernelRequirements(config.blocks, lse=lse), gpu)
    return supports(config.kernel, KernelRequirements(lse=True)), config.whole_heads


def check_attention(
    group: SequenceGroup,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    problem: Exception | None,
    *,
    prepared: PreparedAttention | None,
    debug: bool,
    more: Mapping[str, int] | None = None,
    choose: Callable[[], Kernel] | None = None,
    numbers: Sequence[int] = (),
) -> list[tuple[int, ...]]:
    """Raises UserError on all ranks if one has a problem or inputs differ. Collective.

    Args:
        q, k, v: This rank's inputs, of any shape if there is a problem.
        problem: Error found on this rank, if any.
        prepared: The prepared attention that will run, or None if not made yet.
        debug: True to check that values are finite and kernels equal.
        more: Further fingerprints to compare, by error message.
        choose: Chooses the kernel if nothing is prepared yet; only its error matters.
        numbers: Further numbers to exchange, which may differ; returned for every rank.
    """
    if debug and problem is None and not all(_are_finite(tensor) for tensor in (q, k, v)):
        problem = UserError(INPUTS_NOT_FINITE)
    kernel = None
    if problem is None and prepared is not None:
        kernel, problem = attempt(lambda: prepared.kernel_for(input_kind(q, k, v)).name)
    elif problem is None and choose is not None:
        _, problem = attempt(choose)
    fingerprints = {
        **(more or {}),
        INPUTS_DIFFER: fingerprint_of((*q.shape[:2], *q.shape[3:], q.dtype, q.device.type, needs_gradients(q, k, v))),
        SCALES_DIFFER: fingerprint_of(scale),
        **_fingerprints_of(prepared, (kernel or "") if debug else ""),
    }
    return agree(group, fingerprints, problem=problem, numbers=numbers)


def check_prepared(prepared: PreparedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises UserError on all ranks if masks, plans or kernels differ, or a rank has no kernel. Collective."""
    kernel, problem = attempt(lambda: prepared.kernel_for(input_kind(q, k, v)).name)
    agree(prepared.group, _fingerprints_of(prepared, kernel or ""), problem=problem)


def check_gradient(group: SequenceGroup, dout: torch.Tensor) -> None:
    """Raises UserError on all ranks if a rank's gradient is not finite. Collective."""
    agree(group, problem=None if _are_finite(dout) else UserError(GRADIENTS_NOT_FINITE))


@torch.no_grad()  # checkpoints count the tensors saved for backward
def _are_finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _fingerprints_of(prepared: PreparedAttention | None, kernel: str) -> dict[str, int]:
    """Returns the fingerprints of a prepared attention by error message; zeros if not made yet."""
    if prepared is None:
        return {MASKS_DIFFER: 0, PLANS_DIFFER: 0, KERNELS_DIFFER: 0}
    return {
        MASKS_DIFFER: prepared.mask_fingerprint,
        PLANS_DIFFER: prepared.plan.fingerprint,
        KERNELS_DIFFER: fingerprint_of(kernel),
    }
