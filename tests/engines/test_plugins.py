"""Tests of plug-ins that need no engine: shards on ranks that are threads, rejections, versions.

And what they change in an engine and undo, on stubs for the few modules of it that they import:
test_vllm_omni.py, test_sglang.py and test_lightx2v.py run the engines themselves.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.nn.functional as F

import dbsp_engines.lightx2v
import dbsp_engines.sglang
from dbsp_core import SequenceGroup
from dbsp_core.masks.steps import StepClock
from dbsp_core.runtime.engine_session import EngineLayout, EngineSession
from dbsp_core.utils import expected_host
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.expected_host import ExpectedHost
from dbsp_diffusers.models import TokenSequence
from dbsp_engines import lightx2v_models, sglang_attention, vllm_omni_plugin
from dbsp_engines.lightx2v import DbspAttention
from scripts.checks.engines.reference import attend_under
from tests.support.oracle import largest_difference
from tests.support.repository import ROOT
from tests.support.thread_ranks import ThreadRanks

KNOWN = "synthetic:density=0.4,block_q=16,block_k=8"
MASK, THW, LAYERS, HEADS, STEPS = "sparge:cdf=0.6,block_q=16,block_k=8", (3, 5, 5), 2, 3, 2
T = TypeVar("T")


def scheduler(config: dict[str, Any] | None = None) -> SimpleNamespace:
    settings = {"num_layers": LAYERS, "parallel": {"dbsp": MASK}, "enable_cfg": True}
    return SimpleNamespace(config=settings | (config or {}), step_index=0, infer_condition=True)


def whole(step: int, layer: int, branch: bool) -> list[torch.Tensor]:
    """q, k and v of all tokens, [tokens, heads, D]."""
    seed = 100 * step + 10 * layer + branch
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3 * 5 * 5, HEADS, 8, generator=generator) for _ in range(3)]


def padded_to(slots: int, tokens: torch.Tensor) -> torch.Tensor:
    """Returns [slots, heads, D]: tokens, then padding that would be most of a softmax."""
    return F.pad(tokens, (0, 0, 0, 0, 0, slots - len(tokens)), value=1e4)


def of_lightx2v(rank: int, world: int) -> float:
    """LightX2V's calls of two transformers one after another: the largest difference from one process."""
    models = [[DbspAttention() for _ in range(LAYERS)] for _ in range(2)]
    now, worst = scheduler(), 0.0
    for step in range(STEPS):
        now.step_index = step
        for now.infer_condition in (True, False):
            for layer, attention in enumerate(models[step % 2]):
                tokens = whole(step, layer, now.infer_condition)
                padded = [padded_to(-(-len(one) // world) * world, one).chunk(world)[rank] for one in tokens]
                context = {"block_idx": layer, "scheduler": now, "grid_sizes": THW}
                out, _ = attention.apply_new(*padded, attention_kwargs=context, tensor_fusion=False)
                expected = attend_under(MASK, layer, LAYERS, THW, *(one[None] for one in tokens))[0].flatten(1)
                gathered = torch.cat(SequenceGroup.from_group().all_gather(out))[: len(expected)]
                worst = max(worst, largest_difference(gathered, expected))
    return worst


def test_lightx2v_equals_one_process():
    assert max(ThreadRanks(3).run(of_lightx2v)) <= 1e-5


def of_lightx2vs_older_interface(rank: int, world: int, last: bool) -> float:
    """Text whole on every rank, after the image or before it: two passes, of which the second leaves out layer 0.

    Masks differ by layer.
    """
    text, thw = 7, (1, 5, 15)
    pre = SimpleNamespace(grid_sizes=thw, txt=torch.zeros(1, text, 4), encoder_hidden_states=torch.zeros(text, 4))
    cls = type("Model", (), {"_seq_parallel_pre_process": lambda model, pre: pre})
    layout = lightx2v_models._hunyuan if last else lightx2v_models._qwen_image
    lightx2v_models._hook("Model", layout, "dbsp", SimpleNamespace(Model=cls))
    model, worst = cls(), 0.0
    now = scheduler({"parallel": {"dbsp": KNOWN, "seq_p_attn_type": "dbsp"}})
    now.input_info = SimpleNamespace(image_shapes=[[thw]])
    weights, infer = SimpleNamespace(blocks=[None] * LAYERS), SimpleNamespace(_mm_skip_video_self_blocks=())
    vars(model).update(scheduler=now, config=now.config, seq_p_group=None)
    vars(model).update(transformer_weights=weights, transformer_infer=infer)
    for step, infer._mm_skip_video_self_blocks in enumerate(((), (0,))):
        now.step_index = step
        model._seq_parallel_pre_process(pre)
        for layer in [layer for layer in range(LAYERS) if layer not in infer._mm_skip_video_self_blocks]:
            words, image = whole(step, layer, True), whole(step, layer, False)
            joined = [torch.cat([one[:text], tokens])[None] for one, tokens in zip(words, image, strict=True)]
            expected = attend_under(KNOWN, layer, LAYERS, thw, *joined, text=text)[0].flatten(1)
            shards = [padded_to(-(-75 // world) * world, one).chunk(world)[rank] for one in image]
            parts = [[one[:text], shard][:: -1 if last else 1] for one, shard in zip(words, shards, strict=True)]
            sliced = {"slice_qkv_len": len(parts[0][0]), "img_first": last}
            out = DbspAttention().apply(*map(torch.cat, parts), **sliced)
            of_text, of_shard = out.tensor_split([len(parts[0][0])])[:: -1 if last else 1]
            gathered = torch.cat([of_text, *SequenceGroup.from_group().all_gather(of_shard.contiguous())])
            worst = max(worst, largest_difference(gathered[: text + 75], expected))
    return worst


@pytest.mark.parametrize("last", [True, False], ids=["text last", "text first"])
def test_lightx2vs_older_interface_equals_one_process(last):
    assert max(ThreadRanks(4).run(of_lightx2vs_older_interface, last)) <= 1e-5


@pytest.mark.parametrize(
    ("changed", "settings", "said"),
    [
        ({"quant_scheme": "fp8"}, {}, "set precision: {qkv: int8, out: int8} in"),
        ({"attention_kwargs": None}, {}, "does not know how this model of LightX2V shards"),
        ({"k": torch.zeros(100, HEADS, 8)}, {}, "keys of earlier frames"),
        ({}, {"feature_caching": "Ada"}, "feature_caching Ada decides by one rank"),
        (
            {},
            {"feature_caching": "Tea", "model_cls": "hunyuan_video_1.5"},
            "feature_caching Tea decides by one rank",
        ),
        ({}, {"tensor_parallel": True}, "remove parallel.tensor_p_size"),
    ],
)
def test_lightx2v_setting_that_is_not_supported_is_rejected_on_every_rank(changed, settings, said):
    def rejection(rank: int, world: int) -> str:
        q = torch.zeros(38, HEADS, 8)
        context = {"block_idx": 0, "scheduler": scheduler(settings), "grid_sizes": THW}
        with pytest.raises(UserError) as rejected:
            DbspAttention().apply_new(**{"q": q, "k": q, "v": q, "attention_kwargs": context} | changed)
        return str(rejected.value)

    assert all(said in answer and "\n" not in answer for answer in ThreadRanks(2).run(rejection))


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A stub on the path for an engine, of version 1.2.3, which cannot be imported; and what is expected of it."""
    package = tmp_path / "engine_stub" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "engine_stub" / "__init__.py").write_text("raise RuntimeError\nfrom x import helper as renamed\n")
    source = "LIMIT = 1\nclass Layer:\n    size: int\n    def __init__(self):\n        self.kernel = local = 1\n"
    (package / "layer.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(expected_host, "installed_version", lambda package: "1.2.3")
    names = ("inner.layer:Layer.__init__", "inner.layer:Layer.kernel", "inner.layer:Layer.size", "inner.layer:LIMIT")
    of_package = [f"engine_stub.{name}" for name in names]
    return ExpectedHost("Engine", "engine", "1.2", (*of_package, "engine_stub:renamed"))


@pytest.mark.parametrize(
    ("version", "gone", "said"),
    [
        ("1.2.3", None, None),
        ("1.2", None, None),
        *((known, None, f"Engine {known}, and this is 1.2.3; install") for known in ("1.2.30", "1.20", "1.2.3.4")),
        *(
            ("1.2", f"engine_stub.{name}", f"engine_stub.{name}, which this Engine (1.2.3) does not define; install")
            for name in ("inner.layer:Layer.gone", "inner.layer:Gone", "inner.gone:Layer")
        ),
    ],
)
def test_an_engine_of_another_version_or_without_a_name_is_found_and_not_imported(engine, version, gone, said):
    """A release admits its corrections alone."""
    names = engine.names if gone is None else (*engine.names, gone)
    problem = replace(engine, version=version, names=names).problem()
    assert problem is None if said is None else problem.startswith(f"db-SP expects {said}")
    assert "\n" not in (problem or "")
    assert "engine_stub" not in sys.modules


def test_another_engine_gets_no_plugin(monkeypatch, engine, capfd):
    """SGLang's workers stop where a configuration asks for db-SP; vLLM-Omni, which may not need it, goes on."""
    gone = replace(engine, names=("engine_stub:gone",))
    for plugin in (dbsp_engines.sglang, dbsp_engines.lightx2v, vllm_omni_plugin):
        monkeypatch.setattr(plugin, "EXPECTED", gone)
    monkeypatch.delenv("DBSP_CONFIG", raising=False)
    dbsp_engines.sglang.register()
    monkeypatch.setenv("DBSP_CONFIG", MASK)
    with pytest.raises(SystemExit, match=r"expects engine_stub:gone.*, or unset DBSP_CONFIG to run without db-SP$"):
        dbsp_engines.sglang.register()
    with pytest.raises(UserError, match="expects engine_stub:gone"):
        dbsp_engines.lightx2v.register()
    vllm_omni_plugin.register()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("dbsp: db-SP expects engine_stub:gone")
    assert line.endswith("; attention backend DBSP is unavailable")


def test_each_plugin_expects_its_own_engine_in_the_version_that_its_extra_installs():
    text = (ROOT / "pyproject.toml").read_text()
    for plugin in (dbsp_engines.sglang, vllm_omni_plugin):
        expected = plugin.EXPECTED
        assert re.search(rf'"{expected.package}(\[\w+\])?>={re.escape(expected.version)},<', text)
    assert dbsp_engines.lightx2v.EXPECTED.version is None, "it has no releases"


@pytest.fixture
def put(monkeypatch):
    """Makes a stub for a module importable by its full name, with its packages."""

    def make(name: str, **contents: Any) -> ModuleType:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
                sys.modules[path].__path__ = []
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path])
        vars(sys.modules[name]).update(contents)
        return sys.modules[name]

    return make


def as_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExpectedHost, "problem", lambda self: None)


@dataclass
class Metadata:
    joint_query: torch.Tensor | None = None
    joint_strategy: str = "front"
    video_layout: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Layout:
    prefix_len: int | None = None
    latent_grid: tuple[int, int, int] | None = None
    used_len: int | None = None
    video_spans: tuple[Any, ...] = ()


class Impl(Generic[T]):
    pass


class Layer(torch.nn.Module):
    """vLLM-Omni's attention layer, as far as `attach` looks at it."""

    def __init__(self, impl: Any, **changed: Any) -> None:
        super().__init__()
        self.role, self.causal, self.skip_sequence_parallel = "self", False, False
        self.num_heads = self.num_kv_heads = HEADS
        self.head_size, self.softmax_scale, self.prefix, self.qkv_layout = 8, 8**-0.5, "blocks.0.attn1", None
        vars(self).update(changed)
        self.attention = impl(HEADS, 8, self.softmax_scale, self.prefix)


@pytest.fixture
def vllm_omni(put, monkeypatch):
    """The adapter, imported with stubs for what it imports of vLLM-Omni."""
    root = "vllm_omni.diffusion"
    contents = {"AttentionBackend": object, "AttentionImpl": Impl, "AttentionMetadata": Metadata}
    put(f"{root}.attention.backends.abstract", VideoTokenLayout=Layout, **contents)
    put(f"{root}.attention.layer", Attention=Layer)
    default = SimpleNamespace(get_impl_cls=lambda: SimpleNamespace)
    put(f"{root}.attention.selector", get_attn_backend_for_role=lambda role, head_size: (default, None))
    put(f"{root}.data", OmniDiffusionConfig=object)
    put(f"{root}.distributed.parallel_state", get_sp_group=None, get_ring_parallel_world_size=lambda: 4)
    resolved = SimpleNamespace(resolve_with_source=lambda role: (SimpleNamespace(backend="dbsp"), None))
    config = SimpleNamespace(diffusion_attention_config=resolved)
    context = SimpleNamespace(denoise_step_idx=0, omni_diffusion_config=config)
    now = {"get_forward_context": lambda: context, "is_forward_context_available": lambda: True}
    put(f"{root}.forward_context", **now)
    monkeypatch.delitem(sys.modules, "dbsp_engines.vllm_omni", raising=False)
    yield importlib.import_module("dbsp_engines.vllm_omni")
    sys.modules.pop("dbsp_engines.vllm_omni", None)


def settings(**changed: Any) -> SimpleNamespace:
    degrees = {"sequence_parallel_size": 1, "ulysses_degree": 1, "ring_degree": 1}
    return SimpleNamespace(parallel_config=SimpleNamespace(**degrees | changed), cache_backend="none")


@pytest.mark.parametrize(
    ("layer", "parallel", "said"),
    [
        (
            {"role": "cross"},
            {},
            "blocks.0.attn1 is cross attention, which DBSP does not support; name DBSP in per_role",
        ),
        ({"causal": True}, {}, "blocks.0.attn1 is causal"),
        ({"num_kv_heads": 1, "prefix": ""}, {}, "an attention has fewer key than query heads"),
        ({}, {"allgather_degree": 2}, "does not support AllGather-KV"),
    ],
)
def test_what_vllm_omni_has_and_dbsp_does_not_support_is_an_error_of_one_line(vllm_omni, layer, parallel, said):
    with pytest.raises(UserError, match=said) as raised:
        vllm_omni.attach(torch.nn.ModuleList([Layer(vllm_omni.DbspImpl, **layer)]), settings(**parallel), StepClock())
    assert "\n" not in str(raised.value)


def test_vllm_omni_attends_only_in_a_pipeline_and_over_a_grid(vllm_omni):
    layer, q = Layer(vllm_omni.DbspImpl), torch.zeros(1, 75, HEADS, 8)
    with pytest.raises(UserError, match="has not loaded the transformer of this attention as part of a pipeline"):
        layer.attention.forward(q, q, q, None)
    outside = Layer(vllm_omni.DbspImpl, skip_sequence_parallel=True)
    model = torch.nn.ModuleList([layer, outside])
    vllm_omni.attach(model, settings(), StepClock())
    assert layer.skip_sequence_parallel, "no exchange of vLLM-Omni's"
    assert not isinstance(outside.attention, vllm_omni.DbspImpl), "it has vLLM-Omni's default backend"
    with pytest.raises(UserError, match=r"does not publish it .video_layout. or have the name"):
        layer.attention.forward(q, q, q, Metadata())


def test_vllm_omnis_compiled_layers_are_one_graph_for_all(vllm_omni, monkeypatch):
    """fullgraph raises where a graph breaks. A layer's mask is its own, so that equal outputs tell layers apart."""
    monkeypatch.setenv("DBSP_CONFIG", KNOWN)
    layers = torch.nn.ModuleList(Layer(vllm_omni.DbspImpl) for _ in range(LAYERS))
    vllm_omni.attach(layers, settings(), StepClock())
    transformer, graphs = transformer_of(vllm_omni, layers[0]), []
    q, k, v = torch.randn(3, 1, 82, HEADS, 8, generator=torch.Generator().manual_seed(0))

    def block(layer: Layer, q: torch.Tensor) -> torch.Tensor:
        return 2 * layer.attention.forward(q + 1, k, v, Metadata(video_layout=Layout(7, THW)))

    def count(graph: Any, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled, found = torch.compile(block, backend=count, fullgraph=True), {}
    for run in (block, compiled):
        transformer._pass(layers, (), {})
        found[run] = [run(layer, q) for layer in layers]
    assert not torch.equal(*found[block])
    assert all(map(torch.equal, found[block], found[compiled]))
    assert len(graphs) == 1


@pytest.fixture
def sglang(put, monkeypatch):
    """The plug-in, with stubs for what it imports of SGLang: a pipeline of one rank, and the context of a pass."""
    root = "sglang.multimodal_gen.runtime"
    put(
        f"{root}.distributed.parallel_state",
        get_sp_group=lambda: SimpleNamespace(world_size=SequenceGroup.from_group().size, device_group=None),
        get_ulysses_parallel_world_size=lambda: SequenceGroup.from_group().size,
        get_ring_parallel_world_size=lambda: 1,
        get_tp_group=lambda: SimpleNamespace(world_size=1),
    )
    put(f"{root}.layers.attention.layer", USPAttention=SglangAttention, UlyssesAttention_VSA=type(None))
    put(f"{root}.models.dits.minimax_h3", MiniMaxH3DiTModel=type(None))
    put(f"{root}.server_args", get_global_server_args=SimpleNamespace)
    roles = SimpleNamespace(MONOLITHIC=0, DENOISER=1)
    put(f"{root}.disaggregation.roles", RoleType=roles)
    loader = SimpleNamespace(component_names=["transformer"])
    put(f"{root}.loader.component_loaders.transformer_loader", TransformerLoader=loader)
    graphs = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph"
    put(graphs, is_in_breakable_cuda_graph=lambda: False)
    context = SimpleNamespace(forward_batch=None, current_timestep=0)
    put(f"{root}.managers.forward_context", get_forward_context=lambda: context)
    return context


class SglangAttention(torch.nn.Module):
    """SGLang's layer, as far as the plug-in looks at it."""

    def __init__(self, **changed: Any) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.softmax_scale, self.causal = HEADS, HEADS, 8**-0.5, False
        self.backend, self.attn_impl = "sdpa", None
        vars(self).update(changed)

    def forward(self, *qkv: torch.Tensor, **options: Any) -> torch.Tensor:
        return dbsp_engines.sglang._attend(None, self, *qkv, **options)


class Wan(torch.nn.Module):
    """SGLang's transformer, as far as the plug-in looks at it."""

    patch_size = (1, 2, 2)
    layer_names = ("blocks",)

    def __init__(self, **changed: Any) -> None:
        super().__init__()
        layers = [torch.nn.ModuleDict({"attn1": SglangAttention(**changed)}) for _ in range(LAYERS)]
        self.blocks = torch.nn.ModuleList(layers)

    def forward(self) -> None:
        q = torch.zeros(1, 75, HEADS, 8)
        for block in self.blocks:
            block["attn1"](q, q, q)


def of_sglang(rank: int, world: int) -> float:
    """SGLang's Wan of whole frames on each rank, with frames of padding: the largest difference from one process."""
    model, frames = Wan(), -(-THW[0] // world)
    dbsp_engines.sglang.attach(model)
    worst, group = 0.0, SequenceGroup.from_group()
    for layer, block in enumerate(model.blocks):
        tokens = whole(0, layer, True)
        shards = [padded_to(world * frames * 25, each).chunk(world)[rank][None] for each in tokens]
        out = group.all_gather(block["attn1"](*shards))
        expected = attend_under(MASK, layer, LAYERS, THW, *(each[None] for each in tokens))
        worst = max(worst, largest_difference(torch.cat(out, dim=1)[:, :75], expected))
    return worst


def test_sglangs_frames_of_padding_are_not_attended_to(sglang, monkeypatch):
    monkeypatch.setenv("DBSP_CONFIG", MASK)
    sglang.forward_batch = SimpleNamespace(raw_latent_shape=(1, 4, 3, 10, 10), is_cfg_negative=False)
    assert max(ThreadRanks(2).run(of_sglang)) <= 1e-5


def test_sglangs_passes_of_a_step_are_counted_where_they_have_no_names(sglang, monkeypatch):
    """As LTX-2's: of guidance, perturbed in some layers, isolated."""
    monkeypatch.setenv("DBSP_CONFIG", MASK)
    sglang.forward_batch, model = SimpleNamespace(raw_latent_shape=(1, 4, 3, 10, 10)), Wan()
    dbsp_engines.sglang.attach(model)
    provider = model._dbsp_transformer.session.session._provider
    for sglang.current_timestep in range(2):
        for branch in range(4):
            model()
            assert (provider.moment.step, provider.moment.cfg_branch) == (sglang.current_timestep, branch)


OF_VIDEO = {"whole": None, "last": False, "lengths": (), "padding": 0, "in_parts": True}


@pytest.mark.parametrize(
    ("thw", "local", "changed", "said"),
    [
        ((3, 5, 5), 75, {}, "gave every rank the whole video; remove --enable-sequence-shard false"),
        ((5, 5, 5), 50, {}, r"gave one of 2 ranks 50 tokens, of 125 video tokens \(5, 5, 5\) and text"),
        ((1, 9, 9), 41 + 20, {"padding": 1}, "doesn't know how it shards this request"),
        ((4, 5, 5), 57, {"lengths": (57, 40)}, "doesn't know how it shards this request"),
        ((4, 5, 5), 57, {"in_parts": False}, "doesn't know how it shards this request"),
        ((1, 8, 8), 32, {"raw": (1, 4, 1, 16, 16)}, "doesn't know how it shards this request"),
    ],
    ids=["whole video", "other frames", "an image to edit", "less than the video", "other tokens", "a part in space"],
)
def test_sglangs_tokens_of_which_db_sp_does_not_know_the_place_are_rejected(thw, local, changed, said):
    options = OF_VIDEO | changed
    request = SimpleNamespace(did_sp_shard_latents=True, image_latent=torch.zeros(1))
    request.raw_latent_shape = options.pop("raw", (1, 81, 16))
    with pytest.raises(UserError, match=said):
        sglang_attention.layout_of_pass(request, thw, 2, local=local, **options)


def test_sglangs_text_is_whole_or_in_parts_of_several_sizes():
    layout_of = sglang_attention.layout_of_pass
    request = SimpleNamespace(did_sp_shard_latents=True, raw_latent_shape=(1, 81, 16))
    whole_text = layout_of(request, (1, 9, 9), 4, local=21, **OF_VIDEO | {"whole": lambda: 7})
    assert whole_text == EngineLayout((1, 9, 9), shard=21, text=7)
    padded = layout_of(request, (1, 9, 9), 4, local=23, **OF_VIDEO | {"padding": 1})
    assert padded == EngineLayout((1, 9, 9), shard=21, text=7, text_shares=(2, 2, 2, 1))
    uneven = layout_of(request, (4, 5, 5), 2, local=54, **OF_VIDEO | {"last": True, "lengths": (54, 53)})
    assert uneven == EngineLayout((4, 5, 5), shard=50, text=7, text_last=True, text_shares=(4, 3))


@pytest.mark.parametrize("request_of", [{}, {"raw_latent_shape": (1, 80, 16), "height": 144, "width": 144}])
def test_sglangs_request_without_a_grid_is_rejected(request_of):
    with pytest.raises(UserError, match="masks need the grid of video tokens, which this request of tests's Wan"):
        sglang_attention.grid_of(Wan(), SimpleNamespace(**request_of))


def test_sglangs_attention_of_another_kind_is_rejected(sglang):
    for changed in ({"is_cross_attention": True}, {"causal": True}, {"num_kv_heads": 1}):
        with pytest.raises(UserError, match="supports SGLang's own transformers with one self-attention per block"):
            dbsp_engines.sglang.attach(Wan(**changed))
    model, q = Wan(), torch.zeros(1, 75, HEADS, 8)
    dbsp_engines.sglang.attach(model)
    attend = model.blocks[0]["attn1"]
    for name, value in (("attn_mask", torch.ones(1, 75)), ("num_replicated_kv_prefix", 3)):
        with pytest.raises(UserError, match=f"calls attention with unsupported {name};"):
            attend(q, q, q, **{name: value})
    with pytest.raises(UserError, match="keys of other tokens than its queries"):
        attend(q, q[:, :70], q[:, :70])


def transformer_of(vllm_omni: ModuleType, layer: Layer) -> Any:
    return vllm_omni._transformers[int(layer.attention.where[0])]


def of_vllm_omni(rank: int, world: int, vllm_omni: ModuleType, published: bool) -> float:
    """Text before the video in one sequence, or whole on every rank, with padding: the difference from one process."""
    layer, parallel = Layer(vllm_omni.DbspImpl), {"sequence_parallel_size": world, "ulysses_degree": world}
    model = torch.nn.ModuleList([layer])
    vllm_omni.attach(model, settings(**parallel), StepClock())
    text, video = torch.randn(2, 3, 75, HEADS, 8, generator=torch.Generator().manual_seed(0))
    text = text[:, :7]
    expected = attend_under(MASK, 0, 1, THW, *(each[None] for each in torch.cat([text, video], dim=1)), text=7)
    if published:
        sequence, slots = torch.cat([text, video], dim=1), 128
        metadata = Metadata(video_layout=Layout(7, THW, used_len=82))
    else:
        sequence, slots, metadata = video, -(-75 // world) * world, Metadata()
        joint = [padded_to(12, each)[None] for each in text]
        metadata.joint_query, metadata.joint_key, metadata.joint_value = joint
        attached = transformer_of(vllm_omni, layer)
        attached._architecture, attached._tokens = SimpleNamespace(text="first"), lambda: TokenSequence(THW, 7)
    shards = [padded_to(slots, each).chunk(world)[rank][None] for each in sequence]
    out, whole_text = layer.attention.forward(*shards, metadata), []
    if not published:
        whole_text, out = [out[:, :7]], out[:, 12:]
    gathered = torch.cat([*whole_text, *SequenceGroup.from_group().all_gather(out)], dim=1)
    return largest_difference(gathered[:, :82], expected)


@pytest.mark.parametrize("published", [True, False], ids=["one sequence", "whole text"])
def test_vllm_omnis_padding_is_not_attended_to(vllm_omni, monkeypatch, published):
    monkeypatch.setenv("DBSP_CONFIG", MASK)
    monkeypatch.setattr(vllm_omni, "get_sp_group", lambda: SimpleNamespace(device_group=None))
    assert max(ThreadRanks(4).run(of_vllm_omni, vllm_omni, published)) <= 1e-5


Passes = list[tuple[int, int]]
"""Step and CFG pass of each forward pass of a request."""


def passes(*steps: int, of_each: int = 2) -> Passes:
    return [(step, branch) for step in steps for branch in range(of_each)]


REQUESTS: dict[str, list[Passes]] = {
    "two experts": [passes(*range(6))] * 2,
    "aborted within a step": [passes(0, 1)[:-1], passes(0)[:1], passes(*range(4))],
    "started late, in either expert": [passes(4, 5), passes(2, 3), passes(1, 2, 3)],
    "one step of each expert without guidance, then more": [*[passes(0, 3, of_each=1)] * 2, passes(*range(5))],
}
"""Requests one after another. The second expert computes step 3 and later."""
BY_STEP = {"mask": KNOWN, "dense_schedule": {"first_steps": 1, "last_steps": 1}}
Seen = list[tuple[tuple[int, int], int, bool]]
"""Of each forward pass: step and CFG pass, generation, and whether its attention was dense."""


def seen(session: EngineSession) -> tuple[tuple[int, int], int, bool]:
    moment, reuse = session.session._provider.moment, session.session.reuse
    dense = reuse.dense - getattr(session, "dense_before", 0)
    session.dense_before = reuse.dense
    return (moment.step, moment.cfg_branch), moment.generation, dense == LAYERS


def seen_by_lightx2v(requests: list[Passes]) -> Seen:
    experts = [[DbspAttention() for _ in range(LAYERS)] for _ in range(2)]
    now, q, found = scheduler({"parallel": {"dbsp": BY_STEP}}), torch.zeros(75, HEADS, 8), []
    for request in requests:
        now.config["enable_cfg"] = any(branch for _, branch in request)
        now.infer_steps = request[-1][0] + 1
        for now.step_index, branch in request:
            now.infer_condition, expert = branch == 0, experts[now.step_index >= 3]
            for layer, attention in enumerate(expert):
                attention.apply(q, q, q, block_idx=layer, scheduler=now, grid_sizes=THW)
            found.append(seen(expert[0]._dbsp_session))
    return found


def seen_by_sglang(context: SimpleNamespace, requests: list[Passes]) -> Seen:
    pipeline, found = SimpleNamespace(modules={"transformer": Wan(), "transformer_2": Wan(), "vae": None}), []
    dbsp_engines.sglang._attach_pipeline(lambda: pipeline)
    experts = [pipeline.modules[name] for name in ("transformer", "transformer_2")]
    for request in requests:
        timesteps = torch.zeros(request[-1][0] + 1)
        context.forward_batch = SimpleNamespace(timesteps=timesteps, raw_latent_shape=(1, 4, 3, 10, 10))
        for context.current_timestep, branch in request:
            context.forward_batch.is_cfg_negative = bool(branch)
            expert = experts[context.current_timestep >= 3]
            expert()
            found.append(seen(expert._dbsp_transformer.session))
    return found


def seen_by_vllm_omni(vllm_omni: ModuleType, monkeypatch: pytest.MonkeyPatch, requests: list[Passes]) -> Seen:
    """Calls without the number of the CFG pass, as vLLM-Omni does."""
    experts = [torch.nn.ModuleList(Layer(vllm_omni.DbspImpl) for _ in range(LAYERS)) for _ in range(2)]
    pipeline = SimpleNamespace(transformer=experts[0], transformer_2=experts[1])
    monkeypatch.setattr(vllm_omni_plugin, "_names_dbsp", lambda config: True)
    vllm_omni_plugin._attach_all(lambda model, config: None, pipeline, settings())
    q, metadata, found = torch.zeros(1, 75, HEADS, 8), Metadata(video_layout=Layout(0, THW)), []
    for request in requests:
        context = SimpleNamespace(omni_diffusion_config=settings(), total_denoise_steps=request[-1][0] + 1)
        monkeypatch.setattr(vllm_omni, "get_forward_context", lambda context=context: context)
        for context.denoise_step_idx, _ in request:
            expert = experts[context.denoise_step_idx >= 3]
            transformer = transformer_of(vllm_omni, expert[0])
            transformer._pass(expert, (), {})
            for layer in expert:
                layer.attention.forward(q, q, q, metadata)
            found.append(seen(transformer._session))
    return found


@pytest.mark.parametrize("engine", ["lightx2v", "sglang", "vllm-omni"])
@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS)
def test_experts_count_the_engines_own_steps(engine, requests, vllm_omni, sglang, monkeypatch, tmp_path):
    settings_file = tmp_path / "by_step.yaml"
    settings_file.write_text(json.dumps(BY_STEP))
    monkeypatch.setenv("DBSP_CONFIG", str(settings_file))
    found = {
        "lightx2v": lambda: seen_by_lightx2v(requests),
        "sglang": lambda: seen_by_sglang(sglang, requests),
        "vllm-omni": lambda: seen_by_vllm_omni(vllm_omni, monkeypatch, requests),
    }[engine]()
    generations = [next(iter(each)) for each in groupby(generation for _, generation, _ in found)]
    assert [moment for moment, _, _ in found] == [moment for request in requests for moment in request]
    assert [dense for _, _, dense in found] == [
        step in (0, request[-1][0]) for request in requests for step, _ in request
    ]
    assert len(generations) == len(requests)


def packed(text: list[int], video: range, length: int | None = None) -> TokenSequence:
    return TokenSequence((1, 5, 15), len(text), packed=torch.tensor([*text, *video]), packed_length=length)


def test_vllm_omni_has_image_and_text_in_one_sequence(vllm_omni):
    """As Z-Image, the image first; and with text around it, and padding at the end, on 4 ranks."""
    image_first, inside = packed(list(range(75, 128)), range(75)), packed([0, 1, 77, 78], range(2, 77), length=81)
    assert vllm_omni._layout_of(image_first, False, 32, 4) == EngineLayout((1, 5, 15), 0, 53, 32)
    assert vllm_omni._layout_of(inside, False, 21, 4) == EngineLayout((1, 5, 15), 2, 2, 21)
    with pytest.raises(UserError, match="do not hold this model's"):  # another length, as with a reference image
        vllm_omni._layout_of(image_first, False, 40, 4)
    with pytest.raises(UserError, match="do not hold this model's"):  # padding of text before the image
        vllm_omni._layout_of(packed([0, 1], range(5, 80), length=80), False, 20, 4)


@dataclass(frozen=True)
class Part:
    """vLLM-Omni's plan of one tensor."""

    auto_pad: bool = False


def test_registering_in_vllm_omni_wraps_three_functions_and_is_undone(vllm_omni, put, monkeypatch):
    as_expected(monkeypatch)
    attached, backends = [], SimpleNamespace(__members__={})
    state = sys.modules["vllm_omni.diffusion.distributed.parallel_state"]

    class Split:
        def _prepare_sp_input(self, tokens: str, part: Part) -> tuple[str, bool, int]:
            return tokens, part.auto_pad, state.get_ring_parallel_world_size()

    put("aenum", extend_enum=lambda enum, name, value: enum.__members__.update({name: value}))
    wrapped = ("_apply_sequence_parallel_if_enabled", "_prepare_diffusion_quant_config")
    registry = put("vllm_omni.diffusion.registry", **dict.fromkeys(wrapped, lambda first, second: None))
    put("vllm_omni.diffusion.attention.backends.registry", DiffusionAttentionBackendEnum=backends)
    put("vllm_omni.diffusion.hooks.sequence_parallel", SequenceParallelSplitHook=Split)
    stock = [getattr(registry, name) for name in wrapped], Split._prepare_sp_input
    monkeypatch.setattr(vllm_omni, "attach", lambda *given: attached.append(given))
    vllm_omni_plugin.register()
    vllm_omni_plugin.register()
    try:
        assert backends.__members__ == {"DBSP": "dbsp_engines.vllm_omni.DbspBackend"}
        assert Split()._prepare_sp_input("tokens", Part()) == ("tokens", True, 1), "padded as where there is no ring"
        assert state.get_ring_parallel_world_size() == 4
        registry._apply_sequence_parallel_if_enabled(SimpleNamespace(transformer="a", transformer_2="b"), "config")
        assert [given[:2] for given in attached] == [("a", "config"), ("b", "config")]
        assert attached[0][2] is attached[1][2], "one clock"
    finally:
        vllm_omni_plugin.unregister()
    assert ([getattr(registry, name) for name in wrapped], Split._prepare_sp_input) == stock
