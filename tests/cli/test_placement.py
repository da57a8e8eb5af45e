"""`dbsp plan --model`: placements, what is predicted of them, and lines that the hosts' own parsers take."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

import dbsp_diffusers
import dbsp_para
from dbsp_cli.placement import Placement, placements_for, predict_placements
from dbsp_cli.placement_lines import HOST_LINES, lines_for
from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.hardware import load_hardware
from dbsp_core.layout.strategy import Strategy
from dbsp_core.models.table import MODEL_SPECS
from dbsp_core.sources import MaskRequest, SyntheticSource
from dbsp_xdit.flags import config_from, parse_known
from dbsp_xdit.models import preflight
from tests.support.repository import child_environment

SPEC = MODEL_SPECS["wan2.2-t2v-a14b"]
COGVIDEOX = MODEL_SPECS["cogvideox-5b"]
SMALL = replace(SPEC, heads=6, paper_thw=(3, 16, 16))
HARDWARE = load_hardware("h200")


@pytest.fixture(scope="module")
def masks():
    source = SyntheticSource(density=0.3, block_q=32, block_k=32)
    return [source.mask(MaskRequest(0, SMALL.heads, SMALL.thw, 0))]


def test_placements_by_hand():
    def name(one):
        return one.videos, one.guidance, str(one.strategy), one.vae

    found = {name(one) for one in placements_for(SPEC, 2, 2, Strategy.all_for)}
    assert found == {
        *((1, 1, strategy, vae) for strategy in ("U2R1", "U1R2") for vae in (False, True)),
        *((1, 2, "U1R1", vae) for vae in (False, True)),
        (2, 1, "U1R1", False),
    }
    distilled = MODEL_SPECS["wan2.2-distilled-i2v"]
    assert {one.guidance for one in placements_for(distilled, 2, 1, Strategy.all_for)} == {1}
    assert {one.gpus for one in placements_for(SPEC, 12, 6, Strategy.all_for)} == {12}


def test_parts_by_hand(masks):
    found = {one.placement: one for one in predict_placements(SMALL, masks, HARDWARE, 4)}
    halves = Placement(1, 2, Strategy(2, 1), False)
    alone = {one.placement: one for one in predict_placements(SMALL, masks, HARDWARE, 2)}
    both = alone[Placement(1, 1, Strategy(2, 1), False)]
    assert found[halves].attention_s == pytest.approx(both.attention_s / 2)
    assert found[halves].linear_s == pytest.approx(both.linear_s / 2)
    linear = SMALL.calls * SMALL.linear_flops / HARDWARE.constants.linear_flops_per_s
    for placement, one in found.items():
        assert one.linear_s == pytest.approx(linear / placement.of_a_video)
        parts = (one.attention_s, one.linear_s, one.decode_s, one.serial_s)
        assert one.seconds == pytest.approx(sum(parts))
        assert one.rho >= 1
    weights = 2 * (SMALL.parameters + SMALL.decoder.parameters)
    assert all(weights < one.memory for one in found.values())


def test_faster_links_more_gpus_and_fewer_videos_are_never_slower(masks):
    def best(machine, gpus, videos=1, **options):
        return predict_placements(SMALL, masks, machine, gpus, videos=videos, **options)[0].seconds

    known = HARDWARE.constants
    slow = replace(HARDWARE, constants=replace(known, network_bytes_per_s=known.network_bytes_per_s / 20))
    assert best(HARDWARE, 4, node_size=2) <= best(slow, 4, node_size=2)
    assert best(HARDWARE, 4) <= best(HARDWARE, 4, node_size=2)
    large = replace(SMALL, video=replace(SMALL.video, steps=4000))
    seconds = [predict_placements(large, masks, HARDWARE, gpus)[0].seconds for gpus in (1, 2, 4)]
    assert seconds == sorted(seconds, reverse=True)
    one = best(HARDWARE, 4)
    assert one < best(HARDWARE, 4, 2) < 2 * one + 1e-9


def test_groups_that_straddle_nodes_count_as_they_lie(masks):
    """Of two sequences of three ranks on nodes of four, the second lies on two nodes."""
    apart = {one.placement: one for one in predict_placements(SMALL, masks, HARDWARE, 6, node_size=4)}
    together = {one.placement: one for one in predict_placements(SMALL, masks, HARDWARE, 6, node_size=8)}
    placement = Placement(1, 2, Strategy(3, 1), False)
    assert apart[placement].attention_s > together[placement].attention_s


def test_what_does_not_fit_is_left_out_with_its_reason(masks):
    found = predict_placements(SMALL, masks, HARDWARE, 4)
    most, least = max(one.memory for one in found), min(one.memory for one in found)
    assert least < most
    limited = predict_placements(SMALL, masks, HARDWARE, 4, memory_limit=(least + most) / 2)
    assert {one.reason is None for one in limited} == {True, False}
    kept = [one.reason is None for one in limited]
    assert kept == sorted(kept, reverse=True), "those that fit come first"
    assert all("a GPU, which has" in one.reason for one in limited if one.reason is not None)


def test_the_command(dbsp):
    small = ("--model", "wan2.1-t2v-1.3b", "--gpus", 4, "--mask", 0.3, "--top", 2)
    code, out, _ = dbsp("plan", *small, "--json")
    told = json.loads(out)
    assert (code, told["label"], told["gpus"], len(told["placements"])) == (0, "modelled", 4, 2)
    first = told["placements"][0]
    assert {line["host"] for line in first["hosts"]} == {
        "diffusers",
        "para-attn",
        "dbsp generate",
        "xDiT",
        "vLLM-Omni",
        "SGLang",
        "LightX2V",
    }
    code, out, _ = dbsp("plan", *small)
    assert code == 0
    assert "modelled" in out
    assert "vae=True)" in out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "needs a mask file, --sequences CODES or --model NAME"),
        (("--model", "wan2.1-t2v-14b"), "give --gpus"),
        (("--model", "wan3", "--gpus", 8), "wan3"),
        (("--model", "wan2.1-t2v-1.3b", "--gpus", 2, "--memory", "much"), "is not of the form '2GiB'"),
        (("--model", "wan2.1-t2v-1.3b", "--gpus", 2, "--memory", "1GB", "--mask", 0.3), "fits no placement on 2 GPUs"),
    ],
)
def test_mistakes_take_one_line(dbsp, options, complaint):
    code, out, err = dbsp("plan", *options)
    assert (code, out) == (2, "")
    assert complaint in err
    assert len(err.strip().splitlines()) == 1


PLACEMENTS = [
    Placement(videos, guidance, strategy, vae)
    for videos in (1, 2)
    for guidance in (1, 2)
    for strategy, vae in ((Strategy(4, 2), True), (Strategy(3, 1), False))
]
MODELS = ["wan2.2-t2v-a14b", "wan2.1-i2v-14b", "cogvideox-5b"]


def lines(host, mask=None):
    """(model, placement, line) of all that a host can run; each host can run some."""
    made = [
        (MODEL_SPECS[name], placement, HOST_LINES[host](placement, MODEL_SPECS[name], mask))
        for name in MODELS
        for placement in PLACEMENTS
    ]
    assert all((line.line is None) != (line.reason is None) for *_, line in made)
    found = [(model, placement, line.line) for model, placement, line in made if line.line is not None]
    assert found
    return found


@pytest.mark.parametrize("mask", [None, "window:window=[3,5,8]"])
def test_lines_in_python_fit_the_functions_that_they_call(mask):
    functions = {"enable": dbsp_diffusers.enable, "parallelize_pipe": dbsp_para.parallelize_pipe}
    seen = set()
    for host in ("diffusers", "para-attn"):
        for _, placement, line in lines(host, mask):
            (call,) = (one.value for one in ast.parse(line).body if isinstance(one, ast.Expr))
            assert isinstance(call, ast.Call)
            name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
            keywords = {one.arg: one.value for one in call.keywords}
            inspect.signature(functions[name]).bind(*call.args, **keywords)
            if name == "parallelize_pipe":
                config = DbspConfig.load(ast.literal_eval(keywords["config"]))
                assert (config.strategy, config.vae) == (placement.strategy, placement.vae)
            elif len(call.args) > 1:
                assert type(DbspConfig.load(ast.literal_eval(call.args[1])).mask).__name__ == "WindowSource"
            seen.add((host, placement.guidance))
    assert seen == {("diffusers", 1), ("diffusers", 2), ("para-attn", 1), ("para-attn", 2)}


@pytest.mark.parametrize("mask", [None, "window:window=[3,5,8]"])
def test_lines_of_xdit_pass_its_checks(tmp_path, mask):
    (tmp_path / "first.png").touch()
    guided = set()
    for model, placement, line in lines("xDiT", mask):
        program, *arguments = shlex.split(line)
        images = ["--input_images", str(tmp_path / "first.png")] if model.signature.images[0] else []
        preflight([*arguments, *images])
        args = parse_known(arguments)
        config = config_from(args)
        assert program == "xdit"
        assert config is not None
        assert config.vae == placement.vae
        assert Strategy(args["ulysses_degree"], args["ring_degree"]) == placement.strategy
        assert args["use_cfg_parallel"] == (placement.guidance > 1)
        guided.add((model.name, placement.guidance))
    assert ("wan2.2-t2v-a14b", 2) not in guided
    assert {("wan2.1-i2v-14b", 2), ("cogvideox-5b", 2)} <= guided


XFUSERS_PARSER = """
import json, shlex, sys
from dbsp_xdit.patches import install
install(active=True)
from xfuser.config import FlexibleArgumentParser, xFuserArgs
parser = xFuserArgs.add_runner_args(FlexibleArgumentParser())
names = ("data_parallel_degree", "sp_vae", "use_cfg_parallel", "ulysses_degree", "ring_degree")
for line in json.load(sys.stdin):
    args = parser.parse_args([*shlex.split(line)[1:], "--prompt", "a cat"])
    print(json.dumps([getattr(args, name) for name in names]))
