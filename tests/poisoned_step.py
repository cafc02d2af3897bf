"""What makes one gradient of the last rank no number, in the third update of a trainer."""

SCRIPT = """
import math, os, sys, torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
step, calls, rank = ChainedOptimizer.step, [], os.environ.get("RANK", "0")

def models(part):  # of a sharded optimizer, of a whole one
    return getattr(part, "model_float16_groups", None) or part.float16_groups

def state(self):
    found = []
    for part in self.chained_optimizers:
        found += [weight for group in models(part) for weight in group]
        for group in part.optimizer.param_groups:
            for weight in group["params"]:
                found += [weight, *part.optimizer.state[weight].values()]
    return [x.detach().clone() for x in found]

def poisoned(self):
    calls.append(1)
    if len(calls) != 3:
        return step(self)
    before = state(self)
    if int(rank) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
        models(self.chained_optimizers[0])[0][-1].main_grad.view(-1)[7] = math.nan
    try:
        return step(self)
    finally:
        same = all(map(torch.equal, before, state(self)))
        print("rank", rank, len(before), "as before" if same else "changed", flush=True)

ChainedOptimizer.step = poisoned
"""
"""Prints whether weights, moments and step counters are what they were. The last rank is it."""
