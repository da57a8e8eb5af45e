"""A mask of your own, as a function of the block grid: dbsp generate --config my_masks.yaml --prompt "…"

Every process imports this function, so this folder must be on PYTHONPATH. Other patterns: docs/masks.md.
"""


def near_and_first_frame(grid, request, frames=2):
    """Returns bool[query blocks, key blocks]: frames at most `frames` apart, and the first frame."""
    _, h, w = request.thw  # the video's tokens: frame after frame, row after row
    axes = grid.q_axis, grid.k_axis
    q, k = (axis.starts // (h * w) for axis in axes)  # frame of each block's first token
    q_end, k_end = ((axis.starts + axis.lengths - 1) // (h * w) for axis in axes)  # and of its last
    near = (k - q_end[:, None] <= frames) & (q[:, None] - k_end <= frames)
    return near | (k == 0)
