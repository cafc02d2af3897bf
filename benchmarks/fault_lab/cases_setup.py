"""Changed settings, other software, the network, the clock, and numbers that went wrong."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from fault_lab import hooks
from fault_lab.case import Case, Scene
from fault_lab.cases_processes import PEER, slow_steps
from fault_lab.lab import Outcome, free_port

# -------------------------------------------------------------------------------- between attempts


def then(*sets: str, **options: Any) -> Callable[[Scene], Outcome]:
    """Train the first part, then start with something changed."""

    def inject(scene: Scene) -> Outcome:
        scene.first_part()
        return scene.play(*sets, **options)

    return inject


def with_file(name: str, content: bytes) -> Callable[[Scene], Outcome]:
    """Train the first part, overwrite a file of the run directory, go on."""

    def inject(scene: Scene) -> Outcome:
        scene.first_part()
        (scene.lab.run_dir / name).write_bytes(content)
        return scene.play()

    return inject


def remove(name: str) -> Callable[[Scene], None]:
    return lambda scene: (scene.lab.run_dir / name).unlink(missing_ok=True)


def torn_metrics(scene: Scene) -> Outcome:
    """The last line of metrics.csv was cut by a crash."""
    scene.first_part()
    file = scene.lab.run_dir / "metrics.csv"
    file.write_bytes(file.read_bytes()[:-30])
    return scene.play()


def other_versions(rank: int) -> None:
    """The environment says it has another torch than the attempts before had."""
    from megatron_patch.runtime import environment

    real = environment.report
    environment.report = lambda: real() | {"torch": "2.0.1"}  # type: ignore[assignment]


def impatient(rank: int) -> None:
    """A launched job gives a lost node's lock two minutes; here less than the first run lasts."""
    from megatron_patch.training import run_directory as places

    places.LOCK_PATIENCE_SECONDS, places.LOCK_POLL_SECONDS = 1.0, 0.2


def two_runs(scene: Scene) -> Outcome:
    """A second job on the run directory of a running one."""
    first = scene.lab.start(hook=slow_steps(1.0))
    first.wait_step(2)
    second = scene.lab.start(hook=impatient)
    outcome = second.finish(40, alone=False)
    finished = first.finish(60)
    assert finished.code == 0, finished.output
    return outcome


def bad_yaml(scene: Scene) -> Outcome:
    file = scene.lab.folder / "run.yaml"
    text = file.read_text()
    file.write_text(text.replace("lr: 1.0e-2", "lr: 1.0e-2, learning_rate: 3"))
    outcome = scene.play()
    file.write_text(text)
    return outcome


REFUSED = "setup"
CHANGES = [
    Case(name="unknown key in the configuration", group=REFUSED, inject=bad_yaml, rank_code=2,
         says="run.yaml:.*learning_rate", within=10),
    Case(name="wrong number of ranks on resume", group=REFUSED, inject=then(ranks=3), rank_code=2,
         says="is not a multiple of micro_batch_size x data-parallel size", within=10),
    Case(name="other number of ranks on resume", group=REFUSED, inject=then(ranks=1), code=0,
         after="finished", says="the layout changed", ignore=("metrics", "weights", "optimizer",
         "random", "data", "step"), note="equal to rounding: sums are taken in another order"),
    Case(name="other model on resume", group=REFUSED, inject=then("model.hidden_size=64"),
         says="64, but the run in run was started with 32", rank_code=2, within=10),
    Case(name="other tokenizer on resume", group=REFUSED, rank_code=2, within=10,
         inject=then("data.tokenizer.kind=tiktoken", "data.tokenizer.name=gpt2"),
         says="data.tokenizer"),
    Case(name="other seed on resume", group=REFUSED, inject=then("training.seed=5"), rank_code=2,
         says="5, but the run in run was started with 1234", within=10),
    Case(name="other torch version on resume", group=REFUSED, inject=then(hook=other_versions),
         code=0, after="finished", says="software changed .*torch: .* -> 2.0.1"),
    Case(name="config.yaml of the run damaged", group=REFUSED, repair=remove("config.yaml"),
         inject=with_file("config.yaml", b"\x00\xff: [{"), rank_code=2, says="config.yaml",
         within=10),
    Case(name="environment.json of the run damaged", group=REFUSED, code=0, after="finished",
         inject=with_file("environment.json", b"{torn")),
    Case(name="metrics.csv torn", group=REFUSED, inject=torn_metrics, code=0, after="finished",
         ignore=("metrics",), note="the torn row is lost, steps after it are written"),
    Case(name="FINISHED without content", group=REFUSED, inject=with_file("FINISHED", b""), code=0,
         after="finished", note="an empty marker does not count"),
    Case(name="lock file left by a dead job", group=REFUSED, code=0, after="finished",
         inject=with_file(".lock", b"999\n"), note="the kernel holds the lock, not the file"),
    Case(name="two jobs in one run directory", group=REFUSED, inject=two_runs, rank_code=1,
         says="another process is training here right now", after="finished", within=20,
         note="the first one is not disturbed; a launched job waits 120 s (here 1 s) before, for "
         "the lock of a lost node"),
]  # fmt: skip


