"""db-SP after `enable_parallelism`, on device meshes, and what it refuses, on all ranks alike."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.diffusers.models.takeover_cases import MISTAKES, run_mesh, run_mistake, run_takeover
from tests.support.models.tiny_transformers import make_tiny_transformer

TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("model", "world", "degrees", "mesh", "strategy"),
    [
        ("wan", 2, {"ulysses_degree": 2}, None, "U2R1"),
        ("wan", 2, {"ring_degree": 2}, None, "U1R2"),
        ("flux", 2, {"ulysses_degree": 2}, None, "U2R1"),
        ("flux2", 2, {"ring_degree": 2}, None, "U1R2"),
        ("qwen", 2, {"ring_degree": 2}, None, "U1R2"),
        ("ltx", 2, {"ring_degree": 2}, None, "U1R2"),
        ("minimax-h3", 2, {"ring_degree": 2}, None, "U1R2"),
        ("wan", 4, {"ulysses_degree": 2, "ring_degree": 2}, None, "U2R2"),
        ("wan", 4, {"ulysses_degree": 2}, (2, 1, 2), "U2R1"),
    ],
)
def test_degrees_and_ranks_are_taken_from_enable_parallelism(pool, model, world, degrees, mesh, strategy):
    for found, from_one_process, own_changed in pool(world).run(run_takeover, model, degrees, mesh):
        assert found == strategy
        assert from_one_process <= TOLERANCE
        assert own_changed == 0, "diffusers' own must be back, bit for bit"


def test_a_mesh_may_have_other_dimensions(pool):
    for strategy, (from_one_process, from_the_other) in pool(4).run(run_mesh):
        assert strategy == "U1R2"
        assert from_one_process <= TOLERANCE
        assert from_the_other > 100 * TOLERANCE, "each pair has a sample of its own"


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_on_all_ranks_in_one_line(pool, name):
    for message in pool(2).run(run_mistake, name):
        assert message.startswith("UserError: ")
        assert MISTAKES[name][1] in message
        assert "\n" not in message


class TestWhatIsKnownOfDiffusers:
    """Fails where another version has it otherwise: dbsp_diffusers/sharding/takeover.py is then to be looked at."""

    def test_names_of_its_context_parallelism(self):
        from diffusers import ContextParallelConfig
        from diffusers.hooks import context_parallel
        from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput, ParallelConfig

        assert context_parallel._CONTEXT_PARALLEL_INPUT_HOOK_TEMPLATE == "cp_input---{}"
        assert context_parallel._CONTEXT_PARALLEL_OUTPUT_HOOK_TEMPLATE == "cp_output---{}"
        assert ContextParallelConfig(ulysses_degree=2)._mesh is None
        assert ParallelConfig().context_parallel_config is None
        parameters = inspect.signature(ContextParallelInput).parameters
        assert {"split_dim", "expected_dims", "split_output"} <= set(parameters)
        assert "gather_dim" in inspect.signature(ContextParallelOutput).parameters

    def test_a_hook_goes_by_the_functions_that_its_reference_has(self):
        from diffusers.hooks.hooks import HookRegistry, ModelHook

        module = torch.nn.Identity()
        hook = ModelHook()
        HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, "cp_input---")
        assert module._diffusers_hook.hooks == {"cp_input---": hook}
        vars(hook.fn_ref)["pre_forward"] = lambda module, *args, **kwargs: ((args[0] + 1,), kwargs)
        vars(hook.fn_ref)["post_forward"] = lambda module, output: output * 10
        assert module(1) == 20

    def test_what_it_keeps_on_transformers_and_processors(self):
        from diffusers.models.attention_dispatch import AttentionBackendName

        transformer = make_tiny_transformer("wan")
        processor = transformer.blocks[0].attn1.processor
        assert transformer._parallel_config is None
        assert (processor._parallel_config, processor._attention_backend) == (None, None)
        assert AttentionBackendName("native") is AttentionBackendName.NATIVE
