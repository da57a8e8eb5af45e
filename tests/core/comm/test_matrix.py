"""Both hosts × both models × ranks × every strategy, with masks in turn: whole pipelines equal one process.

test_para and test_xdit cross strategies and masks on transformers.
"""

from __future__ import annotations

from itertools import product

import pytest
from safetensors.torch import save_file

from dbsp_core import Strategy
from tests.core.comm.matrix_cases import MatrixCase, run_matrix, single_process_latents
from tests.support.models.shallow import make_shallow
from tests.xdit.xdit_cases import start_xfuser

TOLERANCE = 1e-5
MODELS = ("wan", "cogvideox")
MASKS = {
    "dense": {"source": "dense", "block_q": 16, "block_k": 8},
    "window": {"source": "window", "window": [1, 3, 3], "block_q": 8, "block_k": 16},
    "cdf": {"source": "sparge", "cdf": 0.5, "similarity": -1.0, "dense_text": False, "block_q": 8, "block_k": 8},
}
FAULTS = ("attends to its own tokens alone", "scales wrongly")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {model: make_shallow(model, folder / model) for model in MODELS}


@pytest.fixture(scope="module")
def references(folders, tmp_path_factory):
    """File of the latents of one process, by "model mask"."""
    latents = {
        f"{model} {name}": single_process_latents(folders[model], model, {"mask": mask}).contiguous()
        for model, (name, mask) in product(MODELS, MASKS.items())
    }
    for model in MODELS:
        for sparse in ("window", "cdf"):
            assert (latents[f"{model} {sparse}"] - latents[f"{model} dense"]).abs().max() > 100 * TOLERANCE
    file = tmp_path_factory.mktemp("references") / "latents.safetensors"
    save_file(latents, file)
    return str(file)


def cases(host: str, model: str, world: int) -> list[MatrixCase]:
    """Strategies with masks in turn, of which each host and model begins with another."""
    turn = ("para", "xdit").index(host) + 2 * MODELS.index(model)
    names = [list(MASKS)[(turn + place) % len(MASKS)] for place in range(len(Strategy.all_for(world)))]
    return [
        MatrixCase(host, model, f"{model} {name}", {"mask": MASKS[name], "strategy": str(strategy)})
        for name, strategy in zip(names, Strategy.all_for(world), strict=True)
    ]


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.long), 2, 3, pytest.param(4, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("host", ["para", "xdit"])
def test_pipelines_equal_one_process(pool, folders, references, host, model, world):
    workers = pool(world)
    if host == "xdit":
        workers.run(start_xfuser)
    wanted = cases(host, model, world)
    for differences in workers.run(run_matrix, folders, references, wanted):
        assert len(differences) == len(wanted)
        for case, difference in zip(wanted, differences, strict=True):
            assert difference <= TOLERANCE, case


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("host", ["para", "xdit"])
def test_a_wrong_attention_does_not_pass(pool, folders, references, host, model):
    workers = pool(2)
    if host == "xdit":
        workers.run(start_xfuser)
    config = {"mask": MASKS["cdf"], "strategy": "U1R2"}
    right = MatrixCase(host, model, f"{model} cdf", config)
    wrong = [
        *(MatrixCase(host, model, right.reference, config, fault) for fault in FAULTS),
        MatrixCase(host, model, f"{model} window", config),
        MatrixCase(host, model, right.reference, {**config, "mask": MASKS["dense"]}),
    ]
    for differences in workers.run(run_matrix, folders, references, wrong):
        assert all(difference > 10 * TOLERANCE for difference in differences), differences
