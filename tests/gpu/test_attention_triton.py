"""Triton: the contract of every backend, run by Triton's interpreter, and compiled for a GPU that need not be there.

The interpreter is chosen when Triton is imported, for a whole process; so these tests start one of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_the_interpreted_kernels_keep_the_contract() -> None:
    tests = ["tests/unit/test_attention_backends.py", "tests/gpu/test_triton_interpreted.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu() -> None:
    """Triton brings its own assembler, so this needs no device."""
    code = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvstore import digest_triton
from model.attention import gpu_kernels as kernels

def build(kernel, types, constants):
    rest = iter(types)
    signature = {name: "constexpr" if name in constants else next(rest) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

floats, ints, longs, count = "*fp32", "*i32", "*i64", "i32"
shape = dict(T=16, D=16, V=16, D_PAD=16, V_PAD=16, CHECK=True)
for codes, scaled, code_bytes in (("*i8", True, 1), ("*bf16", False, 2)):
    form = dict(shape, SCALED=scaled, CODE_BYTES=code_bytes)
    build(kernels.write_tokens,
          [floats, floats, codes, floats, longs, ints, ints, longs, ints, ints] + [count] * 6,
          dict(form, K=2, K_PAD=2))
    build(kernels.attend,
          [floats, codes, floats, longs, ints, longs, ints, longs, ints, ints, ints, ints, floats] + [count] * 7
          + ["fp32"],
          dict(form, H=4, G=2, R=16, T_PAD=16))
build(kernels.clear_flagged, [ints] * 4 + [floats], dict(W=64, W_PAD=64))
build(digest_triton._sum_pages, [longs] * 4 + [count] * 2, dict(PAIRS=256))
print("built")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.stdout.split() == ["built"], done.stderr[-3000:]


def test_a_missing_triton_is_a_typed_error() -> None:
    code = """
import sys
sys.modules["triton"] = None  # what an import of a missing package meets
from kvstore.errors import InvalidInput
from model.attention.select import make_backend
from tests.unit.attention_cases import gqa
try:
    make_backend("triton", gqa())
except InvalidInput as error:
    print(error.reason, error.field)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["triton_missing", "attention_backend"]
