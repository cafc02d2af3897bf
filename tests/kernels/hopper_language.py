"""What the sm_90 kernels' source sees in place of Gluon, without a GPU (`hopper_protocol`)."""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any

from hopper_protocol import (
    OWN,
    Barrier,
    Fault,
    Pointer,
    Read,
    Role,
    Run,
    Tile,
    Value,
    View,
    allocate,
    now,
    overwritten,
    step,
    together,
)  # fmt: skip

import stable_attention.hopper
from stable_attention import numerics
from stable_attention.hopper import bundles

FOLDER = Path(stable_attention.hopper.__file__).parent


class Layout:
    """Whatever says how numbers lie."""

    def __call__(self, *_: Any, **__: Any) -> Layout:
        return self

    def __getattr__(self, _: str) -> Layout:
        return self


def _max(x: Value, axis: int) -> Any:
    if x.shape == (1,):
        x.used()
        # Of numbers that tiles hold nothing is known.
        return now.role.run_of.rng.choice([0.0, 1e38]) if x.number is None else x.number
    y = together(x, flat=True)
    return y.like(y.shape[:axis] + y.shape[axis + 1 :])


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, Value):
        return together(condition, a, b)
    return a if condition else b


def _extreme(of: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: together(a, b) if Value in (type(a), type(b)) else of(a, b)


def _join(a: Value, b: Value) -> Value:
    made = together(a, b).like((*a.shape, 2))
    if Counter(a.terms) == Counter(b.terms):
        made.terms = a.terms
    return made


def _load(place: Any, mask: Any = None, other: Any = None) -> Any:
    if isinstance(place, Pointer) and place.data is not None:
        return place.data[place.at]
    number = place.number if isinstance(place, Value) else (place.name, place.at)
    if number[0] == OWN:
        role, x = now.role.run_of.own.get(number, (None, None))
        if role is not now.role:
            raise Fault(f"{now.role.title} reads of {number} what it has not left there")
        found = x.like(place.shape)
        found.unscaled = True
        return found
    return Value(getattr(place, "shape", ()), frozenset({number}))


def _store(place: Value, x: Value, mask: Any = None) -> None:
    x.used()
    role = step()
    if place.number[0] == OWN:
        before, _ = role.run_of.own.setdefault(place.number, (role, x))
        if before is not role:
            raise Fault(f"{role.title} writes {place.number}, which is another's")
        role.run_of.own[place.number] = role, x
        return
    role.run_of.written.setdefault(place.number, []).append(x)


def _assembler(asm: str, constraints: str, args: list[Value], dtype: Any, **_: Any) -> Value:
    made = together(*args)
    made.dtype = dtype
    return made


def _atomic_max(place: Any, x: Any, sem: str) -> None:
    if isinstance(x, Value):
        x.used()
        step().run_of.followed.setdefault(place.number, []).append(x)


def _full(shape: Any, x: Any, dtype: Any, layout: Any = None) -> Value:
    return Value(shape, number=x if isinstance(x, int) else None)


def _expand(x: Value, axis: int) -> Value:
    return x.like((*x.shape[:axis], 1, *x.shape[axis:]))


def _specialize(roles: list[Any], workers: Any, registers: Any) -> None:
    setup = now.role
    for i, (function, arguments) in enumerate(roles):
        title = f"{function.__name__.strip('_')} {i} of program {setup.program.number}"
        body = lambda f=function, a=arguments: f(*a)  # noqa: E731
        setup.program.roles.append(Role(setup.run_of, setup.program, title, body))


def _to(x: Any, dtype: Any, bitcast: bool = False) -> Any:
    return together(x) if isinstance(x, Value) else x


def _jit(function: Any = None, **_: Any) -> Any:
    return function or (lambda f: f)


class Language:
    """What kernels use of `gluon.language`; the rest are layouts and types."""

    constexpr = staticmethod(lambda x: x)
    static_range = range
    exp2 = log2 = staticmethod(lambda x: together(x, flat=True))
    max = sum = staticmethod(_max)
    where, join, load, store = map(staticmethod, (_where, _join, _load, _store))
    maximum, minimum = staticmethod(_extreme(builtins.max)), staticmethod(_extreme(min))
    full, expand_dims = staticmethod(_full), staticmethod(_expand)
    zeros = staticmethod(lambda shape, dtype, layout: Value(shape))
    arange = staticmethod(lambda a, b, layout: Value((b - a,)))
    reshape = staticmethod(lambda x, shape: x.like(shape))
    permute = staticmethod(lambda x, order: x.like([x.shape[i] for i in order]))
    split = staticmethod(lambda x: (x.like(x.shape[:-1]), x.like(x.shape[:-1])))
    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x)
    inline_asm_elementwise = staticmethod(_assembler)
    atomic_max = staticmethod(_atomic_max)
    program_id = staticmethod(lambda _: now.role.program.number)
    num_programs = staticmethod(lambda _: now.role.program.of)
    allocate_shared_memory = staticmethod(allocate)
    warp_specialize = staticmethod(_specialize)
    float32, bfloat16, float16, int32, int64 = ["float32", "bfloat16", "float16", "int32", "int64"]

    def __getattr__(self, name: str) -> Layout:
        return Layout()


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.left = count


