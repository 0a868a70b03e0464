"""Compile all kernels at the shapes of the papers' presets, for GPUs that this machine need not have."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from gpus import CAPABILITIES, TILES, compile_for_gpus, narrow_offsets, rounded_products

from wmcli import kernels

KERNELS = (
    *("attention", "causal_conv", "diagonal_scan", "lambda_returns", "linear_recurrence"),
    *("nearest", "s4", "selective_scan", "tree_search"),
)
MOST_SHARED = 100 * 1024
"""Bytes of shared memory a block."""
SPILLED = {
    ("linear_recurrence._forward_kernel", "drama-s, dynamics", "float32"): 16,
    ("selective_scan._backward", "drama-mamba1, dynamics", "float32"): 16,
    ("selective_scan._backward", "rem with mamba1, dynamics", "float32"): 16,
    ("attention._backward_places", "unizero, whole sequence", "bfloat16"): 8,
    ("attention._backward_queries", "unizero-gaussian, whole sequence", "float32"): 8,
}
"""Bytes a thread that the assembler spills on sm_90 or sm_100 alone, the last under Triton 3.6 only. A tile of half the
size would read its operands twice as often for the sake of two to four registers."""
MOST_SPILLED = (0, 32, 32)
"""Bytes a thread, by tile. Only tuning takes a tile that is not the first, and it would see what a few bytes cost."""


@pytest.mark.slow
@pytest.mark.takes_part
@pytest.mark.parametrize("kernel", KERNELS)
def test_registers_memory_and_precision(kernel: str, request: pytest.FixtureRequest) -> None:
    """Of every tile for every GPU; with `--part K/N` of the first tiles for every Nth GPU."""
    part, parts = map(int, request.config.getoption("part").split("/"))
    gpus, tiles = CAPABILITIES[part % len(CAPABILITIES) :: parts], TILES if parts == 1 else 1
    rows = compile_for_gpus(kernel, capabilities=gpus, tiles=tiles)
    assert rows
    for row in rows:
        allowed = SPILLED.get((row["kernel"], row["shape"], row["dtype"]), MOST_SPILLED[row["tile"]])
        assert row["spilled"] <= allowed, row
        assert row["shared"] <= MOST_SHARED, row
        assert not row["narrow"], row
        assert not (row["dtype"] == "float32" and row["tf32"]), row


def aliases_in_loops(source: str) -> list[str]:
    """Return the names that a loop sets to another name of the value that they had before it.

    Triton's compiler sees that the value did not change in the first round, and takes the name for a constant of the
    loop. Its interpreter does what Python does.
    """
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        copies = [
            (node.lineno, node.targets[0].id, node.value.id)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Name)
        ]
        for loop in ast.walk(function):
            if isinstance(loop, ast.For | ast.While):
                within = {(name, other) for line, name, other in copies if loop.lineno < line <= loop.end_lineno}
                before = {frozenset(names) for line, *names in copies if line < loop.lineno}
                found += [f"{function.name}: {name}" for name, other in within if frozenset((name, other)) in before]
    return found


def test_two_names_of_one_value() -> None:
    """`next_node = node` before a loop and `node = next_node` in it made a search that never left the root on a GPU."""
    assert aliases_in_loops("def f(a):\n b = a\n while b > 0:\n  a = b\n  b = a - 1\n return a") == ["f: a"]
    assert not aliases_in_loops("def f(a):\n b = a * 1\n while b > 0:\n  a = b\n  b = a - 1\n return a")
    for file in Path(kernels.__file__).parent.glob("*.py"):
        assert not aliases_in_loops(file.read_text(encoding="utf-8")), file.name


def test_an_offset_in_32_bits_is_found() -> None:
    ir = """
    %0 = tt.get_program_id x : i32
    %1 = arith.muli %0, %stride : i32
    %2 = tt.splat %1 : i32 -> tensor<8xi32>
    %3 = arith.addi %2, %lane : tensor<8xi32>
    %4 = tt.addptr %x, %3 : tensor<8x!tt.ptr<f32>>, tensor<8xi32>
    %c = arith.constant 64 : i32
    %5 = arith.muli %0, %c : i32
    %6 = tt.addptr %y, %5 : !tt.ptr<f32>, i32
    """
    assert narrow_offsets(ir) == ["%1 = arith.muli %0, %stride : i32"]
    assert not narrow_offsets(ir.replace("i32", "i64"))
    extended = "%0 = tt.get_program_id x : i32\n%1 = arith.muli %0, %stride : i32\n%2 = arith.extsi %1 : i32 to i64"
    assert len(narrow_offsets(extended)) == 1


def test_a_product_in_tf32_is_found() -> None:
    product = "%1 = tt.dot %a, %b, %c, inputPrecision = {} : tensor<16x32x{}> * tensor<32x16x{}> -> tensor<16x16xf32>"
    found = {
        (how, of): rounded_products(product.format(how, of, of)) for how in ("tf32", "tf32x3") for of in ("f32", "bf16")
    }
    assert [key for key, count in found.items() if count] == [("tf32", "f32")]
