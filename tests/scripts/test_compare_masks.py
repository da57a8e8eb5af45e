"""scripts.checks.upstream.compare_masks: blocks that differ from another project's mask are counted by direction."""

from __future__ import annotations

from scripts.checks.upstream.upstream_refs.finding import compared


def test_masks_that_differ_are_counted_in_both_directions(tmp_path):
    found = compared("project", tmp_path, "masks", [[1, 1], [0, 0]], [[1, 0], [1, 1]])
    assert (found.compared, found.theirs_only, found.ours_only, found.equal) == (4, 1, 2, False)
    assert (found.density_theirs, found.density_ours) == (0.5, 0.75)
    assert compared("project", tmp_path, "masks", [True], [True]).equal
