"""YAML whose aliases come to more than a machine holds is rejected at once, and long values are not printed whole."""

from __future__ import annotations

import pytest

from dbsp_core.config import DbspConfig
from dbsp_core.sources.spec import mask_settings
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.yaml_file import parse_value, read_settings

DEPTH = 12
LISTS = "{a0: &a0 [x,x,x,x,x,x,x,x]" + "".join(
    f", a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 8)}]" for n in range(1, DEPTH)
)
FILES = {
    "mappings": "a0: &a0 {x: 1, y: 2}\n"
    + "\n".join(f"a{n}: &a{n} {{{', '.join(f'k{place}: *a{n - 1}' for place in range(8))}}}" for n in range(1, DEPTH)),
    "merged mappings": "a0: &a0 {x: 1, y: 2}\n"
    + "\n".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 8)}]}}" for n in range(1, DEPTH)),
    "lists": f"strategy: {LISTS}}}",
    "keys": f"strategy: {LISTS}, ? *a{DEPTH - 1} : 1}}",
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_a_file_of_aliases_is_rejected(tmp_path, content):
    (tmp_path / "my.yaml").write_text(content)
    with pytest.raises(UserError, match=r"my\.yaml:\d+: more than 100,000 values, aliases written out; give fewer$"):
        DbspConfig.load(tmp_path / "my.yaml")


@pytest.mark.parametrize(
    "read", [lambda text: parse_value(text, "--set a"), lambda text: mask_settings(f"svg:a={text}")]
)
def test_a_value_of_aliases_is_rejected(read):
    with pytest.raises(UserError, match=r"more than 100,000 values, aliases written out; give fewer$"):
        read(LISTS + "}")


@pytest.mark.parametrize("nested", ["[" * 5000, "{a: " * 5000])
def test_what_is_nested_too_deep_is_rejected(tmp_path, nested):
    with pytest.raises(UserError, match="is not YAML"):
        parse_value(nested, "--set a")
    (tmp_path / "my.yaml").write_text(f"a: {nested}")
    with pytest.raises(UserError, match="YAML"):
        read_settings(tmp_path / "my.yaml", "configuration file")


def test_an_alias_as_people_use_it_is_read(tmp_path):
    (tmp_path / "my.yaml").write_text("mask: &m {source: window}\ntransformer_2: {mask: *m}")
    config = DbspConfig.load(tmp_path / "my.yaml")
    assert config.transformer_2["mask"] == {"source": "window"}


@pytest.mark.parametrize("key", ["strategy", "mask", "precision", "vae", "reuse", "planner", "kernel"])
def test_a_long_value_is_shown_in_short(key):
    for value in (["x"] * 90_000, "x" * 90_000, {"x" * 90_000: 1}):
        with pytest.raises(UserError) as rejected:
            DbspConfig.load({key: value})
        assert len(str(rejected.value)) < 800
