"""`torch.set_default_device` is common in scripts; what db-SP has on the host stays there."""

from __future__ import annotations

import ast

from tests.support.repository import ROOT

MADE = {
    *("tensor", "as_tensor", "asarray", "zeros", "ones", "full", "empty", "empty_strided", "arange", "range", "eye"),
    *("linspace", "logspace", "rand", "randn", "randint", "randperm", "scalar_tensor", "tril_indices", "triu_indices"),
}
"""Functions of torch that make tensors on its default device where no device is named."""


def test_every_tensor_is_made_on_a_named_device():
    packages = [file.parent for file in ROOT.glob("dbsp_*/__init__.py")] + [ROOT / "kernels"]
    assert len(packages) > 4
    nowhere = []
    for file in sorted(file for package in packages for file in package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if _makes_a_tensor(node) and not {keyword.arg for keyword in node.keywords} & {"device", None}:
                nowhere.append(f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not nowhere


def _makes_a_tensor(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in MADE}
