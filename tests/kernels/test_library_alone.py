"""The library without the rest: as a kernel repository of Hugging Face, and as a wheel."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import stable_attention

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "kernels"


def load(name: str, path: Path):
    """A module of a file, as Hugging Face's ``kernels`` imports a package."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


hub = load("hub", LIBRARY / "hub.py")


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return hub.write(tmp_path_factory.mktemp("repository"))


def tensors():
    generator = torch.Generator().manual_seed(0)
    shape = {"q": (1, 24, 2, 16), "k": (1, 24, 1, 16), "v": (1, 24, 1, 16)}
    return [
        torch.randn(size, generator=generator).bfloat16().requires_grad_()
        for size in shape.values()
    ]


def results(library) -> list[torch.Tensor]:
    given = tensors()
    out = library.flash_attn_func(*given, causal=True, window_size=(9, 0))
    return [out, *torch.autograd.grad(out.float().square().sum(), given)]


@pytest.mark.parametrize(
    ("line", "depth", "made"),
    [
        ("from stable_attention.api import attend", 0, "from .api import attend"),
        ("from stable_attention import ops", 0, "from . import ops"),
        ("    from stable_attention.triton.merge import x", 0, "    from .triton.merge import x"),
        ("from stable_attention.api import attend", 1, "from ..api import attend"),
        ("from stable_attention import ops", 2, "from ... import ops"),
        ("from stable_attention_of_others import ops", 0, None),
        ('name = "stable_attention"', 1, None),
    ],
)
def test_imports_become_relative(line: str, depth: int, made: str | None) -> None:
    assert hub.relative(line, depth) == (made or line)


def test_a_copy_imports_nothing_by_the_name_of_the_package(build: Path) -> None:
    """It would take whatever version is installed, or fail where none is."""
    for path in build.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert not [x for x in names if x.split(".")[0] == "stable_attention"], path
    assert {path.name for path in build.glob("*")} >= {"py.typed", "configs.json", "triton"}
    with pytest.raises(FileExistsError):
        hub.write(build.parents[1])


def test_a_build_that_is_there_is_refused_in_one_line(
    build: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["hub.py", str(build.parents[1])])
    with pytest.raises(SystemExit) as end:
        hub.main()
    assert end.value.code == 2 and "has no build" in capsys.readouterr().err


def test_two_copies_live_in_one_process(build: Path) -> None:
    name = json.loads((build / "metadata.json").read_text())["id"]
    copy = load(name, build / "__init__.py")
    assert all(
        torch.equal(a, b) for a, b in zip(results(copy), results(stable_attention), strict=True)
    )
    assert copy.flash_attn_func is not stable_attention.flash_attn_func
    assert hasattr(getattr(torch.ops, name), "forward")
    for module in ("hf", "aot", "chunks", "probes", "reference.blockwise"):
        importlib.import_module(f"{name}.{module}")


def test_the_kernels_library_loads_it(build: Path) -> None:
    loader = pytest.importorskip("kernels.load", reason="Hugging Face's kernels is not installed")
    kernel = loader.get_local_kernel(build.parents[1] if torch.version.cuda else build)
    assert kernel.__version__ == stable_attention.__version__
    assert all(
        torch.equal(a, b) for a, b in zip(results(kernel), results(stable_attention), strict=True)
    )


def test_one_version_and_the_ranges_of_the_root() -> None:
    own, root = (tomllib.loads((x / "pyproject.toml").read_text()) for x in (LIBRARY, ROOT))
    attribute = own["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "stable_attention.__version__" and "version" not in own["project"]
    assert hub.version(hub.sources()) == stable_attention.__version__ == root["project"]["version"]
    assert own["project"]["dependencies"] == [
        x for x in root["project"]["dependencies"] if x.startswith(("torch", "triton"))
    ]
    extras = "optional-dependencies"
    assert own["project"][extras]["hf"] == root["project"][extras]["hf"]
    files = [x["tool"]["setuptools"]["package-data"]["stable_attention"] for x in (own, root)]
    assert files[0] == files[1]


CALLS = """
import importlib.util, sys
import torch, stable_attention
from stable_attention import flash_compat
assert sys.prefix in stable_attention.__file__, stable_attention.__file__
for absent in ("megatron_patch", "megatron", "transformers"):
    assert importlib.util.find_spec(absent) is None, absent
q, k, v = (torch.randn(1, 40, h, 16).bfloat16().requires_grad_() for h in (2, 1, 1))
lengths = torch.tensor([0, 13, 40], dtype=torch.int32)
def true(q, k, v):
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
def check(out, wanted):
    ours, yours = (torch.autograd.grad(x.float().sum(), (q, k, v)) for x in (out, wanted))
    for a, b in ((out, wanted), *zip(ours, yours)):
        assert (a.float() - b.float()).norm() < 0.01 * b.float().norm()
check(flash_compat.flash_attn_func(q, k, v, causal=True), true(q, k, v))
kv = torch.stack((k, v), 2)
check(flash_compat.flash_attn_kvpacked_func(q, kv, causal=True), true(q, k, v))
parts = [true(*(x[:, a:b] for x in (q, k, v))) for a, b in ((0, 13), (13, 40))]
out = flash_compat.flash_attn_varlen_func(
    q[0], k[0], v[0], lengths, lengths, 27, 27, causal=True
)
check(out, torch.cat(parts, 1)[0])
print("served", stable_attention.__version__)
"""


def closure(*names: str) -> set[str]:
    """These distributions and all that they require here."""
    found: set[str] = set()
    wanted = list(names)
    while wanted:
        name = wanted.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform
            continue
        found.add(name)
        for requirement in map(Requirement, required):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    return found


@pytest.mark.slow
def test_the_wheel_alone_in_a_fresh_environment(tmp_path: Path) -> None:
    """Beside it: torch, triton and what they require, linked; numpy for Triton's interpreter."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    copy = tmp_path / "source"
    subprocess.run(["cp", "-rL", LIBRARY, copy], check=True)
    subprocess.run([*command, "-w", tmp_path, copy], check=True)
    (wheel,) = tmp_path.glob("stable_attention-*.whl")
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel],
        check=True,
    )
    for name in closure("torch", "triton", "numpy"):
        found = metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(found.locate_file(top)))
    done = subprocess.run(
        [home / "bin" / "python", "-c", CALLS],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["served", stable_attention.__version__]
    installed = metadata.Distribution.at(next(site.glob("stable_attention-*.dist-info")))
    assert (site / "stable_attention" / "py.typed").is_file()
    assert (site / "stable_attention" / "configs.json").is_file()
    needed = {Requirement(x).name for x in installed.requires or [] if "extra" not in x}
    assert needed == {"torch", "triton"}
    assert not list(site.glob("megatron*")) and not (site / "hub.py").exists()
