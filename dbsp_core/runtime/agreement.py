"""What all ranks must have alike before they exchange anything: how they compare it, and what is said otherwise.

Ranks that attend with different inputs, masks or plans would wait for one another in vain, or mix what they exchange.
They compare at the first attention of a size, or of an executor, what makes exchanges fit; under debug, at every one,
whatever could make the result wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dbsp_core.comm.consistency import check_consistent, needs_gradients
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_core.utils.process import version_marks
from dbsp_kernels import KernelRequirements, require_supported
from dbsp_kernels.kernel import returns_lse

__all__ = [
    "LAYERS_DIFFER",
    "LAYOUTS_DIFFER",
    "MASKS_DIFFER",
    "PLANS_DIFFER",
    "agree_on_attention",
    "agree_on_executor",
    "agree_on_gradient",
    "agree_on_kernel",
    "agree_on_pass",
    "agree_on_settings",
]

SETTINGS_DIFFER = "the settings differ on rank(s) {}; give all ranks the same configuration, heads and layers"
SIZES_DIFFER = "the size of the video differs on rank(s) {}; give all ranks the same input"
STEPS_DIFFER = "the denoising step or guidance pass differs on rank(s) {}; give all ranks the same timesteps"
LAYERS_DIFFER = "another layer's attention is reached on rank(s) {}; all ranks must run the same layers in one order"
LAYOUTS_DIFFER = "the sequence layout differs on rank(s) {}; give all ranks one layout"
INPUTS_DIFFER = (
    "batch, head size, dtype or device type of q, k and v, or whether they need gradients, differ on rank(s) {}; "
    "give all ranks the same"
)
SCALES_DIFFER = "the scale of the scores differs on rank(s) {}; give all ranks one"
MASKS_DIFFER = "the mask differs on rank(s) {}; give all ranks one mask"
PLANS_DIFFER = "the plan differs on rank(s) {}; give all ranks one mask, strategy, planner and keys"
KERNELS_DIFFER = "another kernel serves on rank(s) {}; install the same there, or set kernel on all ranks"
INPUTS_NOT_FINITE = "q, k or v has values that are not finite"
GRADIENTS_NOT_FINITE = "the gradient of attention's output has values that are not finite"


def agree_on_settings(
    group: SequenceGroup, strategy: Strategy | None, kernel: str, settings: Callable[[], object], debug: bool
) -> None:
    """Raises UserError, on all ranks, for a session's settings that don't fit the ranks or differ. Collective.

    Args:
        group: The ranks of the session.
        strategy: How the ranks are used, or None if that is chosen at each attention.
        kernel: Name of a kernel, or "auto", for which each rank reads $DBSP_KERNEL.
        settings: Returns all settings, compared by how they are written. May raise.
        debug: Whether versions of packages are compared too.
    """
    problem: Exception | None = None
    marks = {SETTINGS_DIFFER: 0, KERNELS_DIFFER: 0}
    try:
        if strategy is not None:
            strategy.require_world(group.size)
        require_supported(kernel, KernelRequirements(lse=strategy is not None and strategy.ring > 1))
        # The strategies to choose from depend on whether the kernel's results can be merged.
        marks = {SETTINGS_DIFFER: fingerprint_of(settings()), KERNELS_DIFFER: int(returns_lse(kernel))}
    except Exception as error:  # any error: this rank must not stop alone
        problem = error
    check_consistent(group.control(), problem, {**marks, **version_marks(debug)})


def agree_on_pass(group: SequenceGroup, size: object, step: object) -> None:
    """Raises UserError, on all ranks, where forward passes over different videos, or of different steps, begin.

    Collective. Sizes and steps are compared by how they are written.
    """
    check_consistent(group, None, {SIZES_DIFFER: fingerprint_of(size), STEPS_DIFFER: fingerprint_of(step)})


def agree_on_attention(
    group: SequenceGroup,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    problem: str | None,
    *,
    executor: PreparedAttention | None,
    debug: bool,
    more: Mapping[str, int] | None = None,
) -> None:
    """All ranks compare what they are about to attend with. Collective.

    Args:
        group: The ranks.
        q: What this rank was given, of any shape where there is a problem.
        k: As q.
        v: As q.
        scale: Of the scores. None: as q's head size says.
        problem: What this rank found wrong already.
        executor: What will compute the attention. None where that is not made yet, on all ranks alike.
        debug: Whether values must be finite, and kernels equal.
        more: Further numbers to compare, by the complaint where they differ.

    Raises:
        UserError: On all ranks, where one has a problem, or something differs.
    """
    if debug and problem is None and not all(bool(t.isfinite().all()) for t in (q, k, v)):
        problem = INPUTS_NOT_FINITE
    kernel = ""
    if executor is not None and problem is None:
        kernel, error = _kernel_for(executor, q, k, v)
        problem = None if error is None else str(error)
    scale = q.shape[-1] ** -0.5 if scale is None and problem is None else scale
    marks = {
        INPUTS_DIFFER: fingerprint_of((*q.shape[:2], *q.shape[3:], q.dtype, q.device.type, needs_gradients(q, k, v))),
        SCALES_DIFFER: fingerprint_of(scale),
        **(more or {}),
        **_marks_of(executor, kernel if debug else ""),
    }
    check_consistent(group, None if problem is None else UserError(problem), marks)


def agree_on_executor(executor: PreparedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """All ranks compare masks, plans and kernels of an executor that was made after they had compared inputs.

    Collective. Raises UserError, on all ranks, where they differ, or no kernel serves on one.
    """
    kernel, problem = _kernel_for(executor, q, k, v)
    check_consistent(executor.group, problem, _marks_of(executor, kernel))


def agree_on_kernel(executor: PreparedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises UserError, on all ranks, where no kernel supports q, k and v on one rank. Collective."""
    check_consistent(executor.group, _kernel_for(executor, q, k, v)[1], {})


def agree_on_gradient(group: SequenceGroup, dout: torch.Tensor) -> None:
    """Raises UserError, on all ranks together, where one's gradient has values that are not finite. Collective."""
    problem = None if bool(dout.isfinite().all()) else UserError(GRADIENTS_NOT_FINITE)
    check_consistent(group, problem, {})


def _kernel_for(
    executor: PreparedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[str, Exception | None]:
    """Returns the name of the kernel that will run and None, or "" and the error that choosing one raised."""
    try:
        return executor.kernel_for(q, k, v).name, None
    except Exception as error:  # any error: this rank must not stop alone
        return "", error


def _marks_of(executor: PreparedAttention | None, kernel: str) -> dict[str, int]:
    """What ranks compare of an executor by its complaint; zeros where it is still to be made."""
    if executor is None:
        return {MASKS_DIFFER: 0, PLANS_DIFFER: 0, KERNELS_DIFFER: 0}
    plan = executor.plan.fingerprint
    return {MASKS_DIFFER: executor.mask_mark, PLANS_DIFFER: plan, KERNELS_DIFFER: fingerprint_of(kernel)}
