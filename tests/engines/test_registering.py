"""What plug-ins change in an engine and undo, on stubs for the few modules of it that they import.

tests/engines/test_vllm_omni.py, test_sglang.py and test_lightx2v.py run the engines themselves.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch

import dbsp_engines.lightx2v
import dbsp_engines.sglang
from dbsp_core.masks.steps import StepClock
from dbsp_core.runtime.engine_session import EngineLayout
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.expected_host import ExpectedHost
from dbsp_diffusers.models import TokenSequence
from dbsp_engines import vllm_omni_plugin
from scripts.checks.engines.reference import attend_under

MASK, THW, HEADS = "sparge:cdf=0.6,block_q=16,block_k=8", (3, 5, 5), 3
T = TypeVar("T")


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


def test_vllm_omni_attends_under_the_mask(vllm_omni, monkeypatch):
    monkeypatch.setenv("DBSP_CONFIG", MASK)
    layers = [Layer(vllm_omni.DbspImpl) for _ in range(2)]
    outside = Layer(vllm_omni.DbspImpl, skip_sequence_parallel=True)
    vllm_omni.attach(torch.nn.ModuleList([*layers, outside]), settings(), StepClock())
    assert all(layer.skip_sequence_parallel for layer in layers), "no exchange of vLLM-Omni's"
    assert not isinstance(outside.attention, vllm_omni.DbspImpl), "it has vLLM-Omni's default backend"
    metadata = Metadata(video_layout=Layout(prefix_len=0, latent_grid=THW))
    for index, layer in enumerate(layers):
        q, k, v = torch.randn(3, 1, 75, HEADS, 8, generator=torch.Generator().manual_seed(index))
        expected = attend_under(MASK, index, 2, THW, q, k, v)
        assert (layer.attention.forward(q, k, v, metadata) - expected).abs().max() <= 1e-5


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
        ({}, {"allgather_degree": 2}, "not AllGather-KV"),
    ],
)
def test_what_vllm_omni_has_and_dbsp_does_not_support_is_an_error_of_one_line(vllm_omni, layer, parallel, said):
    with pytest.raises(UserError, match=said) as raised:
        vllm_omni.attach(torch.nn.ModuleList([Layer(vllm_omni.DbspImpl, **layer)]), settings(**parallel), StepClock())
    assert "\n" not in str(raised.value)


def test_vllm_omni_attends_only_in_a_pipeline_and_over_a_grid(vllm_omni):
    layer, q = Layer(vllm_omni.DbspImpl), torch.zeros(1, 75, HEADS, 8)
    with pytest.raises(UserError, match="has not loaded this transformer as part of a pipeline"):
        layer.attention.forward(q, q, q, None)
    vllm_omni.attach(torch.nn.ModuleList([layer]), settings(), StepClock())
    with pytest.raises(UserError, match=r"does not publish it .video_layout., and db-SP knows no class"):
        layer.attention.forward(q, q, q, Metadata())


def packed(text: list[int], video: range, length: int | None = None) -> TokenSequence:
    return TokenSequence((1, 5, 15), len(text), packed=torch.tensor([*text, *video]), packed_length=length)


def test_vllm_omni_has_image_and_text_in_one_sequence(vllm_omni):
    """As Z-Image, the image first; and with text around it, and padding at the end, on 4 ranks."""
    image_first, inside = packed(list(range(75, 128)), range(75)), packed([0, 1, 77, 78], range(2, 77), length=81)
    assert vllm_omni._layout_of(image_first, False, 32, 4) == EngineLayout((1, 5, 15), 0, 53, 32)
    assert vllm_omni._layout_of(inside, False, 21, 4) == EngineLayout((1, 5, 15), 2, 2, 21)


@pytest.mark.parametrize(
    ("tokens", "shard"),
    [
        (packed(list(range(75, 128)), range(75)), 40),
        (packed([0, 1], range(5, 80), length=80), 20),
    ],
    ids=["another length, as with a reference image", "padding of text before the image"],
)
def test_vllm_omni_with_another_order_is_rejected(vllm_omni, tokens, shard):
    with pytest.raises(UserError, match="do not hold this model's"):
        vllm_omni._layout_of(tokens, False, shard, 4)


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


def test_registering_in_sglang_names_its_functions_and_ours(put, monkeypatch):
    as_expected(monkeypatch)
    monkeypatch.setenv("DBSP_CONFIG", MASK)
    hooks: dict[str, Any] = {}
    put(
        "sglang.multimodal_gen.runtime.platforms.plugins",
        HookType=SimpleNamespace(AROUND="around"),
        plugin_hook=lambda target, kind: lambda hook: hooks.update({target: (kind, hook.__name__)}),
    )
    dbsp_engines.sglang.register()
    wan = "sglang.multimodal_gen.runtime.models.dits.wanvideo.WanTransformer3DModel"
    assert hooks[f"{wan}.forward"] == ("around", "_begin_wan")
    assert len(hooks) == 7
    assert not [target for target in hooks if ":" in target]


def test_registering_in_lightx2v_adds_one_attention_once(put, monkeypatch):
    as_expected(monkeypatch)

    class Register(dict):
        def __call__(self, name: str) -> Any:
            return lambda cls: self.update({name: cls})

    known = Register()
    put("lightx2v_platform.registry_factory", PLATFORM_ATTN_WEIGHT_REGISTER=known)
    dbsp_engines.lightx2v.register()
    dbsp_engines.lightx2v.register()
    assert known == {"dbsp": dbsp_engines.lightx2v.DbspAttention}


def test_lightx2v_asks_an_attention_for_weights_and_it_has_none():
    attention = dbsp_engines.lightx2v.DbspAttention()
    for call in (attention.load, attention.set_config, attention.to_cpu, attention.load_state_dict_from_disk):
        assert call({}) is None
    assert attention.to_cuda(non_blocking=True) is None
    assert (attention.state_dict(), attention.state_dict({"a": 1}), attention.load_state_dict({})) == (
        {},
        {"a": 1},
        {},
    )
