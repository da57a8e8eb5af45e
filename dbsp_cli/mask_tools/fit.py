"""Fits low-rank projections of queries and keys for mask source `lowrank`, in closed form from second moments."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dbsp_core.utils.errors import UserError, in_short
from dbsp_core.utils.files import write_atomically

RECORD = "record one with: xdit … --sp-config 'record_qk:path=FOLDER', or mask: {source: record_qk, path: FOLDER}"


def fit_projections(
    query: torch.Tensor, key: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns A, B [D, rank] that minimize the mean square of (q·A)·(k·B) − q·k for independent q and k.

    E[(qᵀ(I − M)k)²] = ‖Cq^½ (I − M) Ck^½‖², so the best M of a rank is Cq^−½ times the truncated SVD of Cq^½ Ck^½
    times Ck^−½ (Eckart, Young, 1936).

    `query` and `key` [H, D, D] are their second moments C = E[x xᵀ]. Returns A and B, float32[H, D, rank], and the
    fraction of E[(q·k)²] kept, float64[H].
    """
    (root_q, inverse_q), (root_k, inverse_k) = _roots(query), _roots(key)
    u, s, vt = torch.linalg.svd(root_q @ root_k)
    weight = s[:, None, :rank].sqrt()
    a = inverse_q @ u[:, :, :rank] * weight
    b = inverse_k @ vt.transpose(1, 2)[:, :, :rank] * weight
    energy = s.square()
    return a.float(), b.float(), energy[:, :rank].sum(dim=1) / energy.sum(dim=1)


def _roots(moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns C^½ and C^−½, float64[H, D, D], with eigenvalues clamped above zero."""
    values, vectors = torch.linalg.eigh(moments.double())
    values = values.clamp(min=1e-9 * values.amax(dim=1, keepdim=True).clamp(min=1e-30))
    scaled = [(vectors * values.pow(power)[:, None]) @ vectors.transpose(1, 2) for power in (0.5, -0.5)]
    return scaled[0], scaled[1]


def fit_recording(recordings: Iterable[Path], out: Path, rank: int) -> tuple[int, int, dict[int, float]]:
    """Fits all layers and heads of recordings (folders or files of `record_qk`), and writes a file.

    Returns the numbers of heads and channels, and the fraction of E[(q·k)²] kept by layer, mean over heads.
    """
    sums, weights, layers = _sum_of(recordings)
    numbers = sorted({int(name.partition(".")[2]) for name in sums})
    heads, head_dim = next(iter(sums.values())).shape[:2]
    if not 1 <= rank <= head_dim:
        raise UserError(f"--rank {rank} must lie between 1 and {head_dim}, the size of the recorded heads")
    tensors: dict[str, torch.Tensor] = {}
    kept: dict[int, float] = {}
    for layer in numbers:
        of_query, of_key = (sums[name] / weights[name] for name in (f"query.{layer}", f"key.{layer}"))
        query, key, share = fit_projections(of_query, of_key, rank)
        tensors |= {f"query.{layer}": query.contiguous(), f"key.{layer}": key.contiguous()}
        kept[layer] = float(share.mean())
    write_atomically(out, save(tensors, {"layers": layers} if layers else None))
    return heads, head_dim, kept


def _sum_of(recordings: Iterable[Path]) -> tuple[dict[str, torch.Tensor], dict[str, int], str]:
    """Returns Σ x xᵀ and tokens by name, and the number of the model's layers ("" if unknown)."""
    sums: dict[str, torch.Tensor] = {}
    weights: dict[str, int] = {}
    known: set[str] = set()
    for source in recordings:
        files = sorted(source.glob("moments-*.safetensors")) if os.path.isdir(source) else [source]
        inside = sorted({str(path.parent) for path in source.glob("transformer*/moments-*.safetensors")})
        if not files:
            apart = f" except in {' and '.join(inside)}; fit each separately" if inside else f"; {RECORD}"
            raise UserError(f"{source} has no recording of queries and keys{apart}")
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    about = file.metadata() or {}
                    read = {name: file.get_tensor(name).double() for name in file.keys()}  # noqa: SIM118  not a mapping
                counts = {name: int(about[f"tokens of {name}"]) for name in read}
                for name, moments in read.items():
                    _require_moments(name, counts[name], moments)
            except (SafetensorError, OSError, KeyError, ValueError) as error:
                raise UserError(f"{path} is not a recording of queries and keys ({error}); {RECORD}") from error
            for name, moments in read.items():
                if name in sums and sums[name].shape != moments.shape:
                    raise UserError("the recordings are of different models; fit them separately")
                sums[name] = sums.get(name, 0) + counts[name] * moments
                weights[name] = weights.get(name, 0) + counts[name]
            known.add(about.get("layers", ""))
    shapes = {tuple(moments.shape) for moments in sums.values()}
    sides = [{name.partition(".")[2] for name in sums if name.startswith(side)} for side in ("query.", "key.")]
    if len(known) != 1 or len(shapes) != 1 or sides[0] != sides[1]:
        raise UserError("the recordings are of different models; fit them separately")
    return sums, weights, known.pop()


def _require_moments(name: str, count: int, moments: torch.Tensor) -> None:
    int(name.partition(".")[2])
    if not 0 < count < 2**53:
        raise ValueError(f"{name} has {in_short(count)} tokens")
    if moments.ndim != 3 or 0 in moments.shape or moments.shape[1] != moments.shape[2] or not moments.isfinite().all():
        raise ValueError(f"{name} must have a finite square matrix per head")
