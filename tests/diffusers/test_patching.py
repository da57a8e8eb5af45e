"""Wrappers that db-SP puts around calls of a pipeline and its transformer: undone without a trace, freed with them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest

import dbsp_diffusers
import dbsp_para
from dbsp_cli.tiny_models import make_tiny
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.patching import PatchSet, around_calls
from tests.support.models.tiny_transformers import make_tiny_transformer


class Pipe:
    def __call__(self, *words, last="!"):
        return [*words, last]


class Heir(Pipe):
    """Has no `__call__` of its own."""


@pytest.fixture
def small_heap():
    """Collects what is made in the test alone: all that was imported takes seconds to go through."""
    gc.freeze()
    yield
    gc.unfreeze()


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
    assert type(pipe)()("a") == ["a", "!"]
    first.detach()
    assert type(pipe) is type(other) is cls
    assert dict(vars(cls)) == before
    assert vars(pipe) == {}


def test_wrapper_added_to_the_class_meanwhile_stays():
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


def test_wrapper_added_to_the_pipes_own_class_stays():
    pipe, attachment = Pipe(), PatchSet()
    around_calls(pipe, saying("ours"), attachment)
    ours = type(pipe).__call__
    type(pipe).__call__ = lambda self, *words, **options: [*ours(self, *words, **options), "theirs"]
    assert pipe("a") == ["a", "ours", "!", "theirs"]
    attachment.detach()
    assert pipe("a") == ["a", "!", "theirs"]


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("cls", [Pipe, Heir])
def test_class_is_restored_once_its_wrapped_pipes_are_dropped(cls):
    before, pipe, other = dict(vars(cls)), cls(), cls()
    for one, words in ((pipe, "ab"), (other, "c")):
        for word in words:
            around_calls(one, saying(word), PatchSet())
    del pipe, one
    gc.collect()
    assert other("x") == ["x", "c", "!"]
    del other
    gc.collect()
    assert dict(vars(cls)) == before


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("detached_first", [False, True])
def test_pipeline_without_references_is_freed(tmp_path, detached_first):
    from diffusers import WanPipeline

    before = dict(vars(WanPipeline))
    pipe = WanPipeline.from_pretrained(make_tiny("wan", tmp_path / "wan"), local_files_only=True)
    dbsp_para.parallelize_pipe(pipe, config={"report": str(tmp_path / "report"), "mask": {"source": "dense"}})
    if detached_first:
        dbsp_para.unparallelize(pipe)
    remaining = weakref.ref(pipe), weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert [ref() for ref in remaining] == [None, None]
    assert dict(vars(WanPipeline)) == before


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_transformer_is_not_copied_while_db_sp_is_enabled(make):
    transformer = make_tiny_transformer("wan")
    dbsp_diffusers.enable(transformer, {"mask": {"source": "dense"}})
    with pytest.raises(UserError, match="before `enable`, or after `disable`"):
        make(transformer)
    dbsp_diffusers.disable(transformer)
    make(transformer)