def _wait(barrier: Barrier, parity: int, pred: Any = True) -> None:
    if pred:
        step(lambda: barrier.parity != parity, f"{barrier.name}, round {parity}")


def _expect(barrier: Barrier, size: int) -> None:
    step()
    barrier.bytes += size
    barrier.arrive()


def _arrive(barrier: Barrier, count: int) -> None:
    step()
    barrier.arrive()


def _place(desc: Any, where: list[int]) -> tuple[int, int]:
    """(row, column) of coordinates as `tiles._place_in` gives them."""
    if len(where) == 4:
        return where[1] + where[2] - where[0], where[3]
    row, column = where
    return row, column


def _copy_in(desc: Any, where: list[int], barrier: Barrier, view: View) -> None:
    role = step()
    for cell in view.cells:
        overwritten(cell, role, cell.reads)
        cell.flying, cell.reads, cell.unfenced = True, [], set()

    def end() -> None:
        row, column = _place(desc, where)
        for i, cell in enumerate(view.cells):
            cell.flying = False
            cell.content = Value((), frozenset({Tile(desc.name, row + 64 * i, column)}))
        barrier.bytes -= desc.block_type.nbytes
        if barrier.bytes < 0:
            raise Fault(f"more bytes than {barrier.name} expects")
        barrier.settle()

    role.run_of.copy(end)


def _copy_out(desc: Any, where: list[int], view: View, add: bool = False) -> None:
    role = step()
    role.stores.append(Read("store", view.cells))
    if role.stores[-1].spoiled:
        raise Fault(role.stores[-1].spoiled)
    key = Tile(desc.name, *_place(desc, where))
    run = role.run_of
    done = run.written.setdefault(key, [])
    if bool(done) != add or run.adding.get(key, role) is not role:
        raise Fault(f"{role.title} {'adds to' if add else 'stores'} {key} after {len(done)} others")
    run.adding[key] = role
    done.append(view.content())


def _store_wait(pending: int) -> None:
    role = step()
    for read in role.stores:
        read.open = False
    role.stores.clear()


def _fence() -> None:
    role = now.role
    for cell in role.unfenced:
        cell.unfenced.discard(role)
    role.unfenced.clear()


def _product(
    a: Any, b: View, acc: Value, *, use_acc: Any = True, is_async: bool = False
) -> Value:  # fmt: skip
    role = step()
    read = Read("product", b.cells + (a.cells if isinstance(a, View) else []))
    role.products.append(read)
    before = acc.kept() if use_acc else ()
    if isinstance(a, Value):
        a.loaded()
        before += a.kept()
    left = a if isinstance(a, Value) else a.content()
    of, terms = (acc.of, acc.terms) if use_acc else (frozenset(), ())
    term = left.whole() | b.content().whole()
    made = Value(acc.shape, of, (*terms, term), reads=(read, *before))
    return made if is_async else _product_wait(0, (made,))


def _product_wait(pending: int, deps: tuple[Value, ...]) -> Any:
    role = step()
    over = len(role.products) - pending
    for read in role.products[: max(over, 0)]:
        read.open = False
    del role.products[: max(over, 0)]
    return deps[0] if len(deps) == 1 else deps


def _arrive_at(barrier: int, threads: str, own: int) -> Space:
    """At a named barrier, which no role may count twice in a round."""
    role = step()
    new = Space(arrived=0, by=[], threads=threads, rounds=0)
    found = role.program.named.setdefault(barrier, new)
    found.by.append(role)
    found.arrived += own
    if not 5 <= barrier < 16 or found.threads != threads or found.by.count(role) > 1:
        raise Fault(f"{role.title} is one too many at named barrier {barrier}")
    if found.arrived == int(threads):
        found.arrived, found.by, found.rounds = 0, [], found.rounds + 1
    return found


def _sync_named(barrier: int, threads: str, warps: int) -> None:
    found = _arrive_at(barrier, threads, 32 * warps)
    if now.role in found.by:
        rounds = found.rounds
        step(lambda: found.rounds != rounds, f"named barrier {barrier}")


def _arrive_if(barrier: int, go: Any, threads: str, stored: bool) -> None:
    if stored:
        _store_wait(0)
    if go:
        _arrive_at(barrier, threads, 128)


