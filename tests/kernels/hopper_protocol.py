"""Roles of the sm_90 kernels, their barriers and shared memory, in orders that a seed draws.

compute-sanitizer does not understand mbarriers. Here every role of a kernel is a thread, of which
one runs at a time: which one, and when a copy by TMA ends, is drawn at every operation. Tensors
have no numbers but provenance: which tiles they were made of, and, of a sum, which products were
added. A product or a store by TMA reads from its start to the wait that ends it, a load to
registers until a product or a store has used what it gave: nothing else is ordered before an
arrival. `hopper_language` is what the kernels' source sees of this.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, namedtuple
from collections.abc import Callable
from types import SimpleNamespace as Space
from typing import Any

Tile = namedtuple("Tile", "tensor row column")


class Fault(Exception):
    """What the kernel must not do."""


class Stopped(Exception):
    """A fault elsewhere."""


class Role(threading.Thread):
    """Of one program; also who sets up its shared memory."""

    def __init__(self, run: Run, program: Space, name: str, body: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.run_of, self.program, self.title, self.body = run, program, name, body
        self.baton = threading.Semaphore(0)
        self.rank = run.rng.random()
        self.ready: Callable[[], bool] | None = None
        self.waits_for = ""
        self.over = False
        self.products: list[Read] = []
        self.stores: list[Read] = []
        self.unfenced: list[Space] = []

    def run(self) -> None:
        self.baton.acquire()
        try:
            if self.run_of.fault is None:
                now.role = self
                self.body()
                last = all(r.over or r is self for r in self.program.roles)
                flying = last and any(x.program is self.program for x in self.run_of.copies)
                if flying or any(x.open for x in self.products + self.stores):
                    raise Fault(f"{self.title} ends before what was started")
        except Stopped:
            pass
        except BaseException as error:
            self.run_of.fault = self.run_of.fault or error
        self.over = True
        self.run_of.pass_on(self)


now = threading.local()


class Run:
    """Roles of all programs, copies in flight, and what has been written."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.change = self.rng.choice([0.0, 0.01, 0.1, 0.5])
        self.late = self.rng.choice([-1.0, -0.5, 0.0, 1.0])  # copies: last, or first of all
        self.roles: list[Role] = []
        self.copies: list[Space] = []
        self.fault: BaseException | None = None
        self.done = threading.Semaphore(0)
        self.written: dict[Any, list[Value]] = {}
        self.own: dict[Any, tuple[Role, Value]] = {}  # `OWN`
        self.followed: dict[Any, list[Value]] = {}  # maxima in global memory
        self.adding: dict[Any, Role] = {}

    def start(self, roles: list[Role]) -> None:
        self.roles = roles
        for role in roles:
            role.start()
        self._next().baton.release()
        self.done.acquire()
        for role in roles:
            role.baton.release()
        for role in roles:
            role.join()
        if self.fault is not None:
            raise self.fault

    def _next(self) -> Role | None:
        """Who goes on; copies that come first are over before it does. None: nobody is left."""
        while True:
            chosen: Any = None
            for role in self.roles:
                first = not role.over and (chosen is None or role.rank > chosen.rank)
                if first and (role.ready is None or role.ready()):
                    chosen = role
            for copy in self.copies:
                if chosen is None or copy.rank > chosen.rank:
                    chosen = copy
            if chosen is None:
                stuck = [f"{r.title} waits for {r.waits_for}" for r in self.roles if not r.over]
                if stuck:
                    raise Fault("nobody can go on: " + "; ".join(stuck))
                return None
            if isinstance(chosen, Role):
                return chosen
            self.copies.remove(chosen)
            chosen.end()

    def pass_on(self, role: Role) -> None:
        """Let the next one run, and wait until it is this role's turn again."""
        try:
            following = None if self.fault else self._next()
        except Exception as fault:  # whatever it is: the others would wait forever
            self.fault, following = fault, None
        if following is role:
            return
        (self.done if following is None else following.baton).release()
        if not role.over:
            role.baton.acquire()
            if self.fault is not None:
                raise Stopped

    def copy(self, end: Callable[[], None]) -> None:
        rank = self.rng.random() + self.late
        self.copies.append(Space(rank=rank, end=end, program=now.role.program))


