"""``megatron-patch doctor``: what is installed, whether it is the right version, whether it works.

Every check is a function that returns findings; one that is ``BROKEN`` makes the exit code 1.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import sys
import textwrap
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TextIO

from megatron_patch.runtime import environment

CORE_FLOOR, CVES = "0.17.1", "CVE-2026-65180, CVE-2026-65110"
"""The first Megatron-Core with which loading a checkpoint cannot execute code."""
TESTED = {
    "torch": ("2.11", "2.13", "2.15"),
    "triton": ("3.6", "3.7", "3.9"),
    "megatron-core": ("0.19",),
    "transformer-engine": ("2.20",),
}
"""Minor versions that tests have run with. What installs at all is the range of pyproject.toml, of
which ``make install`` takes the exact versions of constraints.txt."""


class State(StrEnum):
    """What a finding means for the exit code."""

    OK = "ok"
    NOTE = "note"
    BROKEN = "BROKEN"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    state: State
    name: str
    text: str


ok, note, broken = (functools.partial(Finding, state) for state in State)


def judged(right: bool, name: str, text: str) -> Finding:
    """``ok`` where a trial came out right, else ``BROKEN``."""
    return Finding(State.OK if right else State.BROKEN, name, text)


def run(out: TextIO | None = None) -> int:
    """Print the report to ``out`` (default: stdout); 0 when everything required works, else 1."""
    out = out or sys.stdout
    count = 0
    for title, check in CHECKS:
        print(f"{title}", file=out)
        for finding in _guarded(title, check):
            count += finding.state is State.BROKEN
            print(f"  {finding.state:<6}  {finding.name:<20} {finding.text}", file=out, flush=True)
    verdict = f"{count} required things are broken" if count else "everything required works"
    print(verdict, file=out)
    return 1 if count else 0


def _guarded(title: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """``check``, whose own failure is a finding: a broken install raises anything."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield from check()
    except Exception as error:
        yield broken(title, _reason(error))


def _reason(error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}".rstrip(": ")


def requirements() -> dict[str, str]:
    """``{distribution: specifier}`` this project requires, from its metadata or pyproject.toml."""
    try:
        wanted = metadata.requires("megatron-patch-stable") or []
    except metadata.PackageNotFoundError:
        text = (environment.ROOT / "pyproject.toml").read_text(encoding="utf-8")
        wanted = tomllib.loads(text)["project"]["dependencies"]
    from packaging.requirements import Requirement

    parsed = map(Requirement, wanted)
    return {item.name: str(item.specifier) for item in parsed if item.marker is None}


def pins() -> Iterator[Finding]:
    """What is required: its version in the range this project declares, and it imports."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    for name, wanted in requirements().items():
        found = environment.version(name)
        if found is None:
            yield broken(name, f"not installed; {name}{wanted} is required")
        elif name == "megatron-core" and Version(found) < Version(CORE_FLOOR):
            risk = f"loading a checkpoint can execute code below {CORE_FLOOR} ({CVES})"
            yield broken(name, f"{found}: {risk}; install {name}{wanted}")
        # NGC builds call themselves 2.11.0a0 of the release they become.
        elif not SpecifierSet(wanted).contains(Version(found).base_version):
            yield broken(name, f"{found} is outside {wanted}")
        else:
            yield _tried(_imports(name, f"{found} ({wanted})"))


def _tried(finding: Finding) -> Finding:
    """``finding``; a note where it works, but no test has run with a version of this kind."""
    from packaging.version import Version

    tested, found = TESTED.get(finding.name), environment.version(finding.name)
    if finding.state is State.BROKEN or tested is None or found is None:
        return finding
    if "{}.{}".format(*Version(found).release) in tested:
        return finding
    return note(finding.name, f"{finding.text}; not tested, which {' and '.join(tested)} are")


IMPORT_NAMES = {"pyyaml": "yaml", "megatron-core": "megatron.core"}


def _imports(distribution: str, text: str) -> Finding:
    """Installed is not working: a library it needs may be missing."""
    try:
        importlib.import_module(IMPORT_NAMES.get(distribution, distribution))
    except Exception as error:
        return broken(distribution, f"{text} fails to import: {_reason(error)}")
    return ok(distribution, text)


def program() -> Iterator[Finding]:
    """Python, this package, and packages that could be taken for it."""
    yield ok("python", sys.version.split()[0])
    version = environment.megatron_patch.__version__
    yield ok("megatron_patch", f"{version}, commit {environment.commit()}")
    for path in environment.other_copies():
        text = f"another package of this name is on sys.path: {path}; take it out of PYTHONPATH"
        yield note("megatron_patch", text)


def device() -> Iterator[Finding]:
    """The GPU, or what the CPU can do without one."""
    import torch
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        yield broken("gloo", "torch is built without gloo; the trainer needs it")
    facts = environment.devices()
    if torch.cuda.is_available() and (conflict := environment.cudnn_conflict()):
        yield broken("cudnn", conflict)
        return
    yield from _shared_memory()
    if not torch.cuda.is_available():
        yield _no_gpu()
        right = torch.equal(torch.eye(8) @ torch.eye(8), torch.eye(8))
        yield judged(right, "cpu", "matrix product")
        return
    count = facts["gpu_count"]
    yield ok("gpu", f"{facts['gpu']} x {count}, CUDA {facts['cuda']}")
    for name in ("driver", "cudnn", "nccl"):
        yield ok(name, str(facts[name]))
    for index in range(count):
        yield _matrix_product(index)


def _no_gpu() -> Finding:
    """No GPU is fine; a GPU that torch cannot use is not."""
    import torch

    only = "only training.device: cpu works here"
    driver = environment.driver()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if driver is None or hidden:
        reason = "hidden by CUDA_VISIBLE_DEVICES" if driver else "no CUDA device"
        return note("gpu", f"{reason}: {only}")
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    text = f"driver {driver} is here, but torch {torch.__version__}, built {built}, finds no device"
    return broken("gpu", f"{text}: install a torch built for this driver, or a newer driver")


def _shared_memory() -> Iterator[Finding]:
    """NCCL and gloo talk through /dev/shm; containers get 64 MiB of it unless told otherwise."""
    folder = Path("/dev/shm")
    if folder.is_dir() and (size := shutil.disk_usage(folder).total) < 1 << 30:
        text = f"/dev/shm has {size >> 20} MiB; give a container --shm-size=1g or --ipc=host"
        yield note("shared memory", text)


def _matrix_product(index: int) -> Finding:
    """A BF16 matrix product of GPU ``index`` against float64 on the CPU."""
    import torch

    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=generator).bfloat16() for _ in range(2))
    exact = left.double() @ right.double()
    found = (left.to(f"cuda:{index}") @ right.to(f"cuda:{index}")).cpu().double()
    # A library may split the sum and round partial sums of up to the largest result to BF16.
    error = ((found - exact).abs().max() / exact.abs().max()).item()
    text = f"BF16 matrix product, error {error:.1e} of the largest"
    return judged(error < 2**-7, f"cuda:{index}", text)


def companions() -> Iterator[Finding]:
    """Megatron-Core's optional companions."""
    yield _tried(_transformer_engine())
    yield _apex()


