"""SGLang Diffusion with db-SP: its models on CPU ranks equal one process of them.

Runs in an environment of its own: `scripts/engines test`.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="run scripts/engines test")
from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph as breakable
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import enable_breakable_cuda_graph

from dbsp_core.layout.strategy import Strategy
from dbsp_core.utils.errors import UserError
from dbsp_engines.sglang import EXPECTED, _attentions_of_h3
from dbsp_engines.sglang_attention import DbspImpl, DbspTransformer
from scripts.checks.engines.commands import generate
from scripts.checks.engines.runs import LAYERS, STEPS, Case, run
from tests.engines.cases import (
    EVEN,
    KNOWN,
    PREDICTED,
    SPLITS,
    UNEQUAL,
    EveryEngine,
    assert_exact,
)

ENGINE = "sglang"


class TestEveryEngine(EveryEngine):
    engine, expected, without = ENGINE, EXPECTED, {"SGLANG_PLUGINS": "none"}


@pytest.mark.parametrize(("ulysses", "ring", "heads"), [(1, 2, 5), (2, 1, 4), (2, 2, 4)])
def test_minimax_h3(ulysses, ring, heads):
    """Text, audio and a first frame before the video; of 128 slots, the last of four ranks has padding alone."""
    cases = Case(heads, (UNEQUAL, EVEN), KNOWN, model="h3"), Case(heads, (UNEQUAL,), PREDICTED, model="h3_keyframe")
    assert_exact(cases, run(ENGINE, ulysses, ring, *cases))


def test_minimax_h3_runs_with_heads_that_its_ulysses_rejects(tmp_path):
    """SGLang has a ring of two, and db-SP's configuration says how they share 5 heads."""
    settings = tmp_path / "ulysses.yaml"
    settings.write_text(f"mask: {KNOWN}\nstrategy: U2R1\n", encoding="utf-8")
    case = Case(5, (UNEQUAL,), str(settings), model="h3")
    assert_exact([case], run(ENGINE, 1, 2, case))


def test_minimax_h3_with_linear_attention_is_rejected():
    linear = SimpleNamespace(_resolve_attention_backend_once=lambda: None)
    linear.blocks = [SimpleNamespace(attn=SimpleNamespace(hybrid=object()))]
    with pytest.raises(UserError, match="linear attention in addition to its softmax"):
        _attentions_of_h3(linear)


VIDEO, FRAMES, IMAGE = (6, 9, 5), (4, 5, 5), (1, 9, 9)
VSA = "vsa:sparsity=0.6"


@pytest.mark.parametrize(("ulysses", "ring"), SPLITS)
def test_text_beside_the_video(ulysses, ring):
    """Whole on every rank, in parts that differ, with padding; HunyuanVideo's ranks have whole frames."""
    cases = (
        Case(4, (FRAMES, (8, 3, 4)), PREDICTED, passes=2, frames=True, model="hunyuan"),
        Case(4, (FRAMES,), KNOWN, frames=True, model="hunyuan_prompt_of_one"),
        Case(4, (IMAGE, (1, 5, 8)), PREDICTED, passes=2, model="flux"),
        Case(4, (IMAGE,), KNOWN, model="qwen"),
        Case(4, (IMAGE,), PREDICTED, model="qwen_padded_text"),
    )
    assert_exact(cases, run(ENGINE, ulysses, ring, *cases))


@pytest.mark.parametrize("strategy", ["U2R1", "U1R2", "U2R2"])
def test_gates_of_vsa(strategy, tmp_path):
    """SGLang's own layer for Wan's VSA rejects rings, so db-SP's configuration has the strategy."""
    settings = tmp_path / "vsa.yaml"
    settings.write_text(f"mask: {VSA}\nstrategy: {strategy}\n", encoding="utf-8")
    cases = [Case(4, (VIDEO,), str(settings), model=model) for model in ("wan_vsa", "h3_vsa")]
    assert_exact(cases, run(ENGINE, Strategy.parse(strategy).world, 1, *cases))


def test_another_branch_of_vsa_would_be_seen():
    cases = [Case(4, (VIDEO,), VSA, model=model, wrong=f"{VSA},coarse=false") for model in ("wan_vsa", "h3_vsa")]
    assert all(found["error"] > 1e-2 for found in run(ENGINE, 2, 1, *cases))


@pytest.mark.parametrize("strategy", ["U2R1", "U1R2"])
def test_ltx2(strategy, tmp_path):
    """Frames of padding, four passes of a step, a layer that one of them skips, and two sizes, as of two stages.

    SGLang's other attentions take Ulysses alone without FlashAttention; db-SP's configuration says its own strategy.
    """
    settings = tmp_path / "ltx2.yaml"
    settings.write_text(f"mask: {PREDICTED}\nstrategy: {strategy}\n", encoding="utf-8")
    case = Case(4, ((5, 4, 4), (3, 4, 6)), str(settings), passes=4, model="ltx2")
    found = run(ENGINE, 2, 1, case)
    assert_exact([case], found)
    assert found[0]["calls"]["most"] == 2 * STEPS * (4 * LAYERS - 1), "the perturbed pass skips a layer"


def test_tensor_parallelism():
    """Two ranks have each half of the heads, and two share the sequence: 6 and 10 heads, 3 and 5 on a rank."""
    cases = (
        Case(6, (UNEQUAL, EVEN), PREDICTED, passes=2, tensor=2),
        Case(10, (UNEQUAL,), KNOWN, tensor=2),
        Case(4, (FRAMES,), PREDICTED, frames=True, model="hunyuan", tensor=2),
    )
    assert_exact(cases, run(ENGINE, 4, 1, *cases))