def step(ready: Callable[[], bool] | None = None, waits_for: str = "") -> Role:
    """An operation that others see; it happens once it is ``ready``."""
    role = now.role
    run = role.run_of
    if run.roles:
        if run.rng.random() < run.change:
            role.rank = run.rng.random()
        role.ready, role.waits_for = ready, waits_for
        run.pass_on(role)
        role.ready = None
    return role


class Read:
    """Cells of shared memory that are being read. spoiled: why what it gives must not be used; the
    kernels start products of what happens to lie there, which nobody looks at."""

    def __init__(self, how: str, cells: list[Space], *, fenced: bool = True) -> None:
        self.role, self.how, self.open, self.spoiled = now.role, how, True, ""
        for cell in cells:
            if cell.flying or cell.content is None:
                self.spoiled = f"{self.role.title}: {how} of {cell.name}, which is not full"
            if fenced and cell.unfenced:
                raise Fault(f"{self.role.title}: {how} of {cell.name} without a fence after stores")
            cell.reads = [r for r in cell.reads if r.open] + [self]


class Value:
    """A tensor: its shape, the tiles that it was made of, and the products that it is a sum of.

    number: of an item, or an address. reads: which have not ended or are spoiled. unscaled: it has
    a shift of before, and must be multiplied.
    """

    def __init__(
        self, shape: Any = (), of: frozenset[Any] = frozenset(), terms: Any = (), *,
        reads: Any = (), number: Any = None,
    ) -> None:  # fmt: skip
        self.shape, self.of, self.terms, self.number = tuple(shape), of, terms, number
        self.reads, self.unscaled = reads, False
        self.type, self.dtype = Space(layout=None), None

    def like(self, shape: Any) -> Value:
        """The same registers in another shape."""
        made = Value(shape, self.of, self.terms, reads=self.reads, number=self.number)
        made.unscaled = self.unscaled
        return made

    def whole(self) -> frozenset[Any]:
        return self.of.union(*self.terms)

    def awaited(self) -> None:
        if any(r.open and r.how == "product" for r in self.reads):
            raise Fault(f"{now.role.title} uses a product that it has not awaited")

    def loaded(self) -> None:
        """Used by what is ordered before all that follows."""
        self.awaited()
        for read in self.reads:
            read.open = False

    def used(self) -> None:
        """So that it matters."""
        self.loaded()
        if self.unscaled:
            raise Fault(f"{now.role.title} uses a total of another shift")
        for read in self.reads:
            if read.spoiled:
                raise Fault(read.spoiled)

    def kept(self) -> tuple[Read, ...]:
        return tuple(r for r in self.reads if r.open or r.spoiled)

    def __neg__(self) -> Value:
        return self

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return together(self, other)


def together(*xs: Any, flat: bool = False, scaled: bool = False) -> Any:
    """Arithmetic. flat: what was a sum is one no more. scaled: it is a product."""
    values = [x for x in xs if isinstance(x, Value)]
    for x in values:
        x.awaited()
        if x.unscaled and not scaled:
            raise Fault(f"{now.role.title} adds a total of another shift")
    rank = max(len(x.shape) for x in values)
    shapes = [(1,) * (rank - len(x.shape)) + x.shape for x in values]
    shape = tuple(map(max, zip(*shapes, strict=True)))
    of = frozenset().union(*(x.whole() if flat else x.of for x in values))
    terms = () if flat else tuple(t for x in values for t in x.terms)
    base = next((x.number for x in values if x.number is not None), None)
    return Value(shape, of, terms, reads=tuple({r for x in values for r in x.kept()}), number=base)


for _name in [
    "add",
    "radd",
    "sub",
    "rsub",
    "truediv",
    "rtruediv",
    "ge",
    "le",
    "gt",
    "lt",
    "lshift",
    "rshift",
    "and",
    "or",
]:
    setattr(Value, f"__{_name}__", together)
for _name in ["mul", "rmul"]:
    setattr(Value, f"__{_name}__", lambda a, b: together(a, b, scaled=isinstance(b, Value)))


OWN = "total"
"""Global memory in which a role finds again what it has left there."""


