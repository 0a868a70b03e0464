"""Time each kernel at the shapes of the preset's settings, after a check of its results.

All are timed, whatever the preset's backbone is: at the shapes of an update of the dynamics model, at the preset's
width and with the settings of each backbone. Single steps have the rows of an update of the controller.

A public kernel for the same job is checked and timed beside ours, where its package is installed (`profile_public`).

B batch, T time (elements of a training segment), other axes as in the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from wmcli.backbones.mamba1 import Mamba1Settings
from wmcli.backbones.mamba2 import DECAY_RATES, Mamba2Settings
from wmcli.backbones.residual import STEP_SIZES
from wmcli.backbones.retnet import RetNetSettings, head_decays
from wmcli.backbones.s4 import S4Settings, hippo_legs
from wmcli.backbones.s5 import S5Settings
from wmcli.backbones.transformer import TransformerSettings
from wmcli.errors import WmError
from wmcli.kernels import s4
from wmcli.kernels.attention import attention
from wmcli.kernels.attention import reference as attention_reference
from wmcli.kernels.causal_conv import causal_conv, causal_conv_step
from wmcli.kernels.causal_conv import reference as causal_conv_reference
from wmcli.kernels.diagonal_scan import diagonal_scan
from wmcli.kernels.diagonal_scan import reference as diagonal_scan_reference
from wmcli.kernels.dispatch import on_triton, using
from wmcli.kernels.lambda_returns import lambda_returns
from wmcli.kernels.lambda_returns import reference as lambda_returns_reference
from wmcli.kernels.linear_recurrence import linear_recurrence, linear_recurrence_fork, linear_recurrence_step
from wmcli.kernels.linear_recurrence import reference as linear_recurrence_reference
from wmcli.kernels.nearest import nearest
from wmcli.kernels.nearest import reference as nearest_reference
from wmcli.kernels.selective_scan import reference as selective_scan_reference
from wmcli.kernels.selective_scan import selective_scan, selective_scan_step
from wmcli.settings import Settings
from wmcli.stages.profile_public import PUBLIC, Public, why_not
from wmcli.tokenizers.vq import TokenizerSettings
from wmcli.training.device import Machine
from wmcli.training.measure import Bench, Job, count_operations, peak_memory, ratio

ALLOWED = {"float32": 1e-3, "bfloat16": 2e-2}  # difference from the reference, as a share of its largest number
PUBLIC_FACTOR = 5  # on it for public kernels, some of which take operands that are rounded once more

Implementation = Literal["torch", "triton"]


class Case(NamedTuple):
    """One kernel at one shape."""

    name: str
    shape: str
    operands: tuple[Tensor, ...]
    axes: tuple[int | None, ...]
    """Axis of independent rows of each operand, if it has one. The result has that of the first operand."""
    call: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    compared: Callable[..., Tensor] = lambda result, *operands: result
    """From a result and the operands to the numbers that are compared."""
    rows: int = 2
    """Rows that are compared: most references go element by element and keep all for their gradients."""
    backward: bool = True
    """Whether it has gradients of all operands that are real or complex."""
    loose: float = 1.0
    """Factor on the allowed error: more than 1 where the problem is ill-conditioned."""
    constant: tuple[int, ...] = ()
    """Operands without a gradient that could have one."""
    state_bytes: int = 0
    """Bytes of the new state, which is written beside the result."""


def profile_kernels(settings: Settings, machine: Machine, bench: Bench, elements: int) -> list[dict[str, Any]]:
    """Time each kernel, forward, and forward and backward, in each implementation that the run could use.

    Args:
        settings: Of the preset.
        machine: Device and precision.
        bench: Times calls.
        elements: Of the backbone that a frame and its action take; 0 without a backbone.

    Raises:
        WmError: A kernel's result or gradient is not that of its reference.
    """
    return [row for case in kernel_cases(settings, machine, elements) for row in profile_kernel(case, bench)]


def profile_kernel(case: Case, bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield the rows of one kernel, see `profile_kernels`."""
    ours: list[Implementation] = ["torch", "triton"] if on_triton(*case.operands) else ["torch"]
    public = PUBLIC.get(case.name, {})
    forms: dict[str, _Form] = {}
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    operands, inputs = _leaves(case, case.operands)
    with bench.progress.bar(f"profile {case.name}, results", len(ours) + len(public), "implementations") as bar:
        for each in ours:
            errors[each] = check(case, each)
            forms[each] = _Form(case.call, operands, each)
            bar.advance()
        for name, load in public.items():
            try:
                forms[name], errors[name] = _public_form(case, load())
            except Exception as error:  # of another package: whatever it is, ours are timed
                skipped[name] = why_not(error)
            bar.advance()

    # A lower bound: operands are read once in each direction, results are written once.
    with torch.no_grad():
        y = case.call(*operands)
    read, learned, written = _bytes(*operands), _bytes(*inputs), _bytes(y) + case.state_bytes
    moved = {False: read + written, True: 2 * read + learned + 2 * written}
    for backward in (False, True) if case.backward else (False,):
        label = f"{case.name}, {'forward and backward' if backward else 'forward'}"
        jobs = {name: form.job(backward) for name, form in forms.items()}
        times = bench.time_jobs(label, jobs)
        peaks = {}
        with bench.progress.bar(f"profile {label}, cost", 1 + len(jobs), "calls") as bar:
            operations = count_operations(jobs["torch"])  # other forms cannot be counted
            bar.advance()
            for name, job in jobs.items():
                peaks[name] = peak_memory(job, bench.device)
                bar.advance()
        for name in jobs:
            yield bench.row(
                label,
                case.shape,
                times[name],
                operations=operations,
                moved=moved[backward],
                memory=peaks[name],
                implementation=name,
                error=errors[name],
            )
        for name, why in skipped.items():
            yield {"what": label, "shape": case.shape, "implementation": name, "skipped": why}
        for name in times if "triton" in times else ():
            if name != "triton":
                yield ratio(f"{label}, {name} over triton", case.shape, times[name], times["triton"])


