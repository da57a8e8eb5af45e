"""db-SP on device meshes, and what it rejects, on all ranks identically."""

from __future__ import annotations

import pytest

from tests.diffusers.models.mistake_cases import MISTAKES, run_mesh, run_mistake
from tests.support.models.tiny_transformers import make_tiny_transformer

TOLERANCE = 1e-5


def test_mesh_with_other_dimensions_is_accepted(pool):
    for strategy, (from_one_process, from_the_other) in pool(4).run(run_mesh):
        assert strategy == "U1R2"
        assert from_one_process <= TOLERANCE
        assert from_the_other > 100 * TOLERANCE, "each pair has a sample of its own"


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_rejected_on_all_ranks_in_one_line(pool, name):
    for message in pool(2).run(run_mistake, name):
        assert message.startswith("UserError: ")
        assert MISTAKES[name][1] in message
        assert "\n" not in message


def test_attributes_of_transformers_and_processors_are_known():
    """If another version differs, see dbsp_diffusers/attach.py and sharding/attention.py."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    transformer = make_tiny_transformer("wan")
    processor = transformer.blocks[0].attn1.processor
    assert transformer._parallel_config is None
    assert (processor._parallel_config, processor._attention_backend) == (None, None)
    assert AttentionBackendName("native") is AttentionBackendName.NATIVE
