"""scripts/train_tiny on toy settings: it resumes to the same state, and what it computes is what inference does."""

from __future__ import annotations

import json

import pytest

from tests.support.programs import run_module

pytest.importorskip("diffusers")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def found() -> dict:
    return json.loads(run("tests.scripts.training.training_cases").splitlines()[-1])


def run(module: str, *arguments: object) -> str:
    done = run_module(module, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("stage", ["autoencoder", "transformer"])
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(found, stage):
    assert found[stage] == {"same": True, "losses": True, "finite": True, "learned": True}


def test_captions_with_few_pads_are_attended_as_with_all(found):
    assert found["pads"]["error"] <= 1e-4
    assert found["pads"]["ignored"] > 1e-2, "the pads must matter for this to be a test"


def test_attention_written_out_is_attention(found):
    assert found["attention"] < 0.05  # bfloat16


def test_a_toy_run_makes_a_pipeline_with_a_card_and_runs_again(tmp_path):
    command = "scripts.training", "--toy", "--threads", 1
    folders = "--work", tmp_path / "work", "--weights", tmp_path / "weights"
    assert "transformer" in run(*command, *folders)
    weights = (tmp_path / "weights" / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes()
    card = (tmp_path / "weights" / "README.md").read_text(encoding="utf-8")
    assert "360 captions" in card
    assert len((tmp_path / "weights" / "loss.csv").read_text().splitlines()) == 1 + 3 + 4
    run(*command, *folders)
    assert (tmp_path / "weights" / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes() == weights