DIT = {"max_warmup_steps": 1, "residual_diff_threshold": 1e3}
TEA = {"teacache_thresh": 100.0, "start_skipping": 1, "end_skipping": STEPS, "coefficients": [0, 0, 0, 1, 0]}


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2)])
def test_step_caches_skip_the_same_layers_as_one_process(ulysses, ring):
    """Cache-DiT computes the first layer of a pass, TeaCache and Spectrum none; for H3 SGLang has Cache-DiT alone."""
    wan, step = Case(3, (UNEQUAL, EVEN), PREDICTED, passes=2), 2 * 2 * LAYERS
    cases = (
        replace(wan, cache="cache_dit", cache_options=DIT),
        replace(wan, cache="teacache", cache_options=TEA),
        replace(wan, cache="spectrum", cache_options={"warmup_steps": STEPS - 1}),
        Case(4, (UNEQUAL, EVEN), PREDICTED, model="h3_keyframe", cache="cache_dit", cache_options=DIT),
        replace(wan, cache="teacache", cache_options=TEA, unlike=True),
    )
    found = run(ENGINE, ulysses, ring, *cases)
    *same, unlike = found
    assert_exact(cases[:-1], same)
    counts = [list(each["calls"].values()) for each in found]
    assert counts[:4] == [
        [step + (STEPS - 1) * 2 * 2] * 3,
        [step] * 3,
        [(STEPS - 1) * step] * 3,
        [2 * LAYERS + (STEPS - 1) * 2] * 3,
    ]
    assert counts[4] == [STEPS * step, STEPS * step, step], "one rank alone would skip: none does"
    assert unlike["error"] > 1e-3


def test_step_caches_and_tensor_parallelism():
    """The vote of TeaCache is of all four ranks; one of them alone would skip."""
    wan = Case(6, (UNEQUAL,), PREDICTED, passes=2, tensor=2)
    cases = [replace(wan, cache="cache_dit", cache_options=DIT), replace(wan, cache="teacache", cache_options=TEA)]
    found = run(ENGINE, 4, 1, *cases, replace(cases[1], unlike=True))
    assert_exact(cases, found[:2])
    for which in ("fewest", "most"):
        assert [each["calls"][which] for each in found] == [2 * (LAYERS + STEPS - 1), 2 * LAYERS, 2 * STEPS * LAYERS]


def test_whole_frames_on_each_rank_and_compiled():
    cases = Case(3, ((4, 5, 5),), KNOWN, frames=True), Case(3, (UNEQUAL,), PREDICTED, compiled=True)
    assert_exact(cases, run(ENGINE, 1, 2, *cases))


def test_cfg_passes_on_ranks_of_their_own():
    case = Case(3, (UNEQUAL,), PREDICTED, passes=2, cfg_parallel=True)
    assert_exact([case], run(ENGINE, 4, 1, case))


def test_what_is_not_its_own_model_stops_the_worker_in_one_line(tmp_path):
    supported = "db-SP supports SGLang's own transformers with one self-attention per block"
    with pytest.raises(RuntimeError, match=f"UserError: {supported}, and this is DiffusersPipeline; "):
        generate(ENGINE, tmp_path, "rejected", 1, True, "--backend", "diffusers")


class Captured:
    """What SGLang's eager parts of a breakable CUDA graph need of a capture: here nothing is captured in between."""

    def __init__(self) -> None:
        self.cuda_graph, self._barrier_fn = SimpleNamespace(_break_fns=[]), None

    def _end_current_segment(self) -> None: ...

    def _begin_new_segment(self) -> None: ...


def test_a_replayed_graph_begins_passes_of_its_own_steps():
    """Attention is an eager part of SGLang's breakable graphs, which ask for the step and the text when replayed."""
    q = torch.randn(3, 1, 82, 3, 24, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 82, dtype=torch.bool)
    seen: list[tuple[int, int]] = []
    session = SimpleNamespace(session=SimpleNamespace(group=SimpleNamespace(size=1)))
    session.begin = lambda layout, device, *, step, **_: seen.append((step, layout.text))
    session.attend = lambda layer, q, k, v, scale, text, gate: torch.cat([text[0], q], dim=1) + seen[-1][0]
    transformer = DbspTransformer(SimpleNamespace(patch_size=(1, 2, 2)), session)
    kernels = [DbspImpl(1.0, transformer, layer) for layer in range(2)]
    request, capture = SimpleNamespace(raw_latent_shape=(1, 4, 3, 10, 10), is_cfg_negative=False), Captured()
    inputs = q[0, :, 7:].clone()

    def forward(step: int) -> list[torch.Tensor]:
        text = dict(zip(("q_prefix", "k_prefix", "v_prefix"), q[:, :, :7], strict=True))
        with set_forward_context(step, None, request):
            return [kernel.attend(inputs, inputs, inputs, attn_mask=mask, **text) for kernel in kernels]

    token = breakable._current_capture_var.set(capture)
    try:
        with enable_breakable_cuda_graph():
            outputs = forward(0)
    finally:
        breakable._current_capture_var.reset(token)
    assert seen == [(0, 7)]
    assert len(capture.cuda_graph._break_fns) == 2
    mask[:, 5:7] = False
    with set_forward_context(2, None, request):
        for part in capture.cuda_graph._break_fns:
            part()
    assert seen == [(0, 7), (2, 5)]
    expected = torch.cat([q[0, :, :7], inputs], dim=1) + 2
    assert all(torch.equal(out, expected) for out in outputs), "the graph's own buffers hold the new pass"
