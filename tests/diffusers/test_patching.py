"""Wrappers that db-SP puts around calls of a pipeline and its transformer: undone without a trace, freed with them."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import warnings
import weakref
from types import SimpleNamespace

import pytest
from diffusers import WanPipeline

import dbsp_diffusers
import dbsp_para
from dbsp_cli.tiny_models import make_tiny
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.patching import PatchSet, around_calls
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import outputs

DENSE = {"mask": {"source": "dense", "block_q": 16, "block_k": 16}}


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
    return lambda call, *words, **options: call(*words, word, **options)


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


@pytest.mark.parametrize("of_the_pipe", [False, True])
def test_wrapper_added_to_a_class_meanwhile_stays(of_the_pipe):
    """Tries the class of all pipes, and the one that a pipe gets of its own."""

    class Own(Pipe):
        pass

    pipe, attachment = Own(), PatchSet()
    around_calls(pipe, saying("ours"), attachment)
    cls = type(pipe) if of_the_pipe else Own
    ours = cls.__call__
    cls.__call__ = lambda self, *words, **options: [*ours(self, *words, **options), "theirs"]
    assert pipe("a") == ["a", "ours", "!", "theirs"]
    attachment.detach()
    assert pipe("a") == ["a", "!", "theirs"]


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("detached_first", [False, True])
def test_pipeline_without_references_is_freed(tmp_path, detached_first):
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


def test_nothing_is_copied_while_db_sp_is_enabled(tmp_path):
    """Tries a tiny Wan2.2, with two transformers and settings of its own."""
    pipe = WanPipeline.from_pretrained(make_tiny("wan2.2", tmp_path / "wan2.2"), local_files_only=True)
    parts, ways = (pipe, pipe.transformer, pipe.transformer_2, pipe.vae), (copy.copy, copy.deepcopy, pickle.dumps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dbsp_diffusers.enable(pipe, DENSE, vae=True)
    for part, make in itertools.product(parts, ways):
        message = f"cannot copy or pickle this {type(part).__name__} while db-SP is enabled"
        with pytest.raises(UserError, match=message):
            make(part)
    assert list(dbsp_diffusers.sessions_of(pipe)) == ["transformer", "transformer_2"]
    dbsp_diffusers.disable(pipe)
    for part, make in itertools.product(parts, ways):
        make(part)
    assert dbsp_diffusers.session_of(copy.copy(pipe)) is None


def test_transformer_with_two_names_is_enabled_once():
    transformer = make_tiny_transformer("wan")
    before, pipe = fingerprint(transformer), SimpleNamespace(transformer=transformer, transformer_2=transformer)
    session = dbsp_diffusers.enable(pipe, DENSE)
    assert dbsp_diffusers.sessions_of(pipe) == {"transformer": session, "transformer_2": session}
    outputs(transformer, tiny_inputs("wan"))
    assert session.statistics()["calls"] == 2  # of its layers
    dbsp_diffusers.disable(pipe)
    assert fingerprint(transformer) == before


def test_part_of_two_transformers_is_rejected():
    first, second = make_tiny_transformer("wan"), make_tiny_transformer("wan", seed=4)
    second.rope = first.rope
    before = fingerprint(first), fingerprint(second)
    answer = "of this WanTransformer3DModel belongs to another transformer on which db-SP is enabled"
    with pytest.raises(UserError, match=answer):
        dbsp_diffusers.enable(SimpleNamespace(transformer=first, transformer_2=second), DENSE)
    assert (fingerprint(first), fingerprint(second)) == before
    dbsp_diffusers.enable(first, DENSE)
    with pytest.raises(UserError, match=answer):
        dbsp_diffusers.enable(second, DENSE)
    dbsp_diffusers.disable(first)
    dbsp_diffusers.enable(second, DENSE)
    dbsp_diffusers.disable(second)
    assert (fingerprint(first), fingerprint(second)) == before


def test_transformers_enabled_one_by_one_are_disabled_with_their_pipeline():
    transformers = make_tiny_transformer("wan"), make_tiny_transformer("wan", seed=4)
    pipe = SimpleNamespace(transformer=transformers[0], transformer_2=transformers[1])
    for transformer in transformers:
        dbsp_diffusers.enable(transformer, DENSE)
    dbsp_diffusers.disable(pipe)
    assert dbsp_diffusers.sessions_of(pipe) == {}
    assert [dbsp_diffusers.session_of(transformer) for transformer in transformers] == [None, None]


def test_pipeline_is_not_enabled_twice():
    pipe = SimpleNamespace(transformer=make_tiny_transformer("wan"))
    session = dbsp_diffusers.enable(pipe, DENSE)
    with pytest.raises(UserError, match="already parallelized"):
        dbsp_diffusers.enable(pipe.transformer, DENSE)
    pipe.transformer = make_tiny_transformer("wan")
    with pytest.raises(UserError, match="db-SP is already enabled on this pipeline"):
        dbsp_diffusers.enable(pipe, DENSE)
    assert dbsp_diffusers.session_of(pipe) is session
    dbsp_diffusers.disable(pipe)
    assert dbsp_diffusers.session_of(pipe) is None