class _Form(NamedTuple):
    """One implementation of a kernel, ready to be timed."""

    call: Callable[..., Tensor]
    operands: tuple[Tensor, ...]
    implementation: Implementation | None = None
    """Of ours; None for a public kernel."""

    def job(self, backward: bool) -> Job:
        """Return a call, forward, or forward and backward."""
        operands = tuple(operand.detach().requires_grad_(operand.requires_grad) for operand in self.operands)
        inputs = [operand for operand in operands if operand.requires_grad]
        within = nullcontext if self.implementation is None else partial(using, self.implementation)
        with within(), torch.no_grad():
            y = self.call(*operands)
        gradient = torch.randn_like(y) if backward else y

        def forward() -> None:
            with within(), torch.no_grad():
                self.call(*operands)

        def forward_and_backward() -> None:
            with within():
                torch.autograd.grad(self.call(*operands), inputs, gradient)

        return forward_and_backward if backward else forward


def _public_form(case: Case, public: Public) -> tuple[_Form, float]:
    """Return a public kernel in its own layout, and its largest difference from the reference.

    Raises:
        WmError: The difference is too large for the same job.
    """
    error = difference(case._replace(call=lambda *operands: public.restore(public.call(*public.prepare(*operands)))))
    if not error <= PUBLIC_FACTOR * _allowed(case):
        raise WmError(f"differs by {error:.2g} from the reference")
    operands = public.prepare(*_leaves(case, case.operands)[0])
    return _Form(public.call, operands), error


def check(case: Case, implementation: Implementation) -> float:
    """Compare the first rows of result and gradients at the full shape with the reference in float64.

    Returns:
        The largest difference, as a share of the reference's largest number.

    Raises:
        WmError: It is more than `ALLOWED` for the lowest precision among the operands.
    """
    with using(implementation):
        error = difference(case)
    allowed = _allowed(case)
    if not error <= allowed:  # also where it is NaN
        raise WmError(
            f"profile: {case.name} in {implementation} is {error:.2g} off its reference at {case.shape}, where"
            f" {allowed:g} is allowed: its results are wrong on this machine"
        )
    return error