def _transformer_engine() -> Finding:
    name = "transformer-engine"
    found = environment.version(name)
    if found is None:
        return note(name, "not installed; needed by layer_spec: te and backend: te")
    try:
        import torch

        te = importlib.import_module("transformer_engine.pytorch")
        if not torch.cuda.is_available():
            return note(name, f"{found} imports; it computes on GPUs only")
        layer = te.Linear(64, 64, params_dtype=torch.bfloat16).cuda()
        value = layer(torch.ones(8, 64, device="cuda", dtype=torch.bfloat16))
        value.sum().backward()
        right = bool(value.isfinite().all())
        return judged(right, name, f"{found}: linear layer forward and backward")
    except Exception as error:
        return broken(name, f"{found} is installed but fails: {_reason(error)}")


def _apex() -> Finding:
    if environment.version("apex") is None:
        return note("apex", "not installed; optimizer.implementation: apex needs it")
    if importlib.util.find_spec("amp_C") is None:
        return note("apex", "without its CUDA extensions (amp_C); its fused AdamW is not usable")
    try:
        import torch

        fused = importlib.import_module("apex.optimizers").FusedAdam
        if not torch.cuda.is_available():
            return note("apex", "imports; it computes on GPUs only")
        weight = torch.ones(64, device="cuda", requires_grad=True)
        weight.grad = torch.ones_like(weight)
        fused([weight], lr=0.1).step()
        return judged(bool((weight < 1).all()), "apex", "fused AdamW step")
    except Exception as error:
        return broken("apex", f"is installed but fails: {_reason(error)}")


def kernel() -> Iterator[Finding]:
    """The attention kernel of ``stable_flash``, forward and backward, against float64."""
    import torch

    function = importlib.import_module("stable_attention").stable_attention
    if not torch.cuda.is_available():
        yield note("stable_attention", "imports; its kernels need a GPU")
        return
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 4, 256, 64, generator=generator).bfloat16() for _ in range(3)]
    ours = [x.cuda().requires_grad_() for x in drawn]
    exact = [x.double().requires_grad_() for x in drawn]
    out = function(*ours, layout="bhsd", causal=True)
    q, k, v = exact
    true = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    found = [out, *torch.autograd.grad(out.sum(), ours)]
    wanted = [true, *torch.autograd.grad(true.sum(), exact)]
    for name, x, y in zip(("forward", "dq", "dk", "dv"), found, wanted, strict=True):
        error = (x.detach().cpu().double() - y.detach()).abs().max().item()
        scale = y.detach().abs().max().item()
        # BF16 results of values up to `scale`: a few roundings of 2**-9 each.
        text = f"{name}: largest error {error:.1e} of {scale:.1e}"
        yield judged(error <= scale * 2**-6, "stable_attention", text)


def backends() -> Iterator[Finding]:
    """The attention backends: what each can do, and what it lacks on this machine."""
    registry = importlib.import_module("megatron_patch.attention.registry")
    table = textwrap.indent(registry.table(), "    ")
    yield Finding(State.OK, "attention.backend", f"serves, by its value:\n{table}")


def core_patches() -> Iterator[Finding]:
    """What this project changes in Megatron-Core, and whether the installed one has the place."""
    register = importlib.import_module("megatron_patch.core_patches.register")
    core = environment.core_version()
    for patch in register.PATCHES:
        known = f"; {patch.upstream_issue}" if patch.upstream_issue else ""
        found = ok(patch.name, f"{patch.why} ({patch.target} {patch.versions}{known})")
        try:
            patch.selftest()
        except (ImportError, AttributeError) as error:
            found = broken(patch.name, f"does not find its place: {_reason(error)}; {found.text}")
        if not patch.fits(core):
            text = f"not known to be right for megatron-core {core}; {found.text}"
            found = note(patch.name, text)
        yield found


CHECKS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("program", program),
    ("pins", pins),
    ("device", device),
    ("companions", companions),
    ("kernel", kernel),
    ("backends", backends),
    ("changes of megatron-core", core_patches),
)
