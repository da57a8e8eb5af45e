"""Low-rank prediction: fitted in closed form, and rejected where it does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dbsp_cli.mask_tools.fit import fit_projections, fit_recording
from dbsp_core import BlockGrid
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.sources import LocalQK, LowRankSource, MaskRequest, RecordQKSource
from dbsp_core.utils.errors import UserError
from tests.core.sources.predicted.sparge_cases import SpargeCase, local_tokens
from tests.support.settings import session_of
from tests.support.workers import assert_all_raise


@dataclass(frozen=True)
class LowRankCase(SpargeCase):
    """A prediction by the fitted file at `path`."""

    path: str = ""
    settings: dict[str, Any] = field(default_factory=lambda: {"topk": 0.3})

    @property
    def source(self) -> LowRankSource:  # type: ignore[override]
        return LowRankSource(**{"block_q": 32, "block_k": 16, **self.settings}, path=self.path)


def record_together(rank: int, world: int, folder: str, case: LowRankCase) -> None:
    """Writes this rank's moments."""
    recorder = RecordQKSource(path=folder)
    grid = BlockGrid.uniform(case.request.tokens, 16)
    tokens = local_tokens(rank, world, case, Strategy(1, world), grid)
    recorder.mask(replace(case.request, layers=1), tokens)
    recorder.write()


def predict_with_fitted(rank: int, world: int, case: LowRankCase, fault: str, folder: str) -> None:
    """Runs a session's attention, which would hang if one rank stopped alone."""
    path = case.path
    if rank == 1 and fault in ("other file", "broken file"):
        path = str(Path(folder) / fault.partition(" ")[0])
    mask = {"source": "lowrank", "path": path, "topk": 0.3}
    session = session_of({"mask": mask}, f"U1R{world}", case.heads)
    head_dim = 8 if fault == "head_dim" else case.head_dim
    q = torch.ones(1, case.heads, session.begin(Video(case.thw)).shard, head_dim)
    session.attend(0, q, q, q)


HEADS, HEAD_DIM, RANK = 5, 16, 6


def fit(folder: Path, case: LowRankCase, rank: int) -> str:
    """Returns the path of a file fitted to a case's tokens."""
    recorder = RecordQKSource(32, 16, path=str(folder))
    assert recorder.mask(replace(case.request, layers=1), LocalQK.alone(*case.tensors())).bits.all()
    recorder.write()
    fit_recording([folder], folder / "fitted.safetensors", rank)
    return str(folder / "fitted.safetensors")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("moments"), LowRankCase(), RANK)


def test_fit_has_the_least_error_of_its_rank():
    """Compares with the singular values that no scores of this rank have (Eckart and Young), in float64."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    q, k = (torch.randn(200, 8, generator=generator, dtype=torch.float64) @ mixing for _ in "qk")
    a, b, kept = fit_projections((q.T @ q / 200)[None], (k.T @ k / 200)[None], 3)
    exact = q @ k.T
    error = ((q @ a[0].double()) @ (k @ b[0].double()).T - exact).square().mean()
    least = torch.linalg.svdvals(exact)[3:].square().sum() / exact.numel()
    assert least > 0.01 * exact.square().mean()
    assert float(error) == pytest.approx(float(least), rel=1e-5)
    assert float(error) == pytest.approx(float((1 - kept[0]) * exact.square().mean()), rel=1e-5)


def test_recordings_of_all_ranks_make_one_fit(pool, tmp_path):
    pool(3).run(record_together, str(tmp_path), LowRankCase(layout="shuffled"))
    assert len(list(tmp_path.glob("moments-*"))) == 3
    fit_recording([tmp_path], tmp_path / "fitted", HEAD_DIM)
    tensors = load_file(tmp_path / "fitted")
    product = tensors["query.0"] @ tensors["key.0"].transpose(1, 2)  # at full rank every score is exact
    assert torch.allclose(product, torch.eye(HEAD_DIM).expand(HEADS, -1, -1), atol=1e-3)


def test_full_rank_chooses_the_blocks_of_most_attention(fitted, tmp_path):
    """Compares with attention of mean queries computed in full, from which rank 6 of 16 must differ."""
    case = LowRankCase(path=fitted, thw=(5, 6, 8), settings={"topk": 0.25, "block_q": 16})
    full = fit(tmp_path, case, HEAD_DIM)
    q, k = (t[0].double() for t in case.tensors())
    proxy = q.unflatten(1, (-1, 16)).mean(dim=2)
    mass = torch.softmax(proxy @ k.transpose(1, 2) * HEAD_DIM**-0.5, dim=-1).unflatten(2, (-1, 16)).sum(3)
    best = torch.zeros_like(mass).scatter(-1, mass.topk(3).indices, 1.0).bool()
    agreed = {}
    for path in (full, fitted):
        bits = replace(case, path=path).source.mask(case.request, LocalQK.alone(*case.tensors())).bits
        agreed[path] = float((bits & best).sum() / best.sum())
    assert agreed[full] > 0.995
    assert agreed[fitted] < 0.98


def test_other_files_are_rejected(fitted, tmp_path):
    tensors = load_file(fitted)
    for changed in (
        {"query.0": tensors["query.0"]},
        {**tensors, "key.0": tensors["key.0"][:, :, :2].contiguous()},
        {**tensors, "key.0": tensors["key.0"] * torch.nan},
    ):
        save_file(changed, tmp_path / "other")
        with pytest.raises(UserError, match="is not a file of fitted projections"):
            LowRankSource(path=str(tmp_path / "other"), topk=0.2)
    for heads, layers in ((HEADS, 2), (4, None)):
        with pytest.raises(UserError, match=f"is for 1 layers of 5 heads, the model has {layers} of {heads}"):
            LowRankSource(path=fitted, topk=0.2).grid(MaskRequest(0, heads, (2, 2, 2), layers=layers))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("head_dim", "has heads of size 16 and layers [0], layer 0 of the model has size 8"),
        ("other file", "differs on rank(s) [1]"),
        ("broken file", "rank(s) [1]: "),
    ],
)
def test_fault_on_one_rank_is_rejected_on_all(pool, fitted, tmp_path, fault, message):
    save_file({name: one * 2 for name, one in load_file(fitted).items()}, tmp_path / "other")
    (tmp_path / "broken").write_text("hello")
    assert_all_raise(pool, 3, message, predict_with_fitted, LowRankCase(path=fitted), fault, str(tmp_path))