def difference(case: Case) -> float:
    """Return the largest difference of `check`, NaN where a number is NaN."""
    expected = _results(case, case.reference, tuple(map(_wide, _first_of_each(case, case.operands))))
    got = _results(case, case.call, case.operands)
    differences = [_difference(*each) for each in zip(got, expected, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)  # max alone may pass over a NaN


def _allowed(case: Case) -> float:
    low = any(operand.dtype == torch.bfloat16 for operand in case.operands)
    return case.loose * ALLOWED["bfloat16" if low else "float32"]


def _results(case: Case, function: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the first rows of the result, and of the gradients of its sum weighted by signs, exact in any dtype."""
    operands, inputs = _leaves(case, operands)
    y = function(*operands)
    result = case.compared(_first(case, y.detach(), case.axes[0]), *_first_of_each(case, operands))
    if not case.backward:
        return [result]
    weight = torch.zeros_like(y)
    rows = _first(case, weight, case.axes[0])
    rows.copy_(torch.arange(rows.numel(), device=y.device, dtype=torch.float64).sin().sign().view(rows.shape))
    gradients = iter(torch.autograd.grad(y, inputs, weight))
    each = [next(gradients) if operand.requires_grad else operand for operand in operands]
    return [result, *_first_of_each(case, each)]


def _leaves(case: Case, operands: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return the operands as leaves of a graph, and those of them that have a gradient."""
    operands = tuple(
        operand.detach().requires_grad_(case.backward and _is_number(operand) and index not in case.constant)
        for index, operand in enumerate(operands)
    )
    return operands, [operand for operand in operands if operand.requires_grad]


def _first_of_each(case: Case, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(_first(case, operand, axis) for operand, axis in zip(operands, case.axes, strict=True))


def _first(case: Case, operand: Tensor, axis: int | None) -> Tensor:
    return operand if axis is None else operand.narrow(axis, 0, min(case.rows, operand.shape[axis]))


def _difference(ours: Tensor, theirs: Tensor) -> float:
    if not _is_number(theirs):
        return float((ours != theirs).any())
    return float((ours - theirs).abs().amax() / theirs.abs().amax().clamp(min=1e-30))


def _is_number(operand: Tensor) -> bool:
    return operand.is_floating_point() or operand.is_complex()


def _wide(operand: Tensor) -> Tensor:
    return operand.to(torch.promote_types(operand.dtype, torch.float64)) if _is_number(operand) else operand


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# -- the kernels ------------------------------------------------------------------------------------------------------


def kernel_cases(
    settings: Settings, machine: Machine, elements: int, kinds: Collection[str | None] | None = None
) -> Iterator[Case]:
    """Yield every kernel with random operands; those that come from a matrix product have the run's precision.

    Args:
        settings: Of the preset.
        machine: Device and precision.
        elements: Of the backbone that a frame and its action take; 0 without a backbone.
        kinds: Kinds of backbones whose kernels are wanted, None among them for those of no backbone; None is all.
    """
    if not elements:
        return  # convolutions only
    make, dynamics, controller = RandomOperands(machine), cast(Any, settings.dynamics), cast(Any, settings.controller)
    batch, width = dynamics.batch, settings.backbone.width
    learns = controller.acts and not controller.searches
    segment = (batch, dynamics.sequence_length * elements, width)
    step = (controller.batch if learns else batch, 1, width)
    makers: list[tuple[str | None, Callable[..., Case], tuple[Any, ...]]] = [
        ("retnet", _retention, (segment, elements)),
        ("retnet", _retention_step, (step, elements)),
        ("mamba2", state_space_duality, (segment,)),
        ("mamba2", _state_space_duality_step, (step,)),
        ("mamba1", _selective_scan, (segment,)),
        ("mamba1", _selective_scan_step, (step,)),
        ("mamba2", _causal_conv, (segment,)),
        ("mamba2", _causal_conv_step, (step,)),
        ("s4", _state_space, (segment,)),
        ("s5", _diagonal_scan, (segment,)),
        ("transformer", _attention, (segment,)),
    ]
    if elements > 1:
        blocks = (batch, dynamics.sequence_length - 1, width)
        makers.insert(1, ("retnet", _retention_fork, (blocks, elements)))
    if dynamics.takes_tokenizer:
        makers.append((None, _nearest, (elements - 1,)))
    if learns:
        makers.append((None, _lambda_returns, ()))
    for kind, build, shape in makers:
        if kinds is None or kind in kinds:
            yield build(settings, make, *shape)


Shape = tuple[int, int, int]  # B, T (or blocks), width of the backbone


class RandomOperands:
    """Draws random operands on the machine's device."""

    def __init__(self, machine: Machine) -> None:
        self.device = machine.device
        self.dtype = torch.bfloat16 if machine.precision == "bfloat16" else torch.float32

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draw normal numbers in the run's precision."""
        return (scale * torch.randn(shape, device=self.device)).to(self.dtype)

    def log_uniform(self, bounds: tuple[float, float], *shape: int) -> Tensor:
        """Draw log-uniform numbers between the bounds, float32."""
        low, high = map(math.log, bounds)
        return torch.empty(shape, device=self.device).uniform_(low, high).exp()


def _retention(settings: Settings, make: RandomOperands, shape: Shape, block: int) -> Case:
    (batch, time, width), retnet = shape, cast(RetNetSettings, settings.backbone_of_kind("retnet"))
    k = max(width // retnet.heads, 1)
    q_, k_, v_ = (make.normal(batch, retnet.heads, time, k, scale=scale) for scale in (k**-0.5, 1.0, 1.0))
    return Case(
        "linear recurrence of RetNet",
        f"B {batch} H {retnet.heads} T {time} K {k} V {k}",
        (q_, k_, v_, torch.tensor(head_decays(retnet, block), device=make.device).log()),
        (0, 0, 0, None),
        lambda q, k, v, log_decay: linear_recurrence(q, k, v, log_decay, chunk=retnet.chunk_size)[0],
        lambda *operands: linear_recurrence_reference(*operands)[0],
        constant=(3,),
    )


def _retention_fork(settings: Settings, make: RandomOperands, shape: Shape, block: int) -> Case:
    """Return the case of Parallel Observation Prediction: blocks, each with a query for every token of a frame."""
    (batch, blocks, width), retnet = shape, cast(RetNetSettings, settings.backbone_of_kind("retnet"))
    k, each = max(width // retnet.heads, 1), 2 * block - 1
    q_, k_, v_ = (make.normal(batch, retnet.heads, blocks, each, k, scale=scale) for scale in (k**-0.5, 1.0, 1.0))

    def reference(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        state, outputs = None, []
        for n in range(blocks):
            q_, k_, v_ = q[:, :, n], k[:, :, n], v[:, :, n]
            outputs.append(linear_recurrence_reference(q_, k_, v_, log_decay, state)[0])
            q_, k_, v_ = (x[:, :, :block] for x in (q_, k_, v_))
            _, state = linear_recurrence_reference(q_, k_, v_, log_decay, state)
        return torch.stack(outputs, 2)

    return Case(
        "linear recurrence of RetNet, fork",
        f"B {batch} H {retnet.heads} N {blocks} C {block} + {block - 1} K {k} V {k}",
        (q_, k_, v_, torch.tensor(head_decays(retnet, block), device=make.device).log()),
        (0, 0, 0, None),
        lambda q, k, v, log_decay: linear_recurrence_fork(q, k, v, log_decay, block)[0],
        reference,
        constant=(3,),
    )


def _retention_step(settings: Settings, make: RandomOperands, shape: Shape, block: int) -> Case:
    whole = _retention(settings, make, shape, block)
    return _recurrence_step(whole, make)


def _state_space_duality_step(settings: Settings, make: RandomOperands, shape: Shape) -> Case:
    return _recurrence_step(state_space_duality(settings, make, shape), make)


def _recurrence_step(whole: Case, make: RandomOperands) -> Case:
    """Return the case of one step, from that of a sequence of one element."""
    q_, k_, v_, decay = whole.operands
    q_, k_, v_ = q_[:, :, 0], k_[:, :, 0], v_[:, :, 0]
    state_ = make.normal(*v_.shape[:2], k_.shape[2], v_.shape[2]).float()

    def reference(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> Tensor:
        decay = log_decay if log_decay.dim() == 1 else log_decay[..., None]
        return linear_recurrence_reference(q[:, :, None], k[:, :, None], v[:, :, None], decay, state)[0][:, :, 0]

    return whole._replace(
        name=f"{whole.name}, step",
        shape=whole.shape.replace(" T 1", ""),
        operands=(q_, k_, v_, decay if decay.dim() == 1 else decay[..., 0], state_),
        axes=(*whole.axes, 0),
        call=lambda *operands: linear_recurrence_step(*operands)[0],
        reference=reference,
        backward=False,
        state_bytes=_bytes(state_),
    )


def state_space_duality(settings: Settings, make: RandomOperands, shape: Shape) -> Case:
    """Return the case of Mamba-2's recurrence."""
    (batch, time, width), mamba2 = shape, cast(Mamba2Settings, settings.backbone_of_kind("mamba2"))
    heads = max(mamba2.expand * width // mamba2.head_width, 1)
    c, b = (make.normal(batch, 1, time, mamba2.state_size) for _ in range(2))
    dt = make.log_uniform(STEP_SIZES, batch, heads, time)
    x = make.normal(batch, heads, time, mamba2.head_width)
    return Case(
        "linear recurrence of Mamba-2",
        f"B {batch} H {heads} T {time} K {mamba2.state_size} V {mamba2.head_width}",
        (c, b, (dt[..., None] * x).to(x.dtype), -dt * make.log_uniform(DECAY_RATES, heads, 1)),
        (0, 0, 0, 0),
        lambda q, k, v, log_decay: linear_recurrence(q, k, v, log_decay, chunk=mamba2.chunk_size)[0],
        lambda *operands: linear_recurrence_reference(*operands)[0],
    )


def _selective_scan(settings: Settings, make: RandomOperands, shape: Shape) -> Case:
    (batch, time, width), mamba1 = shape, cast(Mamba1Settings, settings.backbone_of_kind("mamba1"))
    channels = mamba1.expand * width
    b, c = (make.normal(batch, time, mamba1.state_size) for _ in range(2))
    rates = torch.arange(1.0, mamba1.state_size + 1, device=make.device).repeat(channels, 1)
    return Case(
        "selective scan of Mamba-1",
        f"B {batch} T {time} C {channels} S {mamba1.state_size}",
        (make.normal(batch, time, channels), make.log_uniform(STEP_SIZES, batch, time, channels), -rates, b, c),
        (0, 0, None, 0, 0),
        lambda *operands: selective_scan(*operands)[0],
        lambda *operands: selective_scan_reference(*operands)[0],
    )


def _selective_scan_step(settings: Settings, make: RandomOperands, shape: Shape) -> Case:
    whole = _selective_scan(settings, make, shape)
    x, dt, rates, b, c = whole.operands
    state = make.normal(len(x), *rates.shape).float()
    return whole._replace(
        name=f"{whole.name}, step",
        shape=whole.shape.replace(" T 1", ""),
        operands=(x[:, 0], dt[:, 0], rates, b[:, 0], c[:, 0], state),
        axes=(*whole.axes, 0),
        call=lambda *operands: selective_scan_step(*operands)[0],
        reference=lambda x, dt, a, b, c, state: selective_scan_reference(
            x[:, None], dt[:, None], a, b[:, None], c[:, None], state
        )[0][:, 0],
        backward=False,
        state_bytes=_bytes(state),
    )


def _causal_conv(settings: Settings, make: RandomOperands, shape: Shape) -> Case:
    (batch, time, width), mamba2 = shape, cast(Mamba2Settings, settings.backbone_of_kind("mamba2"))
    channels = mamba2.expand * width + 2 * mamba2.state_size
    weight, bias = make.normal(channels, mamba2.conv_kernel).float(), make.normal(channels).float()
    return Case(
        "causal convolution of Mamba-2",
        f"B {batch} T {time} C {channels} W {mamba2.conv_kernel}",
        (make.normal(batch, time, channels), weight, bias),
        (0, None, None),
        lambda *operands: causal_conv(*operands)[0],
        lambda *operands: causal_conv_reference(*operands)[0],
    )


def _causal_conv_step(settings: Settings, make: RandomOperands, shape: Shape) -> Case:
    whole = _causal_conv(settings, make, shape)
    x, weight, bias = whole.operands
    state = make.normal(len(x), len(weight), weight.shape[1] - 1).float()
    return whole._replace(
        name=f"{whole.name}, step",
        shape=whole.shape.replace(" T 1", ""),
        operands=(x[:, 0], weight, bias, state),
        axes=(*whole.axes, 0),
        call=lambda *operands: causal_conv_step(*operands)[0],
        reference=lambda x, *rest: causal_conv_reference(x[:, None], *rest)[0][:, 0],
        backward=False,
        state_bytes=_bytes(state),
    )


def _state_space(settings: Settings, make: RandomOperands, shape: Shape) -> Case:
    """Return the case of S4's kernel from its parameters and the convolution with it."""
    (batch, time, width), numbers = shape, cast(S4Settings, settings.backbone_of_kind("s4")).state_size
    poles, p, _ = (each.to(make.device)[None] for each in hippo_legs(numbers))
    system = s4.System(make.log_uniform((1e-3, 1e-1), width), poles, p, math.sqrt(2) * p)
    c = torch.randn(width, numbers // 2, dtype=torch.complex128, device=make.device)
    # What is stored is not C but C (I - Abar^T).
    c_tilde = _complex((s4.truncation(s4.discretize(system), time) @ s4.output_numbers(c)[..., None])[..., 0])
    parameters = (system.dt, *(part.to(torch.complex64) for part in (*system[1:], c_tilde)))

    def call(u: Tensor, *rest: Tensor) -> Tensor:
        *system, c_tilde = rest
        return s4.convolve(u, s4.kernel(s4.System(*system), c_tilde, time))

    def reference(u: Tensor, *rest: Tensor) -> Tensor:
        system, c_tilde = s4.System(*rest[:-1]), rest[-1]
        whole = torch.linalg.solve(s4.truncation(s4.discretize(system), time), s4.output_numbers(c_tilde)[..., None])
        kernel = s4.reference(system, _complex(whole[..., 0]), time)
        return F.conv1d(F.pad(u.mT, (time - 1, 0)), kernel.flip(1)[:, None], groups=len(kernel)).mT

    return Case(
        "state-space convolution of S4",
        f"B {batch} T {time} H {width} N {numbers}",
        (make.normal(batch, time, width).float(), *parameters),
        (2, 0, None, None, None, 0),
        call,
        reference,
        loose=10,  # Abar^T of the slowest channels is close to I
    )


def _diagonal_scan(settings: Settings, make: RandomOperands, shape: Shape) -> Case:
    (batch, time, _), numbers = shape, cast(S5Settings, settings.backbone_of_kind("s5")).state_size
    decay, phase = make.log_uniform((1e-3, 1e-1), numbers // 2), make.log_uniform((1e-2, 1.0), numbers // 2)
    return Case(
        "diagonal scan of S5",
        f"B {batch} T {time} M {numbers // 2}",
        (make.normal(batch, time, numbers // 2, 2).float(), torch.view_as_real(torch.polar((-decay).exp(), phase))),
        (0, None),
        lambda b, a: diagonal_scan(a, b)[0],
        lambda b, a: diagonal_scan_reference(a, b)[0],
    )


def _complex(numbers: Tensor) -> Tensor:
    """Undoes `output_numbers`: (..., N) -> (..., N / 2)."""
    return torch.view_as_complex(numbers.unflatten(-1, (-1, 2)) / numbers.new_tensor([2, -2]))


def _attention(settings: Settings, make: RandomOperands, shape: Shape) -> Case:
    (batch, time, width), heads = shape, cast(TransformerSettings, settings.backbone_of_kind("transformer")).heads
    k = max(width // heads, 1)
    return Case(
        "attention",
        f"B {batch} H {heads} T {time} K {k}",
        tuple(make.normal(batch, heads, time, k) for _ in range(3)),
        (0, 0, 0),
        attention,
        attention_reference,
    )


def _nearest(settings: Settings, make: RandomOperands, tokens: int) -> Case:
    """Return the case of the nearest code for a training batch of the tokenizer, whatever its quantizer."""
    tokenizer = cast(TokenizerSettings, settings.tokenizer)
    vectors, codes, channels = tokenizer.batch * tokens, tokenizer.codes, tokenizer.width

    def distances(code: Tensor, h: Tensor, codebook: Tensor) -> Tensor:
        return (h.double() - codebook.double()[code]).square().sum(1)  # equally near codes are equally right

    return Case(
        "nearest code",
        f"M {vectors} N {codes} C {channels}",
        (make.normal(vectors, channels).float(), make.normal(codes, channels).float()),
        (0, None),
        nearest,
        nearest_reference,
        compared=distances,
        rows=64,
        backward=False,
    )


def _lambda_returns(settings: Settings, make: RandomOperands) -> Case:
    controller = cast(Any, settings.controller)
    batch, steps = controller.batch, controller.imagination_horizon + 1
    reward, value = (make.normal(batch, steps).float() for _ in range(2))
    terminated = torch.rand(batch, steps, device=make.device) < 0.05
    discount, trace_decay = controller.discount, controller.trace_decay
    return Case(
        "lambda-returns",
        f"B {batch} n {steps}",
        (reward, value, terminated),
        (0, 0, 0),
        lambda reward, value, ended: lambda_returns(reward, value, ended, discount, trace_decay),
        lambda reward, value, ended: lambda_returns_reference(reward, value, ended, discount, trace_decay),
    )
