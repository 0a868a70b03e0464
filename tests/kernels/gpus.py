"""Compile Triton kernels for GPUs on a machine that may have none.

    python tests/kernels/gpus.py [--out docs/results/kernels.csv] [KERNEL ...]

prints a table of all kernels at the shapes of the papers' presets, or writes it to a file.

Each call of `paper_shapes` is made on torch's device `meta` in both precisions and with every tile, with gradients. Its
launches are bound as they would be on a GPU and compiled, not run. So what is compiled is what a run launches. The
kernels that a test process has imported may be interpreted ones, so the compiler runs in a process of its own.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where tests run Triton's kernels: on a CPU they are interpreted."""

CAPABILITIES = (80, 90, 100)  # A100, H100 and H200, B200
TILES = 3  # the most that a kernel offers

Row = dict[str, Any]


def compile_for_gpus(*kernels: str, capabilities: tuple[int, ...], tiles: int) -> list[Row]:
    """Return the table of these kernels; fails with the compiler's message."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "table.json"
        selection = ["--for", ",".join(map(str, capabilities)), "--tiles", str(tiles)]
        command = [sys.executable, __file__, "--out", str(out), *selection, *kernels]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(out.read_text())


class Pointer:
    """Stands for a tensor of that dtype where Triton binds arguments: it asks for the address only to see alignment."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = (1 << 40) + int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


def launches(call: Any, capabilities: tuple[int, ...]) -> Iterator[Row]:
    """Run a call whose launches are compiled for each capability instead; yield a row for each."""
    from triton.runtime.jit import JITFunction

    rows: list[Row] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        arguments, keywords = _pointers(arguments), {name: _pointers(value) for name, value in keywords.items()}
        for capability in capabilities:
            Driver.capability = capability
            kernel = run(self, *arguments, grid=grid, warmup=True, **keywords)
            rows.append(_row(self, kernel, capability) | {"programs": torch.Size(grid).numel()})

    JITFunction.run = compile_only
    try:
        call()
    finally:
        JITFunction.run = run
    yield from rows


def _pointers(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_pointers, value))
    return Pointer(value) if isinstance(value, torch.Tensor) else value


def _row(function: Any, kernel: Any, capability: int) -> Row:
    ir, ptx = kernel.asm["ttir"], kernel.asm["ptx"]
    products = next((name for name, pattern in INSTRUCTIONS.items() if re.search(pattern, ptx)), "FMA")
    row = {"function": function.fn.__name__, "gpu": f"sm_{capability}", **_resources(kernel)}
    row |= {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps, "stages": kernel.metadata.num_stages}
    row["occupancy"] = occupancy(row)
    row["products"] = products if "tt.dot" in ir else ""
    return row | {"tf32": rounded_products(ir), "narrow": narrow_offsets(ir), "hash": kernel.hash}


