"""torch.compile around a user's function that calls the library: the graph breaks there, and what comes is right."""

from __future__ import annotations

import pytest

from tests.core.robustness.compiled_cases import FUNCTIONS, compiled


@pytest.mark.parametrize("what", FUNCTIONS)
def test_a_compiled_function_gives_the_same(pool, what):
    for difference, graphs in pool(2).run(compiled, what):
        assert difference <= 1e-6
        assert graphs[0] >= 1, "what is around it is compiled"
        assert graphs[0] == graphs[1] == graphs[2], "and once"
