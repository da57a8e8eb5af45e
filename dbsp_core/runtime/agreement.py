"""Cross-rank checks that run before ranks exchange q, k and v, and their error messages.

Ranks that attend with different inputs, masks or plans would wait for one another for ever, or mix what they exchange.
They compare three times: when a session is made, when a size of video begins, and at the first attention of a size or
kind of inputs. Under debug they compare at every pass and attention, whatever could make the result wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dbsp_core.comm.consistency import check_consistent, needs_gradients
from dbsp_core.comm.groups import SequenceGroup, node_marks, number_nodes
from dbsp_core.layout.strategy import Strategy
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_core.utils.process import version_marks
from dbsp_kernels import Kernel, KernelRequirements, require_supported
from dbsp_kernels.kernel import supports

__all__ = [
    "LAYERS_DIFFER",
    "LAYOUTS_DIFFER",
    "MASKS_DIFFER",
    "PASS_MARKS",
    "PLANS_DIFFER",
    "agree_on_attention",
    "agree_on_gradient",
    "agree_on_prepared",
    "agree_on_settings",
]

SETTINGS_DIFFER = "the settings differ on rank(s) {}; give all ranks the same configuration, heads and layers"
SIZES_DIFFER = "the size of the video differs on rank(s) {}; give all ranks the same input"
STEPS_DIFFER = "the denoising step or guidance pass differs on rank(s) {}; give all ranks the same timesteps"
GRIDS_DIFFER = "the video's block grid differs on rank(s) {}; it must be the same on every rank"
HARDWARE_DIFFERS = "the hardware file differs on rank(s) {}; it must be the same on every rank"
NEW_MASKS_DIFFER = "which masks are new differs on rank(s) {}; it must be the same on every rank"
LAYERS_DIFFER = "another layer's attention is reached on rank(s) {}; all ranks must run the same layers in one order"
LAYOUTS_DIFFER = "the sequence layout differs on rank(s) {}; give all ranks one layout"
INPUTS_DIFFER = (
    "batch, head size, dtype or device type of q, k and v, or whether they need gradients, differ on rank(s) {}; "
    "give all ranks the same"
)
SCALES_DIFFER = "the scale of the scores differs on rank(s) {}; give all ranks one"
MASKS_DIFFER = "the mask differs on rank(s) {}; give all ranks one mask"
NEW_MASK_DIFFERS = "the mask of layer {} differs on rank(s) {{}}; it must be the same on every rank"
PLANS_DIFFER = "the plan differs on rank(s) {}; give all ranks one mask, strategy, planner and keys"
KERNELS_DIFFER = "another kernel serves on rank(s) {}; install the same there, or set kernel on all ranks"
INPUTS_NOT_FINITE = "q, k or v has values that are not finite"
GRADIENTS_NOT_FINITE = "the gradient of attention's output has values that are not finite"

PASS_MARKS = SIZES_DIFFER, STEPS_DIFFER, GRIDS_DIFFER, HARDWARE_DIFFERS, NEW_MASKS_DIFFER
"""Complaints about what ranks compare when a forward pass begins."""


def agree_on_settings(
    group: SequenceGroup,
    strategy: Strategy | None,
    kernel: str,
    settings: object,
    problem: Exception | None,
    *,
    report: bool,
    debug: bool,
) -> tuple[tuple[int, ...], bool]:
    """Raises UserError, on all ranks, for a session's settings that don't fit the ranks or differ. Collective.

    Args:
        group: The ranks of the session.
        strategy: How the ranks are used, or None if that is chosen at each attention.
        kernel: Name of a kernel, or "auto", for which each rank reads $DBSP_KERNEL.
        settings: All settings, compared by how they are written.
        problem: Why this rank has no settings, or None.
        report: Whether this rank asks for a report.
        debug: Whether versions of packages are compared too.

    Returns:
        The node of each rank, numbered by first appearance, and whether any rank asks for a report.
    """
    lse = 0
    try:
        if strategy is not None:
            strategy.require_world(group.size)
        require_supported(kernel, KernelRequirements(lse=strategy is not None and strategy.ring > 1))
        lse = int(supports(kernel, KernelRequirements(lse=True)))  # the strategies to choose from depend on it
    except Exception as error:  # any error: this rank must not stop alone
        problem = problem or error
    marks = {SETTINGS_DIFFER: fingerprint_of(settings), KERNELS_DIFFER: lse, **version_marks(debug)}
    told = check_consistent(group.control(), problem, marks, told=[int(report), *node_marks()])
    return number_nodes(group, [nodes for _, *nodes in told]), any(wanted for wanted, *_ in told)


def agree_on_attention(
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
) -> None:
    """All ranks compare what they are about to attend with. Collective.

    Args:
        group: The ranks.
        q, k, v: What this rank was given, of any shape where there is a problem.
        scale: Of the scores. None: as q's head size says.
        problem: What this rank found wrong already.
        prepared: What will compute the attention, or None if it is not made yet.
        debug: Whether values must be finite, and kernels equal.
        more: Further numbers to compare, by the complaint where they differ.
        choose: Chooses the kernel where nothing is prepared yet; only its error is compared.

    Raises:
        UserError: On all ranks, where one has a problem, or something differs.
    """
    if debug and problem is None and not all(bool(t.isfinite().all()) for t in (q, k, v)):
        problem = UserError(INPUTS_NOT_FINITE)
    kernel = ""
    if problem is None and prepared is not None:
        kernel, problem = _kernel_from(lambda: prepared.kernel_for(q, k, v))
    elif problem is None and choose is not None:
        _, problem = _kernel_from(choose)
    scale = q.shape[-1] ** -0.5 if scale is None and problem is None else scale
    marks = {
        **(more or {}),
        INPUTS_DIFFER: fingerprint_of((*q.shape[:2], *q.shape[3:], q.dtype, q.device.type, needs_gradients(q, k, v))),
        SCALES_DIFFER: fingerprint_of(scale),
        **_marks_of(prepared, kernel if debug else ""),
    }
    check_consistent(group, problem, marks)


def agree_on_prepared(prepared: PreparedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """All ranks compare masks, plans and kernels of a prepared attention that was made after they had compared inputs.

    Collective. Raises UserError, on all ranks, where they differ, or no kernel serves on one.
    """
    kernel, problem = _kernel_from(lambda: prepared.kernel_for(q, k, v))
    check_consistent(prepared.group, problem, _marks_of(prepared, kernel))


def agree_on_gradient(group: SequenceGroup, dout: torch.Tensor) -> None:
    """Raises UserError, on all ranks together, where one's gradient has values that are not finite. Collective."""
    problem = None if bool(dout.isfinite().all()) else UserError(GRADIENTS_NOT_FINITE)
    check_consistent(group, problem, {})


def _kernel_from(choose: Callable[[], Kernel]) -> tuple[str, Exception | None]:
    """Returns the name of the kernel that will run and None, or "" and the error that choosing one raised."""
    try:
        return choose().name, None
    except Exception as error:  # any error: this rank must not stop alone
        return "", error


def _marks_of(prepared: PreparedAttention | None, kernel: str) -> dict[str, int]:
    """What ranks compare of a prepared attention, by complaint; zeros where it is still to be made."""
    if prepared is None:
        return {MASKS_DIFFER: 0, PLANS_DIFFER: 0, KERNELS_DIFFER: 0}
    return {
        MASKS_DIFFER: prepared.mask_mark,
        PLANS_DIFFER: prepared.plan.fingerprint,
        KERNELS_DIFFER: fingerprint_of(kernel),
    }