class Pointer:
    """Global memory: integers that kernels read, or the name of what they write."""

    def __init__(self, name: str, data: Any, at: int = 0) -> None:
        self.name, self.data, self.at = name, data, at

    def __add__(self, offset: Any) -> Any:
        if isinstance(offset, Value):
            return Value(offset.shape, number=(self.name, self.at))
        return Pointer(self.name, self.data, self.at + offset)


class Barrier:
    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.parity = 0

    def index(self, _: int) -> Barrier:
        return self

    def settle(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.parity ^= 1
            self.left = self.count

    def arrive(self) -> None:
        if self.left == 0:
            raise Fault(f"{now.role.title} is one too many at {self.name}")
        self.left -= 1
        self.settle()


class Barriers(list):
    def index(self, i: int) -> Barrier:  # type: ignore[override]
        return self[i]


class View:
    """Part of shared memory, in cells of 64 rows of one tile."""

    def __init__(self, shape: Any, cells: Any, dtype: Any) -> None:
        self.shape, self.cells, self.dtype, self.type = tuple(shape), cells, dtype, None

    def index(self, i: int) -> View:
        each = len(self.cells) // self.shape[0]
        if each == 0:  # part of a cell
            return View(self.shape[1:], self.cells, self.dtype)
        return View(self.shape[1:], self.cells[i * each : (i + 1) * each], self.dtype)

    def slice(self, start: int, length: int, dim: int = 0) -> View:
        shape = list(self.shape)
        if not 0 <= start <= start + length <= shape[dim]:
            raise Fault(f"slice {start}..{start + length} of {shape}")
        shape[dim] = length
        whole = dim or len(shape) == 1  # numbers of rows lie in one cell
        rows = slice(None) if whole else slice(start // 64, -(-(start + length) // 64))
        return View(shape, self.cells[rows], self.dtype)

    def permute(self, order: tuple[int, ...]) -> View:
        return View([self.shape[i] for i in order], self.cells, self.dtype)

    def reshape(self, shape: Any) -> View:
        return View(shape, self.cells, self.dtype)

    def _reinterpret(self, dtype: Any, shape: Any, _: Any) -> View:
        return View(shape, self.cells, dtype)

    def content(self) -> Value:
        found = [c.content or Value() for c in self.cells]
        of = frozenset().union(*(x.of for x in found))
        same = all(Counter(x.terms) == Counter(found[0].terms) for x in found)
        terms = found[0].terms if same else tuple(t for x in found for t in x.terms)
        return Value(self.shape, of, terms, number=found[0].number)

    def load(self, _: Any) -> Value:
        step()
        read = Read("load", self.cells, fenced=False)
        found = self.content()
        found.reads = (read,)
        return found

    def store(self, x: Value) -> None:
        role = step()
        x.used()
        for cell in self.cells:
            # A load of its own is in order with it.
            overwritten(cell, role, [r for r in cell.reads if r.how != "load" or r.role != role])
            cell.content = x
            cell.unfenced.add(role)
            role.unfenced.append(cell)


def overwritten(cell: Space, role: Role, reads: list[Read]) -> None:
    """Spoil what is being read of a cell."""
    if cell.flying:
        raise Fault(f"{role.title} overwrites {cell.name} during a copy")
    for read in reads:
        if read.open:
            read.spoiled = f"{role.title} overwrites {cell.name} before a {read.how} of it ends"
            if read.how == "store":
                raise Fault(read.spoiled)


def allocate(dtype: Any, shape: list[int], _: Any) -> Any:
    program = now.role.program
    if dtype == "int64":
        made = Barriers(Barrier() for _ in range(shape[0]))
        for i, barrier in enumerate(made):
            barrier.name = f"barrier {len(program.barriers)}.{i}"
        program.barriers.append(made)
        return made[0] if len(shape) == 1 else made
    leading = shape[0] if len(shape) == 3 or (len(shape) == 2 and shape[1] == 1) else 1
    rows = shape[-2] if len(shape) > 1 and shape[1] != 1 else 1
    buffer = len(program.buffers)
    program.buffers.append(shape)
    cells = [
        Space(name=f"buffer {buffer} {shape} at {i}.{j}", content=None, flying=False, reads=[],
              unfenced=set())
        for i in range(leading) for j in range(-(-rows // 64))
    ]  # fmt: skip
    return View(shape, cells, dtype)