def _next_item(counter: Pointer, last: int) -> int:
    step()
    found = counter.data[0]
    counter.data[0] = 0 if last >= 0 and found >= last else found + 1
    return found


def _pass_turn(turn: Pointer) -> None:
    role = step()
    _store_wait(0)
    adding = role.run_of.adding
    for key in [k for k, r in adding.items() if r is role]:
        del adding[key]
    turn.data[turn.at] += 1


BARRIERS = {
    "sync_named": _sync_named,
    "arrive_named": lambda barrier, threads: _arrive_at(barrier, threads, 128) and None,
    "arrive_if": _arrive_if,
    "next_item": _next_item,
    "wait_for_turn": lambda p, turn: step(lambda: p.data[p.at] >= turn, f"turn {turn}") and None,
    "pass_turn": _pass_turn,
    "warp_sync": lambda x: None,
    "tma_add": lambda desc, where, view: _copy_out(desc, where, view, True),
}
HOPPER = Space(
    fence_async_shared=_fence,
    warpgroup_mma=_product,
    warpgroup_mma_wait=_product_wait,
    mbarrier=Space(
        init=_init, wait=_wait, expect=_expect, arrive=_arrive, MBarrierLayout=Layout()
    ),
    tma=Space(
        async_copy_global_to_shared=_copy_in, async_copy_shared_to_global=_copy_out,
        store_wait=_store_wait,
    ),
)  # fmt: skip
GLUON = Space(jit=_jit, constexpr_function=lambda f: f, language=Language())


class Casts(ast.NodeTransformer):
    """x.to(type) as a call: integers have no such method."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            node.args.insert(0, node.func.value)
            node.func = ast.copy_location(ast.Name("_to", ast.Load()), node.func)
        return node


def edited(text: str, old: str, new: str) -> str:
    """Lines are parted by " / " and given without their indentation; in new, "..." is old."""
    (found,) = re.finditer(r"\n *".join(map(re.escape, old.split(" / "))), text)
    first = text.rindex("\n", 0, found.start()) + 1
    lines = new.replace("...", found.group()).split(" / ")
    indented = f"\n{' ' * (found.start() - first)}".join(lines)
    return text[: found.start()] + indented + text[found.end() :]


class Sources:
    """The package's modules, executed on what is above; edits: module -> arguments of
    `edited`."""

    def __init__(self, edits: dict[str, list[tuple[str, str]]] | None = None) -> None:
        self.edits, self.loaded = edits or {}, {}

    def module(self, name: str) -> Space:
        if name not in self.loaded:
            text = (FOLDER / f"{name}.py").read_text()
            for edit in self.edits.get(name, ()):
                text = edited(text, *edit)
            hidden = {**vars(builtins), "__import__": self._import, "_to": _to}
            space: dict[str, Any] = {"__builtins__": hidden, "__name__": name}
            tree = ast.fix_missing_locations(Casts().visit(ast.parse(text)))
            exec(compile(tree, f"{name}.py", "exec"), space)
            self.loaded[name] = Space(**(space | (BARRIERS if name == "barriers" else {})))
        return self.loaded[name]

    def _import(
        self, name: str, space: Any, local: Any, wanted: tuple[str, ...], level: int
    ) -> Any:
        if name == "stable_attention.hopper":
            return Space(bundles=bundles)
        if name == "stable_attention.numerics":
            return Space(**{x: getattr(numerics, x).value for x in wanted})
        if name.startswith("stable_attention.hopper."):
            return self.module(name.rpartition(".")[2])
        known = {
            "triton.experimental": Space(gluon=GLUON),
            "triton.experimental.gluon": GLUON,
            "triton.experimental.gluon.language": Space(_core=Space(builtin=_jit)),
            "triton.experimental.gluon.language.nvidia.ampere": Space(
                mma_v2=lambda a, b, acc: together(acc, together(a, flat=True)).like(acc.shape)
            ),
            "triton.experimental.gluon.language.nvidia.hopper": HOPPER,
            "triton._C.libtriton": Space(ir=None),
        }
        return known[name] if name in known else __import__(name, space, local, wanted, level)


def simulate(
    sources: Sources, module: str, kernel: str, arguments: dict[str, Any], *, programs: int,
    seed: int,
) -> Run:  # fmt: skip
    """One run of a kernel, in an order that the seed draws."""
    run = Run(seed)
    roles: list[Role] = []
    for number in range(programs):
        program = Space(number=number, of=programs, barriers=[], buffers=[], named={}, roles=[])
        now.role = Role(run, program, "setup", lambda: None)
        getattr(sources.module(module), kernel)(**arguments)
        roles += program.roles
    run.start(roles)
    return run
