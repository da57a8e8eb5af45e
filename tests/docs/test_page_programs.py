"""Programs on pages run as printed, with tiny models."""

from __future__ import annotations

import ast
import re

import pytest

from dbsp_cli.tiny_models import make_tiny
from dbsp_diffusers.models import ARCHITECTURES, register_architecture
from tests.docs.ranks import run_on_ranks
from tests.support.repository import ROOT


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def programs_of(text: str, having: str) -> list[str]:
    return [code for code in re.findall(r"```python\n(.*?)```", text, re.S) if having in code]


def with_lines(program: str, *lines: str) -> str:
    """Returns a program with other values of variables."""
    for line in lines:
        program, replaced = re.subn(rf"^{line.split()[0]} = .*$", line, program, flags=re.M)
        assert replaced == 1
    return program


def distances(tmp_path, program: str) -> list[tuple[float, float, float]]:
    """Returns what each of two ranks prints of the model that is added: dense from stock, ranks from one, sparse from
    dense.
    """
    (tmp_path / "check.py").write_text(program)
    said, _ = run_on_ranks(2, tmp_path, "check.py")
    assert sorted(said) == ["0", "1"]
    line = r"dense from stock (\S+), sparse from one process (\S+), from dense (\S+)\n"
    return [tuple(map(float, numbers)) for lines in said.values() for numbers in re.findall(line, lines)]


def test_the_model_that_is_added_is_right_on_two_ranks(tmp_path):
    (program,) = programs_of(page("adding-a-model"), "init_process")
    assert "tests" not in program, "a wheel has none"
    found = distances(tmp_path, program)
    assert len(found) == 2
    for dense, ranks, sparse in found:
        assert max(dense, ranks) <= 1e-5
        assert sparse > 1e-3, "the mask must matter"


@pytest.mark.long
def test_a_wrong_entry_is_found(tmp_path):
    (program,) = programs_of(page("adding-a-model"), "init_process")
    assert program.count('text="last"') == 1
    found = distances(tmp_path, program.replace('text="last"', 'text="first"'))
    assert len(found) == 2
    assert all(max(dense, ranks) > 1e-3 for dense, ranks, _ in found)


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="already registered"):
        register_architecture("WanTransformer3DModel", ARCHITECTURES["FluxTransformer2DModel"])
    register_architecture("WanTransformer3DModel", ARCHITECTURES["WanTransformer3DModel"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["diffusers", "paraattention"])
def test_the_script_makes_a_video_and_shows_what_sparse_attention_does(tmp_path, monkeypatch, name, dbsp):
    pytest.importorskip("para_attn")
    text = page(name)
    script, instead = programs_of(text, "MODEL =")
    (command,) = re.findall(r"`dbsp (tiny wan-trained \S+)`", text)
    monkeypatch.chdir(tmp_path)
    code, _, err = dbsp(*command.split())
    assert code == 0, err
    less = '"num_frames": 17, "num_inference_steps": 2'
    instead, fewer = re.subn('"num_frames": 33, "num_inference_steps": 12', less, instead)
    assert fewer == 1
    (tmp_path / "generate.py").write_text(with_lines(script, *instead.splitlines()))
    said, errors = run_on_ranks(2, tmp_path, "generate.py")
    assert (tmp_path / "video.mp4").stat().st_size > 1000
    assert "skipped no blocks" not in errors
    shown = ast.literal_eval(said["0"].strip().splitlines()[-1])
    assert shown["calls"] > 0
    assert 1.001 < shown["mean_rho"] < 1.5


@pytest.mark.long
def test_the_script_of_readme_makes_a_video_on_cpus(tmp_path):
    (script,) = programs_of((ROOT / "README.md").read_text(encoding="utf-8"), "dbsp_diffusers")
    make_tiny("wan-trained", tmp_path / "tiny")
    on_cpus = {
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n': "",
        '"nccl"': '"gloo"',
        '"cuda"': '"cpu"',
        "torch.bfloat16": "torch.float32",
        '"Wan-AI/Wan2.1-T2V-14B-Diffusers"': '"tiny"',
        "enable(pipe)": 'enable(pipe, "tiny-wan-trained")',
        "height=720, width=1280": "height=64, width=96, num_frames=9, num_inference_steps=2",
    }
    for on_gpus, instead in on_cpus.items():
        assert script.count(on_gpus) == 1, on_gpus
        script = script.replace(on_gpus, instead)
    (tmp_path / "generate.py").write_text(script)
    run_on_ranks(2, tmp_path, "generate.py")
    assert (tmp_path / "ball.mp4").stat().st_size > 1000


@pytest.mark.long
def test_the_training_program_trains_on_three_ranks_of_which_one_has_no_data(tmp_path):
    (program, *_) = programs_of(page("training"), "MODEL =")
    folder = make_tiny("wan", tmp_path / "tiny")
    lines = f'MODEL = "{folder}"', "LOADERS = [[(3, 8, 12)], [(1, 8, 8)] * 2, []]", "STEPS = 2"
    (tmp_path / "train.py").write_text(with_lines(program, *lines))
    said, _ = run_on_ranks(3, tmp_path, "train.py")
    losses = re.findall(r"step (\d): loss of all samples (\d+\.\d+)", "".join(said.values()))
    assert [step for step, _ in losses] == ["0", "1"]
    assert all(float(loss) > 0 for _, loss in losses)