# ----------------------------------------------------------------------------------------- network


def port_in_use(scene: Scene) -> Outcome:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        return scene.play(port=holder.getsockname()[1])


def stranger_on_port(scene: Scene) -> Outcome:
    """Something else answers at the rendezvous, as a web server would."""
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    holder.listen()

    def serve() -> None:
        while True:
            try:
                peer, _ = holder.accept()
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                peer.close()
            except OSError:
                return

    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        threading.Thread(target=serve, daemon=True).start()
        time.sleep(90)
        os._exit(0)
    holder_port = holder.getsockname()[1]
    holder.close()
    attempt = scene.lab.start(port=holder_port, node=(0, 1))
    outcome = attempt.finish(80, alone=False)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return outcome


def dead_host(scene: Scene) -> Outcome:
    """Node 1 of 2 looks for a first node that is not there."""
    scene.lab.attempts += 1
    return scene.play(node=(1, 2), ranks=1, address="127.0.0.2", port=free_port(), limit=90)


def missing_node(scene: Scene) -> Outcome:
    """Node 0 of 2 waits for a second node that never comes."""
    return scene.play(node=(0, 2), ranks=1, limit=150)


def lost_node(scene: Scene) -> Outcome:
    """One of two nodes goes away in the middle: torchrun and its rank die there."""
    port = free_port()
    first = scene.lab.start(*scene.case.sets, node=(0, 2), ranks=1, port=port, hook=slow_steps())
    second = scene.lab.start(*scene.case.sets, node=(1, 2), ranks=1, port=port, hook=slow_steps())
    first.wait_step(4)
    first.mark("SIGKILL to torchrun of node 1")
    os.kill(second.pid, signal.SIGKILL)
    second.finish(20, alone=False)
    return first.finish(80)


NETWORK = [
    Case(name="port in use", group="network", inject=port_in_use, says="EADDRINUSE",
         note="the launch script's next attempt takes another port"),
    Case(name="rendezvous host is dead", group="network", inject=dead_host,
         says="failed to connect|timed out|Timed out", within=60),
    Case(name="second node never comes", group="network", inject=missing_node,
         sets=("parallel.distributed_timeout_minutes=0.1",), says="[Tt]imed out|timeout",
         note="parallel.distributed_timeout_minutes was 0.1; 10 by default"),
    Case(name="a node is lost in the middle", group="network", inject=lost_node, says=PEER),
]  # fmt: skip


# ------------------------------------------------------------------------------------------- clock


def clock(offset: float) -> Callable[[Scene], Outcome]:
    """The wall clock of all ranks jumps after step 3."""

    def hook(rank: int) -> None:
        real, strf = time.time, time.strftime

        def jump() -> None:
            if rank == 0:
                hooks.injected(f"the clock jumps by {offset / 3600:+.0f} h")
            time.time = lambda: real() + offset  # type: ignore[assignment]
            time.gmtime = lambda *a: _GMTIME(*(a or (real() + offset,)))  # type: ignore[assignment]
            time.strftime = lambda form, *a: strf(form, *(a or (time.gmtime(),)))  # type: ignore[assignment]

        hooks.at("step end", jump, step=3)

    return lambda scene: scene.play(hook=hook)


