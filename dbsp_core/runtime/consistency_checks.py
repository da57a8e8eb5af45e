"""Cross-rank checks that run before ranks exchange q, k and v, and their error messages.

Ranks that attend with different inputs, masks or plans would wait for one another for ever, or mix what they exchange.
They compare twice: when a session is made, and at the first attention of a size or kind of inputs, together with what
the pass began with. Under debug they compare at every attention, for anything that could make the result wrong.
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
LAYERS_DIFFER = "another layer's attention is reached on rank(s) {}; all ranks must run the same layers in one order"
LAYOUTS_DIFFER = "the sequence layout differs on rank(s) {}; give all ranks one layout"
INPUTS_DIFFER = (
    "batch, head size, dtype or device type of q, k and v, or whether they need gradients, differ on rank(s) {}; "
    "give all ranks the same"
)
SCALES_DIFFER = "the scale of the scores differs on rank(s) {}; give all ranks one"
SIZES_DIFFER = "the size of the video differs on rank(s) {}; give all ranks the same input"
STEPS_DIFFER = "the denoising step or CFG pass differs on rank(s) {}; give all ranks the same timesteps"
GRIDS_DIFFER = "the video's block grid differs on rank(s) {}; it must be the same on every rank"
HARDWARE_DIFFERS = "the hardware file differs on rank(s) {}; it must be the same on every rank"
LIMITS_DIFFER = (
    "the density from which attention is dense differs on rank(s) {}; give all ranks one hardware file and one torch"
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
    """A session, or what has the same settings."""

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
    """Checks that sessions' settings are the same on all ranks; sets the sessions' nodes and `report`. Collective.

    Args:
        group: The ranks, of which a session's group may be a part: consecutive ranks.
        sessions: All that the ranks make now; none where there is a problem.
        problem: Error found on this rank already.
        more: Further fingerprints to compare, by error message.
        numbers: Further numbers to exchange, which may differ.

    Returns:
        What each rank has `numbers`.

    Raises:
        UserError: On all ranks, for settings that don't fit the ranks or differ.
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
    """Returns whether a session's kernel merges chunks, and supports only whole heads: plans depend on both.

    Raises UserError if strategy, group, kernel and masks don't fit.
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
    scale: float | None,
    problem: Exception | None,
    *,
    prepared: PreparedAttention | None,
    debug: bool,
    more: Mapping[str, int] | None = None,
    choose: Callable[[], Kernel] | None = None,
    numbers: Sequence[int] = (),
) -> list[tuple[int, ...]]:
    """Checks that all ranks are about to attend with the same inputs. Collective.

    Args:
        group: The ranks.
        q, k, v: This rank's inputs, of any shape if there is a problem.
        scale: Softmax scale; None: from q's head dim.
        problem: Error found on this rank already.
        prepared: The prepared attention that will run, or None if it is not made yet.
        debug: True if values must be finite, and kernels equal.
        more: Further numbers to compare, by the message where they differ.
        choose: Chooses the kernel where nothing is prepared yet; only its error is compared.
        numbers: Further numbers to exchange, which may differ.

    Returns:
        The `numbers` of each rank.

    Raises:
        UserError: On all ranks, where one has a problem, or something differs.
    """
    if debug and problem is None and not all(_are_finite(tensor) for tensor in (q, k, v)):
        problem = UserError(INPUTS_NOT_FINITE)
    kernel = None
    if problem is None and prepared is not None:
        kernel, problem = attempt(lambda: prepared.kernel_for(input_kind(q, k, v)).name)
    elif problem is None and choose is not None:
        _, problem = attempt(choose)
    scale = q.shape[-1] ** -0.5 if scale is None and problem is None else scale
    fingerprints = {
        **(more or {}),
        INPUTS_DIFFER: fingerprint_of((*q.shape[:2], *q.shape[3:], q.dtype, q.device.type, needs_gradients(q, k, v))),
        SCALES_DIFFER: fingerprint_of(scale),
        **_fingerprints_of(prepared, (kernel or "") if debug else ""),
    }
    return agree(group, fingerprints, problem=problem, numbers=numbers)


def check_prepared(prepared: PreparedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Checks masks, plans and kernels of a prepared attention that was made after ranks had compared inputs.

    Collective. Raises UserError, on all ranks, if they differ, or no kernel supports it on one.
    """
    kernel, problem = attempt(lambda: prepared.kernel_for(input_kind(q, k, v)).name)
    agree(prepared.group, _fingerprints_of(prepared, kernel or ""), problem=problem)


def check_gradient(group: SequenceGroup, dout: torch.Tensor) -> None:
    """Raises UserError, on all ranks together, where one's gradient has values that are not finite. Collective."""
    problem = None if _are_finite(dout) else UserError(GRADIENTS_NOT_FINITE)
    agree(group, problem=problem)


@torch.no_grad()  # checkpoints count what forward saves for backward
def _are_finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _fingerprints_of(prepared: PreparedAttention | None, kernel: str) -> dict[str, int]:
    """Returns the fingerprints of a prepared attention, by error message; zeros if it is still to be made."""
    if prepared is None:
        return {MASKS_DIFFER: 0, PLANS_DIFFER: 0, KERNELS_DIFFER: 0}
    return {
        MASKS_DIFFER: prepared.mask_fingerprint,
        PLANS_DIFFER: prepared.plan.fingerprint,
        KERNELS_DIFFER: fingerprint_of(kernel),
    }