def occupancy(row: Row) -> int:
    """Return the percentage of a multiprocessor's 64 warps that run at a time."""
    registers = -(-row["registers"] // 8) * 8 * 32 * row["warps"]
    memory = 164 if row["gpu"] == "sm_80" else 228  # kB, of which each block takes one more
    blocks = min(65536 // registers, memory * 1024 // (row["shared"] + 1024), 64 // row["warps"], 32)
    return 100 * blocks * row["warps"] // 64


def rounded_products(ir: str) -> int:
    """Return the number of products of float32 numbers that are rounded to TF32."""
    return len(re.findall(r"tt\.dot .*inputPrecision = tf32\b.*: tensor<\w+xf32>", ir))


def narrow_offsets(ir: str) -> list[str]:
    """Return products of an index and a stride or size in 32 bits that are added to an address: they could overflow."""
    made, found = {}, []
    for line in ir.splitlines():
        if match := re.match(r"\s*(%\w+) = ([\w.]+) (.*)", line):
            name, operation, rest = match.groups()
            made[name] = operation, re.findall(r"%\w+", rest.split(" : ")[0]), line.strip()

    def constant(name: str) -> bool:
        operation, operands, _ = made.get(name, ("", [], ""))
        return operation == "arith.constant" or (operation in SHAPING and constant(operands[0]))

    def argument(name: str) -> bool:
        operation, operands, _ = made.get(name, ("argument", [], ""))
        return operation == "argument" or (operation == "arith.muli" and all(map(argument, operands)))

    def products(name: str) -> Iterator[str]:
        operation, operands, line = made.get(name, ("", [], ""))
        if operation == "arith.muli" and not any(map(constant, operands)) and not all(map(argument, operands)):
            yield line
        elif operation in (*SHAPING, "arith.addi", "arith.subi", "arith.muli"):
            for operand in operands:
                yield from products(operand)

    for operation, operands, line in made.values():
        if operation == "tt.addptr" and line.split(", ")[-1].split(" loc")[0].strip("> ").endswith("i32"):
            found += products(operands[1])
        if operation == "arith.extsi" and made.get(operands[0], ("",))[0] == "arith.muli":
            found += products(operands[0])
    return found


SHAPING = ("tt.splat", "tt.broadcast", "tt.expand_dims")
INSTRUCTIONS = {"tcgen05": r"tcgen05\.mma", "WGMMA": r"wgmma\.mma_async", "HMMA": r"\bmma\.sync"}


def _resources(kernel: Any) -> Row:
    """Return registers of a thread, and bytes of its stack: nothing but spilled registers lies there."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said.stdout)
    assert found is not None, said.stdout
    return {"registers": int(found[1]), "spilled": int(found[2]) + int(found[3])}


class Driver:
    """What Triton asks of a driver before it launches: the GPU to compile for, numbered by its capability."""

    capability = CAPABILITIES[0]

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def table(kernels: list[str], capabilities: tuple[int, ...], count: int) -> list[Row]:
    from paper_shapes import Case, Make, cases
    from triton.runtime import driver

    from wmcli.kernels import tiles
    from wmcli.kernels.dispatch import using

    driver.set_active(Driver())

    def call(case: Case) -> None:
        operands = [operand.requires_grad_(case.backward) for operand in case.operands]
        results = case.call(*operands)
        if case.backward:
            results = [results] if isinstance(results, torch.Tensor) else list(results)
            torch.autograd.grad(results, operands, [torch.ones_like(each) for each in results], allow_unused=True)

    rows: dict[tuple[Any, ...], Row] = {}
    for tile, dtype in itertools.product(range(count), (torch.bfloat16, torch.float32)):
        for case in cases(Make("meta", dtype)):
            if kernels and case.kernel not in kernels:
                continue
            with using("triton"), tiles.using(tile), torch.set_grad_enabled(case.backward):
                for row in launches(lambda case=case: call(case), capabilities):
                    named = {"kernel": f"{case.kernel}.{row.pop('function')}", "shape": case.name}
                    row = named | {"dtype": str(dtype).removeprefix("torch."), "tile": tile} | row
                    same = rows.setdefault((*named.values(), row["hash"]), row)
                    if same["dtype"] != row["dtype"]:
                        same["dtype"] = "both"
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--for", dest="capabilities", default=",".join(map(str, CAPABILITIES)))
    parser.add_argument("--tiles", type=int, default=TILES)
    parser.add_argument("kernels", nargs="*")
    asked = parser.parse_args()
    rows = table(asked.kernels, tuple(map(int, asked.capabilities.split(","))), asked.tiles)
    if asked.out is not None and asked.out.suffix == ".json":
        asked.out.write_text(json.dumps(rows))
        return
    for row in rows:
        for name in ("tf32", "narrow", "hash"):
            del row[name]
    with asked.out.open("w", newline="") if asked.out is not None else sys.stdout as out:
        writer = csv.DictWriter(out, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