_GMTIME = time.gmtime
CLOCK = [
    Case(name="clock jumps a day ahead", group="clock", inject=clock(86400), code=0,
         after="finished"),
    Case(name="clock jumps a year back", group="clock", inject=clock(-365 * 86400), code=0,
         after="finished", note="newest is decided by step and attempt, never by time"),
]  # fmt: skip


# ----------------------------------------------------------------------------------------- numbers


def parameters(chunks: list[Any]) -> list[tuple[str, Any]]:
    from megatron_patch.training.finite import unwrap

    return [item for chunk in chunks for item in unwrap(chunk).named_parameters()]


WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"


def in_gradient(change: Callable[[Any], None], what: str, *, rank: int = 1, step: int = 5) -> Any:
    """Change one rank's own gradient of a weight before it is reduced."""

    def hook(mine: int) -> None:
        def before(guard: Any, chunks: list[Any]) -> None:
            if mine == rank and guard.step == step:
                hooks.injected(what)
                for name, parameter in parameters(chunks):
                    if name == WEIGHT:
                        change(parameter.main_grad.view(-1)[3:4])

        hooks.wrap(
            *hooks._owner("megatron_patch.training.finite", "StepGuard.before_reduction"),
            before=before,
        )

    return hook


def in_weight(change: Callable[[Any], None], what: str, *, rank: int = 1, step: int = 5) -> Any:
    """Change one rank's copy of a weight before a forward pass."""

    def hook(mine: int) -> None:
        def before(session: Any, batches: Any, number: int) -> None:
            if mine == rank and number == step:
                hooks.injected(what)
                for name, parameter in parameters(session.chunks):
                    if name == WEIGHT:
                        change(parameter.data.view(-1)[3:4])

        hooks.wrap(*hooks._owner("megatron_patch.training.trainer", "train_step"), before=before)

    return hook


def to(value: float) -> Callable[[Any], None]:
    return lambda cell: cell.fill_(value)


def bit(number: int) -> Callable[[Any], None]:
    import torch

    return lambda cell: cell.view(torch.int32).bitwise_xor_(1 << number)


def number(name: str, hook: Any, **more: Any) -> Case:
    return Case(name=name, group="numbers", inject=lambda scene: scene.play(hook=hook), **more)


NOT_FINITE = r"step 5: (loss|gradients) not finite; stopped before the update"
SPIKES = ("faults.spike.min_history=4", "training.train_steps=16")
"""A spike is judged against the steps before it."""


UNSEEN = "a wrong number that looks like any other; no trainer sees it that computes only once"
NUMBERS = [
    number("NaN in one rank's gradient", in_gradient(to(math.nan), "NaN in a gradient"),
           says="not finite before their reduction on rank 1", rank_code=3),
    number("Inf in one rank's gradient", in_gradient(to(math.inf), "Inf in a gradient"),
           says="not finite before their reduction on rank 1", rank_code=3),
    number("NaN in one rank's weight", in_weight(to(math.nan), "NaN in a weight"),
           says=NOT_FINITE, rank_code=3),
    number("highest exponent bit of one gradient flipped",
           in_gradient(bit(30), "bit 30 of a gradient"), says=NOT_FINITE, rank_code=3,
           note="its square overflows"),
    number("one gradient far too large, but finite",
           in_gradient(to(1e5), "100,000 in a gradient", step=12), sets=SPIKES, code=0,
           says="^spike at step 12", after="undetected",
           note="reported; the update is taken under faults.spike.action: record, the default"),
    number("one gradient far too large, updates of spikes skipped",
           in_gradient(to(1e5), "100,000 in a gradient", step=12), code=0,
           sets=(*SPIKES, "faults.spike.action=skip"), says="^spike at step 12",
           after="undetected", note="reported; this step's update is dropped on all ranks"),
    number("exponent bit of one gradient flipped",
           in_gradient(bit(28), "bit 28 of a gradient"), code=0, after="undetected", note=UNSEEN),
    number("highest mantissa bit of one gradient flipped",
           in_gradient(bit(22), "bit 22 of a gradient"), code=0, after="undetected", note=UNSEEN),
    number("mantissa bit of one rank's weight flipped",
           in_weight(bit(22), "bit 22 of a weight"), code=0, after="undetected",
           note="the next gather of weights overwrites it; the step's gradient is wrong"),
]  # fmt: skip

CASES = [*CHANGES, *NETWORK, *CLOCK, *NUMBERS]
