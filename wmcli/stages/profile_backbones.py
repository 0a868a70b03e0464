"""`wm profile --compare backbones`: the cost of backbones of equal size in training and imagination, by length.

Encoder and decoder are left out: they are the same for all. Axes: B batch, T time (elements), D width.

Source: figure 3 of S4WM (Deng et al. 2023, arXiv 2307.02064), figure 10 of Drama (Wang et al. 2024, arXiv 2410.08893).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wmcli.assemble import count
from wmcli.backbones import BACKBONES, Backbone, BackboneSettings, State, build, map_state
from wmcli.errors import WmError
from wmcli.kernels.dispatch import on_triton
from wmcli.kernels.linear_recurrence import linear_recurrence_step
from wmcli.report.plots import cost_by_length, write_figure
from wmcli.settings import Settings
from wmcli.stages.profile_cells import Cell, measure_cell, select_jobs
from wmcli.stages.profile_kernels import RandomOperands, check, state_space_duality
from wmcli.training.device import Machine
from wmcli.training.measure import Bench, Job, ratio

LENGTHS = (64, 256, 1024, 4096)
TOKENS = {"cpu": 1 << 12, "cuda": 1 << 16}  # of a training batch, the same at every length
ROWS = {"cpu": 16, "cuda": 64}  # imagined side by side
CHECKED_LENGTH = 150  # elements: more than one chunk of any backbone
ALLOWED = {"float32": 1e-3, "bfloat16": 0.03}  # difference of steps from forward, as a share of the largest output
# Its steps are in float32, and the products of its forward in bfloat16: they differ by up to 0.08.
DRIFTING = {("dreamer-gru", "bfloat16"): 0.15}
CLOSE = 0.05  # relative difference of parameter counts that count as equal


def compare_backbones(
    settings: Settings, machine: Machine, bench: Bench, lengths: Sequence[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure all backbones with about as many parameters as the preset's, if possible at its depth.

    Returns:
        The sizes of each backbone, and rows of cost. Training is forward and backward on a batch of the same number of
        elements at every length. Imagination is one step after so many elements. Mamba-2's recurrence is measured in
        chunks and element by element.

    Raises:
        WmError: The steps of a backbone differ from its forward.
    """
    with bench.progress.bar("profile sizes and results", len(BACKBONES), "backbones") as bar:
        sizes, descriptions = equal_sizes(settings), []
        for name, size in sizes.items():
            error = check_steps(size, machine)
            descriptions.append(
                {
                    "backbone": name,
                    "layers": size.layers,
                    "width": size.width,
                    "parameters": parameters(size),
                    "error": error,
                    "note": size.size_note,
                }
            )
            bar.advance()
    rows: list[dict[str, Any]] = []
    mamba2 = settings.model_copy(update={"backbone": sizes["mamba2"]})
    recurrence_fits = True
    for length in sorted(set(lengths)):
        training = _training(sizes, settings.backbone.kind, length, machine, bench)
        skipped = {row["backbone"] for row in training if "skipped" in row}
        sizes = {name: size for name, size in sizes.items() if name not in skipped}
        imagination = _imagination(sizes, settings.backbone.kind, length, machine, bench)
        recurrence = list(_chunked_and_sequential(mamba2, length, machine, bench)) if recurrence_fits else []
        recurrence_fits = recurrence_fits and not any("skipped" in row for row in recurrence)
        rows += [*training, *imagination, *recurrence]
    return descriptions, rows


