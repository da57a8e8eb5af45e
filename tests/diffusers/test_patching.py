"""What db-SP puts on a pipeline and its transformer: around calls, undone without a trace, freed with them."""

from __future__ import annotations

import gc
import weakref

import pytest

import dbsp_para
from dbsp_cli.tiny_models import make_tiny
from dbsp_diffusers.patching import PatchSet, around_calls


class Pipe:
    def __call__(self, *words, last="!"):
        return [*words, last]


class Heir(Pipe):
    """Has no `__call__` of its own."""


def saying(word):
    return lambda call: lambda *words, **options: call(*words, word, **options)


@pytest.mark.parametrize("cls", [Pipe, Heir])
def test_one_pipe_s_calls_are_wrapped_in_order_and_as_before_afterwards(cls):
    before, pipe, other = dict(vars(cls)), cls(), cls()
    with PatchSet() as first:
        around_calls(pipe, saying("inner"), first)
    with PatchSet() as second:
        around_calls(pipe, saying("outer"), second)
        around_calls(other, saying("else"), second)
    assert pipe("a", last="?") == ["a", "outer", "inner", "?"]
    assert other("a") == ["a", "else", "!"]
    assert cls()("a") == ["a", "!"]
    second.detach()
    assert pipe("a") == ["a", "inner", "!"]
    assert other("a") == ["a", "!"]
    first.detach()
    assert dict(vars(cls)) == before
    assert vars(pipe) == {}


def test_what_is_wrapped_around_the_class_meanwhile_stays():
    class Own(Pipe):
        pass

    pipe = Own()
    with PatchSet() as attachment:
        around_calls(pipe, saying("ours"), attachment)
    ours = Own.__call__
    Own.__call__ = lambda self, *words, **options: [*ours(self, *words, **options), "theirs"]
    assert pipe("a") == ["a", "ours", "!", "theirs"]
    attachment.detach()
    assert pipe("a") == ["a", "!", "theirs"]


@pytest.mark.parametrize("detached_first", [False, True])
def test_a_pipeline_is_freed_when_nobody_holds_it(tmp_path, detached_first):
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(make_tiny("wan", tmp_path / "wan"), local_files_only=True)
    dbsp_para.parallelize_pipe(pipe, config={"report": str(tmp_path / "report"), "mask": {"source": "dense"}})
    if detached_first:
        dbsp_para.unparallelize(pipe)
    remaining = weakref.ref(pipe), weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert [ref() for ref in remaining] == [None, None]