"""


@pytest.mark.skipif(importlib.util.find_spec("xfuser") is None, reason="xfuser is not installed")
def test_lines_of_xdit_pass_xfusers_own_parser():
    """In a process of its own: without a GPU, xfuser is imported by a shim."""
    made = lines("xDiT")
    given = json.dumps([line for *_, line in made])
    done = subprocess.run(
        [sys.executable, "-c", XFUSERS_PARSER], input=given, capture_output=True, text=True, env=child_environment()
    )
    assert done.returncode == 0, done.stderr
    parsed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(parsed) == len(made)
    for (_, placement, _), (data, vae, guidance, ulysses, ring) in zip(made, parsed, strict=True):
        assert (data, bool(vae), guidance) == (placement.videos, placement.vae, placement.guidance > 1)
        assert Strategy(ulysses, ring) == placement.strategy


def test_lines_of_the_command_are_its_own(dbsp):
    line = HOST_LINES["dbsp generate"](Placement(1, 1, Strategy(2, 1), True), MODEL_SPECS["wan2.1-t2v-1.3b"], None)
    program, command, *options = shlex.split(line.line)
    assert (program, command) == ("dbsp", "generate")
    code, out, err = dbsp(command, *options, "--set", "model=tiny-wan", "--prompt", "a cat", "--dry-run", "--json")
    assert "unknown" not in err
    if code == 0:
        assert (json.loads(out)["settings"]["vae"], json.loads(out)["settings"]["strategy"]) == (True, "U2R1")


def test_lines_of_lightx2v_are_json_with_its_sizes():
    for _, placement, line in lines("LightX2V"):
        parallel = json.loads(f"{{{line}}}")["parallel"]
        config = DbspConfig.load(parallel["dbsp"])
        assert config.strategy == placement.strategy
        assert parallel["seq_p_size"] * parallel.get("cfg_p_size", 1) == placement.gpus


def test_every_host_has_a_line_or_a_reason():
    for model in (SPEC, COGVIDEOX):
        for placement in PLACEMENTS:
            assert [line.host for line in lines_for(placement, model, None)] == list(HOST_LINES)