def draw_comparison(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw time per element in training and imagination, and memory in training, over length."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if "backbone" not in row or row.get("skipped"):
            continue
        values = {f"{row['what']}, µs per element": 1e6 / row["rate"]}
        if row["what"] == "training" and row["peak_bytes"]:
            values["training, MB at the peak"] = row["peak_bytes"] / 1e6
        for panel, value in values.items():
            panels.setdefault(panel, {}).setdefault(row["backbone"], []).append((row["length"], value))
    if panels:
        write_figure(path, cost_by_length(panels))


# -- equal sizes ------------------------------------------------------------------------------------------------------


def parameters(backbone: BackboneSettings) -> int:
    """Return the number of parameters, without the transformer's table of positions, which grows with the length."""
    with torch.device("meta"):
        return count(build(backbone, max_length=1, block=1))


def equal_sizes(settings: Settings) -> dict[str, BackboneSettings]:
    """Return settings of each backbone with nearly as many parameters as the chosen one, which comes first.

    The depth is the nearest one, from half to twice the chosen one's, with a width that comes `CLOSE`. If there is
    none, the best depth and width are taken.
    """
    backbone = settings.backbone
    templates = {kind: settings.backbone_of_kind(kind) for kind in BACKBONES}
    width_step = math.lcm(*(template.width_step for template in templates.values()))
    target = parameters(backbone)
    sizes: dict[str, BackboneSettings] = {backbone.kind: backbone}
    depths = range(math.ceil(backbone.layers / 2), 2 * backbone.layers + 1)
    for name in BACKBONES:
        if name == backbone.kind:
            continue
        best: BackboneSettings = backbone
        off = math.inf
        for layers in sorted(depths, key=lambda each: abs(math.log(each / backbone.layers))):
            candidate = _of_depth(templates[name], width_step, layers, target)
            difference = abs(parameters(candidate) / target - 1)
            if difference < off:
                best, off = candidate, difference
            if off <= CLOSE:
                break
        sizes[name] = best
    return sizes


def _of_depth(template: BackboneSettings, width_step: int, layers: int, target: int) -> BackboneSettings:
    """Return the settings of the width with the nearest number of parameters, among multiples of `width_step`."""
    widths = range(width_step, 8 * max(template.width, width_step) + 1, width_step)
    sizes = [size for width in widths if (size := template.resized(layers, width)) is not None]
    above = bisect.bisect_left(sizes, target, hi=len(sizes) - 1, key=parameters)
    return min(sizes[max(above - 1, 0) : above + 1], key=lambda each: abs(parameters(each) - target))


# -- check of results -------------------------------------------------------------------------------------------------


def check_steps(backbone: BackboneSettings, machine: Machine) -> float:
    """Return the difference of steps from forward, as a share of the largest output.

    Raises:
        WmError: It is larger than `ALLOWED`.
    """
    model = build(backbone, CHECKED_LENGTH, block=1).to(machine.device).eval()
    x = torch.randn(2, CHECKED_LENGTH, backbone.width, device=machine.device)
    state, steps = model.initial_state(len(x)), []
    with torch.no_grad(), machine.autocast():
        whole, _ = model(x, None)
        for element in x.unbind(1):
            y, state = model.step(element, state)
            steps.append(y)
    error = float((torch.stack(steps, 1) - whole).abs().amax() / whole.abs().amax())
    allowed = DRIFTING.get((backbone.kind, machine.precision), ALLOWED[machine.precision])
    if not error <= allowed:  # NaN included
        raise WmError(
            f"profile: steps of {backbone.kind} differ by {error:.2g} from its forward on {CHECKED_LENGTH} elements,"
            f" and {allowed:g} is allowed: its results are wrong on this machine"
        )
    return error


# -- cells ------------------------------------------------------------------------------------------------------------

Sizes = dict[str, BackboneSettings]


def _training(sizes: Sizes, preset: str, length: int, machine: Machine, bench: Bench) -> list[dict[str, Any]]:
    rows = max(TOKENS[machine.device.type] // length, 1)

    def job(backbone: BackboneSettings) -> Job:
        model = build(backbone, length, block=1).to(machine.device).train()
        x = torch.randn(rows, length, backbone.width, device=machine.device, requires_grad=True)
        inputs = [x, *model.parameters()]

        def forward_and_backward() -> None:
            with machine.autocast():
                y, _ = model(x, None)
            torch.autograd.grad(y.float().square().mean(), inputs)

        return forward_and_backward

    factories = {name: partial(job, size) for name, size in sizes.items()}
    cell = Cell("training", f"{rows} × {length} elements", length, rows * length, "elements")
    return measure_cell(cell, "backbone", factories, preset, bench)


def _imagination(sizes: Sizes, preset: str, length: int, machine: Machine, bench: Bench) -> list[dict[str, Any]]:
    rows = ROWS[machine.device.type]
    state_bytes: dict[str, int] = {}

    def job(name: str) -> Job:
        model = machine.freeze(build(sizes[name], length, block=1))  # as in imagination
        state = _state_after(model, length - 1, rows, machine)
        state_bytes[name] = _bytes(state)
        x = torch.randn(rows, model.width, device=machine.device)

        def step() -> None:
            with torch.no_grad(), machine.autocast():
                model.step(x, state)  # a cache written in place is written at the same place each time

        return step

    factories = {name: partial(job, name) for name in sizes}
    cell = Cell("imagination", f"{rows} rows behind {length - 1} elements", length, rows, "elements")
    return [
        row if "skipped" in row else row | {"state_bytes": state_bytes[row["backbone"]]}
        for row in measure_cell(cell, "backbone", factories, preset, bench)
    ]


def _state_after(model: Backbone, length: int, rows: int, machine: Machine) -> State:
    """Return the state after `length` random elements, the same in all rows."""
    x = torch.randn(1, length, model.width, device=machine.device)
    with torch.no_grad(), machine.autocast():
        _, state = model(x, model.initial_state(1))
    return map_state(lambda part: part.repeat_interleave(rows, 0), state)


def _bytes(state: State) -> int:
    sizes: list[int] = []

    def add(part: Tensor) -> Tensor:
        sizes.append(part.numel() * part.element_size())
        return part

    map_state(add, state)
    return sum(sizes)


def _chunked_and_sequential(
    settings: Settings, length: int, machine: Machine, bench: Bench
) -> Iterator[dict[str, Any]]:
    """Yield rows of Mamba-2's recurrence alone, forward and backward on a training batch, in both forms."""
    rows = max(TOKENS[machine.device.type] // length, 1)
    case = state_space_duality(settings, RandomOperands(machine), (rows, length, settings.backbone.width))
    operands = [operand.detach().requires_grad_() for operand in case.operands]

    def job(function: Callable[..., Tensor]) -> Job:
        return lambda: torch.autograd.grad(function(*operands).float().sum(), operands)

    forms = {"in chunks": case.call, "element by element": _element_by_element}
    label = "recurrence of Mamba-2"
    factories = {form: partial(job, each) for form, each in forms.items()}
    jobs, skipped = select_jobs(factories, f"{label}, {length} elements", bench)
    error = None if skipped else check(case, "triton" if on_triton(*case.operands) else "torch")
    times = bench.time_jobs(f"{label}, {length} elements", jobs)
    for form, each in times.items():
        row = partial(bench.row, f"{label}, {form}", case.shape, each, count=rows * length, unit="elements")
        yield row(length=length, error=error)
    for form, why in skipped.items():
        yield {"what": f"{label}, {form}", "shape": case.shape, "length": length, "skipped": why}
    if len(times) == 2:
        yield ratio(f"{label}, element by element over in chunks", case.shape, *reversed(times.values())) | {
            "length": length
        }


def _element_by_element(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """Compute the recurrence as acting does, on operands as in `linear_recurrence`."""
    state = torch.zeros(*v.shape[:2], k.shape[3], v.shape[3], device=v.device)
    outputs = []
    for element in zip(q.unbind(2), k.unbind(2), v.unbind(2), log_decay.unbind(2), strict=True):
        y, state = linear_recurrence_step(*element, state)
        outputs.append(y)
    return torch.stack(outputs, 2)
