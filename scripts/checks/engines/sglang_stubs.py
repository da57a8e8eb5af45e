"""Stubs of what SGLang imports or calls on a CPU and PyPI does not have, in place once this is imported.

Two operators of sgl_kernel's CPU build, in torch; torchvision, which PyPI has for GPUs alone, and is only imported.
As a program, SGLang's own command: python -m scripts.checks.engines.sglang_stubs generate --model-path FOLDER …
"""

from __future__ import annotations

from typing import Any

import torch

from scripts.checks.engines.reference import stub_for

_OPERATORS = torch.library.Library("sgl_kernel", "DEF")
_TENSORS = "Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, str kind, float eps"


def _norm_scale_shift(x: Any, weight: Any, bias: Any, scale: Any, shift: Any, kind: str, eps: float) -> torch.Tensor:
    assert kind == "layer"
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps) * (1 + scale) + shift


def _residual_norm_scale_shift(residual: Any, x: Any, gate: Any, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + (x if gate is None else x * gate)
    return _norm_scale_shift(total, *others), total


stub_for("torchvision")  # of which transformers must know: SGLang registers image processors
_OPERATORS.define(f"fused_norm_scale_shift_cpu(Tensor x, {_TENSORS}) -> Tensor")
_RESIDUAL = f"Tensor residual, Tensor x, Tensor? gate, {_TENSORS}"
_OPERATORS.define(f"fused_scale_residual_norm_scale_shift_cpu({_RESIDUAL}) -> (Tensor, Tensor)")
for _position in ("CPU", "Meta"):  # the latter for torch.compile
    _OPERATORS.impl("fused_norm_scale_shift_cpu", _norm_scale_shift, _position)
    _OPERATORS.impl("fused_scale_residual_norm_scale_shift_cpu", _residual_norm_scale_shift, _position)

if __name__ == "__main__":  # workers import this module again, as spawned processes do
    from sglang.cli.main import main

    main()
