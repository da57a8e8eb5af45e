"""After `enable`, an attention that db-SP does not compute is an error, for any change that took it away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import dbsp_diffusers
from dbsp_diffusers.sharding.generation_checks import GenerationChecks
from tests.support.models.tiny_pipelines import latents, load
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import alone, assert_near, outputs, said

MEET = GenerationChecks.meet
CONFIG = {"mask": {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}}


def _other_attention(transformer: Any) -> None:
    transformer.blocks[1].attn1 = make_tiny_transformer("wan").blocks[1].attn1


def _appended_block(transformer: Any) -> None:
    transformer.blocks.append(make_tiny_transformer("wan").blocks[0])


def _forward_reset(transformer: Any) -> None:
    del transformer.blocks[1].attn1.forward


def _block_skipped(transformer: Any) -> None:
    transformer.blocks[1].forward = lambda hidden, *_, **__: hidden


LOST = "db-SP does not compute the attention of"
CHANGES: dict[str, tuple[Callable[[Any], None], str, bool]] = {
    "other attention": (_other_attention, f"{LOST} blocks.1.attn1: removing an offload", True),
    "appended block": (_appended_block, f"{LOST} blocks.2.attn1: removing an offload", True),
    "forward reset": (_forward_reset, f"{LOST} blocks.1.attn1: removing an offload", False),
    "block skipped": (_block_skipped, "1 of 2 self-attentions did not reach db-SP, blocks.1.attn1: removing", False),
}
"""A change, its error message, and whether the transformer can be enabled anew; others hide a layer from wrappers."""


@torch.no_grad()
def changed(rank: int, world: int) -> None:
    inputs = tiny_inputs("wan")
    for change, message, again in CHANGES.values():
        transformer = make_tiny_transformer("wan")
        dbsp_diffusers.enable(transformer, CONFIG)
        transformer(**inputs)
        change(transformer)
        answer = said(lambda transformer=transformer: transformer(**inputs))  # type: ignore[misc]
        assert answer.startswith(f"UserError: {message}"), answer
        dbsp_diffusers.disable(transformer)
        if again:
            expected = alone(transformer, inputs, CONFIG)
            dbsp_diffusers.enable(transformer, CONFIG)
            assert_near(outputs(transformer, inputs), expected)
            dbsp_diffusers.disable(transformer)


def test_changed_layer_after_enable_raises_on_all_ranks(pool):
    pool(2).run(changed)


@torch.no_grad()
def hooks_removed(rank: int, world: int) -> None:
    """Runs a transformer with accelerate's hooks, once they are removed, and after `disable`."""
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_module

    transformer, inputs = make_tiny_transformer("wan"), tiny_inputs("wan")
    dense, expected = outputs(transformer, inputs), alone(transformer, inputs, CONFIG)
    parts = {name: "cpu" for name, part in transformer.named_modules() if name and not list(part.children())}
    dispatch_model(transformer, {"": "cpu"} | parts, main_device="cpu", force_hooks=True)
    assert all(hasattr(block.attn1, "_old_forward") for block in transformer.blocks)
    dbsp_diffusers.enable(transformer, CONFIG)
    assert_near(outputs(transformer, inputs), expected, dense)
    remove_hook_from_module(transformer, recurse=True)
    assert_near(outputs(transformer, inputs), expected, dense)
    dbsp_diffusers.disable(transformer)
    assert_near(outputs(transformer, inputs), dense)


def test_offload_hooks_removed_after_enable_leave_attention_with_db_sp(pool):
    pool(2).run(hooks_removed)


def failed_on_all(rank: int, world: int) -> list[bool]:
    """Runs five passes of one generation, of which the third fails. Returns which passes compared their inputs."""
    transformer, inputs = make_tiny_transformer("wan"), tiny_inputs("wan") | {"return_dict": True}
    dbsp_diffusers.enable(transformer, CONFIG)
    compared: list[bool] = []
    counted = mock.patch.object(GenerationChecks, "meet", autospec=True, side_effect=MEET)
    with torch.no_grad(), counted as meet:
        for number in range(5):
            before, broken = meet.call_count, mock.Mock(side_effect=RuntimeError("out of memory"))
            if number == 2:
                transformer.blocks[1].forward = broken
            answer = said(lambda: transformer(**inputs))
            assert answer == ("RuntimeError: out of memory" if number == 2 else "nothing")
            vars(transformer.blocks[1]).pop("forward", None)
            compared.append(meet.call_count > before)
    dbsp_diffusers.disable(transformer)
    return compared


def test_inputs_are_compared_in_the_pass_after_a_failed_one(pool):
    assert pool(2).run(failed_on_all) == [[True, True, False, True, False]] * 2


def exchanged(rank: int, world: int, folder: str) -> None:
    """Exchanges a pipeline's transformer on the last rank, and puts it back."""
    pipe = load("wan", folder)
    dbsp_diffusers.enable(pipe, CONFIG)
    own = pipe.transformer

    def called() -> str:
        return said(lambda: latents(pipe, seed=None, num_inference_steps=1))

    if rank == world - 1:
        pipe.transformer = load("wan", folder).transformer
    assert "the pipeline's transformer was replaced after db-SP was enabled" in called()
    pipe.transformer = own
    assert called() == "nothing"
    pipe.transformer = load("wan", folder).transformer
    dbsp_diffusers.disable(pipe)
    assert called() == "nothing"
    assert not vars(own).keys() & {"_dbsp", "_is_parallelized"}


def test_exchanged_transformer_raises_on_all_ranks(pool, folder):
    pool(2).run(exchanged, folder)


@torch.no_grad()
def layer_skip(rank: int, world: int) -> None:
    from diffusers import LayerSkipConfig
    from diffusers.hooks import apply_layer_skip

    transformer, inputs = make_tiny_transformer("wan"), tiny_inputs("wan")
    whole = alone(transformer, inputs, CONFIG)
    apply_layer_skip(transformer, LayerSkipConfig(indices=[0], fqn="blocks"))
    expected = alone(transformer, inputs, CONFIG)
    dbsp_diffusers.enable(transformer, CONFIG)
    assert_near(outputs(transformer, inputs), expected, whole)
    dbsp_diffusers.disable(transformer)


def test_layer_skip_of_diffusers_is_no_error(pool):
    pool(2).run(layer_skip)
