"""What the forward pass of one micro-batch keeps for its backward pass, tensor by tensor.

The inventory follows what autograd saves in Megatron-Core's local layers with our norms and
attention (Korthikanti et al. 2022, arXiv:2205.05198, sec. 4, is the ancestor: 34 s b h bytes a
layer of a GPT with dropout and no flash attention). Tensors that share a storage count once, and a
view keeps the whole of it: v is a view of the fused qkv projection's output, so all of that stays.

Shapes are those of `sizes`; N: tokens a rank's experts are given.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patch.attention.backends import BACKENDS
from megatron_patch.attention.capabilities import OURS
from megatron_patch.planner.sizes import FLOAT, INT64, RankShapes, rank_shapes
from megatron_patch.schema.effective import expert_tensor_parallel_size, groups_experts
from megatron_patch.schema.model import (
    MLAConfig,
    MoEConfig,
    expert_ffn_hidden_size,
    ffn_hidden_size,
    is_moe_layer,
)
from megatron_patch.schema.run import RunConfig
from megatron_patch.stability.guard import TARGET

UNBALANCED = 1.5
"""Tokens of the fullest expert-parallel rank over its share, averaged over layers, that memory is
planned for. A router starts unbalanced, and a run must not end there: docs/planning.md."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor (or several alike) that waits for the backward pass."""

    name: str
    size: int
    """Bytes."""
    kernel: bool = False
    """Whether it is the attention backend's."""


@dataclass(frozen=True, slots=True)
class BackwardStage:
    """One instant of a module's backward pass."""

    name: str
    extra: int
    """Bytes of gradients and gathered inputs alive then, beside what the forward pass saved."""
    freed: int = 0
    """Bytes of saved tensors that are gone once it is over."""


class Activations:
    """Saved tensors and backward moments of every module of one rank.

    Args:
        run: a configuration that passed its checks.
        vocab: V, padded.
    """

    def __init__(self, run: RunConfig, vocab: int) -> None:
        self.run, self.model, self.n = run, run.model, rank_shapes(run, vocab)
        self.fused = run.training.compiles_fusions
        recompute = run.training.recompute
        self.etp = expert_tensor_parallel_size(run)
        self.modules = recompute.modules if recompute.granularity == "selective" else []

    # --- what is saved ------------------------------------------------------------------------

    def norm(self, name: str, rows: int, width: int, *, size: int) -> list[SavedTensor]:
        """Input of a norm and its float32 statistics (one a row, LayerNorm two)."""
        each = FLOAT if self.model.normalization == "RMSNorm" else 2 * self.n.w
        found = [SavedTensor(f"{name} statistics", each * rows)]
        if size:
            found.append(SavedTensor(f"{name} input", size * rows * width))
        return found

    def layer(self, number: int) -> list[SavedTensor]:
        """Everything layer ``number`` (1-based) saves when nothing is recomputed."""
        n = self.n
        found = [*self.norm("input norm", n.S, n.h, size=n.residual)]
        found.append(SavedTensor("input norm output", n.hidden))
        found += self.attention() if self.model.mla is None else self.latent(self.model.mla)
        found += self.kernel()
        if self.model.hidden_dropout:  # one byte an element, for both residual branches
            found.append(SavedTensor("dropout masks", 2 * n.S * n.h))
        found += self.norm("pre-MLP norm", n.S, n.h, size=n.residual)
        found.append(SavedTensor("pre-MLP norm output", n.hidden))
        return found + self.feed_forward(number)

    def attention(self) -> list[SavedTensor]:
        """Projections and positions of grouped-query attention, up to the kernel's inputs."""
        n, model = self.n, self.model
        query, key = n.w * n.T * n.q * n.d, n.w * n.T * n.g * n.d
        whole = n.w * n.T * n.mixed
        found = [SavedTensor("qkv projection (v is a view of it)", whole)]
        if model.qk_layernorm:
            found += self.norm("q norm", n.T * n.q, n.d, size=0)
            found += self.norm("k norm", n.T * n.g, n.d, size=0)
            if n.q > n.g:  # the heads of a group are interleaved with its key: no view is possible
                found.append(SavedTensor("q, made contiguous", query))
        switches = self.run.stability.guard == "switch"
        kept = BACKENDS[self.run.attention.backend].keeps_qk or switches
        if model.position_embedding == "rope":
            if kept:
                found.append(SavedTensor("rotated q and k", query + key))
            found.append(self.angles(int(n.d * model.rotary_percent)))
        elif not kept:
            pass  # what the norm and the projection keep is above
        elif model.qk_layernorm:
            found.append(SavedTensor("normalized q and k", query + key))
        elif n.q > n.g:
            found.append(SavedTensor("q, made contiguous", query))
        return found

    def angles(self, width: int) -> SavedTensor:
        """Cosines and sines in the compute type, for q and for k."""
        return SavedTensor("cosines and sines", 4 * self.n.w * self.n.s * width)

    def latent(self, mla: MLAConfig) -> list[SavedTensor]:
        """Multi-latent attention (DeepSeek-V2, arXiv:2405.04434): latents, q, k, contiguous v."""
        n = self.n
        wide = n.w * n.T * n.q * n.d
        up = "mla_up_proj" in self.modules
        width = mla.kv_lora_rank + mla.qk_pos_emb_head_dim
        found = [SavedTensor("kv latent and k_pos", n.w * n.T * width)]
        rank = mla.q_lora_rank
        if rank is not None:
            found.append(SavedTensor("q latent", n.w * n.T * rank))
        if self.model.qk_layernorm:
            if rank is not None:
                found += self.norm("q latent norm", n.S, rank, size=0)
                found.append(SavedTensor("q latent norm output", n.w * n.S * rank))
            found += self.norm("kv latent norm", n.S, mla.kv_lora_rank, size=0)
            found.append(SavedTensor("kv latent norm output", n.w * n.S * mla.kv_lora_rank))
        if not up:
            found.append(SavedTensor("q and k", 2 * wide))
            found.append(SavedTensor("v", n.w * n.T * n.q * n.dv))
            found.append(self.angles(mla.qk_pos_emb_head_dim))
        return found

    def kernel(self) -> list[SavedTensor]:
        """What the attention backend keeps beside q, k and v; O is also the projection's input."""
        n = self.n
        out = SavedTensor("O", n.w * n.T * n.q * n.dv, kernel=True)
        rest = kernel_bytes(self.run, n) - out.size
        if "core_attn" in self.modules:
            return [out]
        return [out, SavedTensor("LSE, low part of O, scores", rest, kernel=True)]

    def feed_forward(self, number: int) -> list[SavedTensor]:
        """MLP or experts of layer ``number``."""
        moe = self.model.moe
        if moe is None or not is_moe_layer(moe.layer_freq, number):
            if "mlp" in self.modules:
                return []
            return self.mlp(self.n.T, ffn_hidden_size(self.model) // self.n.tp)
        return [] if "moe" in self.modules else self.experts(moe)

    def mlp(self, rows: int, width: int, *, scaled: bool = False) -> list[SavedTensor]:
        """Both matrices of an MLP with ``width`` columns on this rank.

        Eager SwiGLU keeps five [rows, f]: both halves of the first product, silu(gate), the copy of
        the linear half that ``+ offset`` makes, and the product. Experts keep the product twice:
        before and after it was scaled by the routing probability (``scaled``).
        """
        unit = self.n.w * rows * width
        gated = self.model.activation == "swiglu"
        # ReLU keeps its result, which is what the second matrix keeps too.
        count = 1 if self.model.activation == "relu" else 2
        if gated:
            count = 3 if self.fused else 5
        count += scaled
        return [SavedTensor(f"MLP activations ({count} x [T, f])", count * unit)]

    def experts(self, moe: MoEConfig) -> list[SavedTensor]:
        """Router, permuted tokens, experts of the fullest rank, shared expert."""
        n = self.n
        given = self.most_tokens(moe)
        width = expert_ffn_hidden_size(self.model, moe) // self.etp
        found = [SavedTensor("router probabilities and maps", 5 * FLOAT * n.S * moe.num_experts)]
        found.append(SavedTensor("tokens sent to experts", n.w * given * n.h))
        found += self.mlp(given, width, scaled=True)
        if moe.shared_expert_ffn_hidden_size is not None:
            found += self.mlp(n.T, moe.shared_expert_ffn_hidden_size // n.tp)
        return found

    def expert_tokens(self, moe: MoEConfig) -> int:
        """N: tokens the experts of one rank are given together if the router balances them."""
        return self.n.S * moe.top_k * self.etp

    def most_tokens(self, moe: MoEConfig) -> int:
        """`expert_tokens` of the fullest rank; a rank that holds all experts is given no more."""
        ranks = self.run.parallel.expert_model_parallel_size
        return int(self.expert_tokens(moe) * min(UNBALANCED, ranks))

    # --- what else is alive in the backward pass ----------------------------------------------

    def layer_moments(self, number: int) -> list[BackwardStage]:
        """The backward pass of layer ``number``, in its order: MLP first, then attention."""
        n = self.n
        moments = self.feed_forward_moments(number)
        freed = sum(x.size for x in self.layer(number) if x.kernel)
        out, query = n.w * n.T * n.q * n.dv, n.w * n.T * n.q * n.d
        keys = n.w * n.T * n.g * (n.d + n.dv)
        again = 0
        if "core_attn" in self.modules:
            again = kernel_bytes(self.run, n)
        if "mla_up_proj" in self.modules:
            again += 2 * query + n.w * n.T * n.q * n.dv
        moved = self.travelers() or query + keys
        extra = n.stream + out + moved + FLOAT * n.T * n.q + again + score_bytes(self.run, n)
        moments.append(BackwardStage("attention kernel: dO, dQ, dK, dV, delta", extra, freed))
        projected, weight = n.w * n.T * n.columns, n.w * n.h * n.columns
        if n.shared > 1:
            # Gradient of the whole projection, its copy ordered by rank, and this rank's part; what
            # the forward pass kept of it went with v.
            whole = n.w * n.T * n.mixed
            extra = n.stream + whole + projected
            moments.append(BackwardStage("qkv projection: reduce-scatter", extra))
        extra = n.stream + 2 * projected + 2 * n.gathered + weight
        moments.append(BackwardStage("qkv projection: gradients", extra))
        return moments

    def travelers(self) -> int:
        """Under context parallelism: gradients, and keys and values of other ranks; 0 without.

        p2p counts, in float32, dQ and this rank's dK and dV; of two blocks dK and dV that were
        made, are on their way, or came for this rank (half of its keys); and the keys of two blocks
        and of the next two. Few ranks never have all of that at once. The other modes count their
        16-bit gradients and the float32 ones of what they gathered as well. A projection keeps a
        key and two numbers a row.
        """
        n, ranks = self.n, self.run.parallel.context_parallel_size
        if ranks == 1:
            return 0
        query, keys = n.T * n.q * n.d, n.T * n.g * (n.d + n.dv)
        kinds = self.run.parallel.cp_comm_type
        kinds = kinds if isinstance(kinds, list) else [kinds]
        found = [0]
        if {"p2p", "a2a+p2p"} & {*kinds}:
            blocks, keys_of = (1, 1) if ranks == 2 else (4, 1) if ranks <= 4 else (5, 4)
            found.append(((1 + blocks) * FLOAT + keys_of * n.w) * keys)
        if {"a2a", "all_gather"} & {*kinds}:
            gathered = ranks if "all_gather" in kinds else 2
            found.append(n.w * (query + keys) + gathered * (n.w + FLOAT) * keys)
        projects = self.run.attention.stabilizer == "compensated_projected"
        kept = n.T * n.q * (n.w * n.d + 2 * FLOAT) if projects else 0
        return FLOAT * query + kept + max(found)

    def feed_forward_moments(self, number: int) -> list[BackwardStage]:
        moe = self.model.moe
        if moe is not None and is_moe_layer(moe.layer_freq, number):
            return self.expert_moments(moe)
        unit = self.n.w * self.n.T * ffn_hidden_size(self.model) // self.n.tp
        again = sum(x.size for x in self.mlp(self.n.T, ffn_hidden_size(self.model) // self.n.tp))
        return self.mlp_moments(unit, again if "mlp" in self.modules else 0)

    def mlp_moments(self, unit: int, again: int) -> list[BackwardStage]:
        """``unit`` bytes of one [T, f]; ``again`` bytes recomputed before the backward begins."""
        n = self.n
        weight = n.h * unit // max(n.T, 1)  # [h, f] of one matrix
        gated = self.model.activation == "swiglu"

        def stage(name: str, extra: int, freed: int = 0) -> BackwardStage:
            return BackwardStage(name, n.stream + extra + again, freed)

        moments = [stage("fc2: gradients of input and weight", n.gathered + unit + weight, unit)]
        if not gated:
            # squared_relu is two functions with gradients of their own.
            count = 4 if self.model.activation == "squared_relu" else 2
            moments.append(stage("activation", count * unit, unit))
        else:
            name = "SwiGLU" if self.fused else "SwiGLU: product"
            moments.append(stage(name, 3 * unit, 2 * unit))
            if not self.fused:
                moments.append(stage("SwiGLU: halves", 4 * unit, 2 * unit))
        columns = 1 + gated
        fc1 = columns * (unit + weight) + 3 * n.gathered
        return [*moments, stage("fc1: gradients", fc1)]

    def expert_moments(self, moe: MoEConfig) -> list[BackwardStage]:
        """The float32 scaling by probabilities: of one expert, or of all multiplied together. Then
        a GPU needs their weights beside each other.
        """
        n = self.n
        local = moe.num_experts // self.run.parallel.expert_model_parallel_size
        given = self.most_tokens(moe)
        width = expert_ffn_hidden_size(self.model, moe) // self.etp
        unit = given // (1 if groups_experts(self.run) else local) * width
        again = sum(x.size for x in self.experts(moe)) if "moe" in self.modules else 0
        gradient = n.w * given * n.h
        extra = n.stream + gradient + (n.w + 3 * FLOAT) * unit + again
        moments = [BackwardStage("expert: gradient of the scaled activation", extra, n.w * unit)]
        training = self.run.training
        if groups_experts(self.run) and training.device == "cuda" and training.precision == "bf16":
            columns = 1 + (self.model.activation == "swiglu")
            weights = n.w * local * width * columns * n.h
            extra = n.stream + 2 * gradient + columns * n.w * unit + weights + again
            moments.append(BackwardStage("experts: fc1, copies of its weights", extra))
        return moments

    # --- the ends of the model ----------------------------------------------------------------

    def embedding(self) -> list[SavedTensor]:
        """Token ids, and the dropout mask after the embedding."""
        n = self.n
        found = [SavedTensor("ids, labels, mask, positions", (3 * INT64 + FLOAT) * n.T)]
        if self.model.hidden_dropout:
            found.append(SavedTensor("embedding dropout mask", n.S * n.h))
        return found

    def rotary_table(self) -> int:
        """Float32 angles of the whole sequence, one table a micro-batch in flight."""
        if self.model.position_embedding != "rope":
            return 0
        mla = self.model.mla
        width = self.n.d if mla is None else mla.qk_pos_emb_head_dim
        return FLOAT * self.n.s * width

    def head(self) -> list[SavedTensor]:
        """Final norm and cross entropy: what stays from the forward to the backward pass."""
        n = self.n
        found = [*self.norm("final norm", n.S, n.h, size=n.residual)]
        found.append(SavedTensor("final norm output", n.hidden))
        found.append(SavedTensor(*self.kept_of_logits()))
        return found

    def kept_of_logits(self) -> tuple[str, int]:
        """What the cross entropy keeps for its backward pass."""
        logits = self.n.T * self.n.vocab
        if self.fused:
            return "logits", self.n.w * logits
        return "softmax of the logits, float32", FLOAT * logits

    def extra_depth(self, number: int) -> list[SavedTensor]:
        """One depth of multi-token prediction: merge, a layer, norms, and its own cross entropy."""
        n = self.n
        found = [*self.norm("embedding norm", n.S, n.h, size=n.w)]
        found += self.norm("hidden norm", n.S, n.h, size=0)
        found.append(SavedTensor("merged embedding and hidden state", 2 * n.hidden))
        found += self.layer(number)
        return found + self.head()

    def head_moments(self) -> list[BackwardStage]:
        """Logits or their gradient in the compute type beside what the cross entropy keeps."""
        n = self.n
        logits = n.w * n.T * n.vocab
        weight, hidden = n.w * n.vocab * n.h, n.w * n.T * n.h
        _, kept = self.kept_of_logits()
        return [
            BackwardStage("cross entropy: logits", logits + n.gathered, kept),
            BackwardStage("output projection: gradients", logits + weight + hidden + n.gathered),
            BackwardStage("final norm", 2 * n.hidden, n.hidden + n.stream),
        ]


def kernel_bytes(run: RunConfig, n: RankShapes) -> int:
    """Bytes the attention backend keeps for the backward beside q, k and v, O included.

    With ``stability.guard: switch`` the larger of before and after the switch: it comes in the
    middle of a run, which must not end there for lack of memory.
    """
    attention = run.attention
    o_lo = "bf16" if attention.o_lo == "default" else attention.o_lo
    keys = _keys(run, n)
    now = BACKENDS[attention.backend].saved_bytes(n, keys, attention.stabilizer, o_lo)
    if run.stability.guard != "switch":
        return now
    backend, options = TARGET
    kept = o_lo if attention.backend == backend else "bf16"
    return max(now, BACKENDS[backend].saved_bytes(n, keys, options["stabilizer"], kept))


def score_bytes(run: RunConfig, n: RankShapes) -> int:
    """What a backend works on in its backward pass, beside what it saved and returns.

    A backward of another library is handed a tensor in place of O.

    Score matrices of the unfused ones; dQ in float32, two numbers a row, and float32 dK and dV of
    parts of the query heads, of ours on sm_90, which is planned for whatever the GPU.
    """
    row = BACKENDS[run.attention.backend]
    backward = run.attention.backward
    borrowed = run.attention.backend == "fa4" or backward not in (*OURS, "own_x2")
    beside = n.T * n.q * n.dv * n.w if borrowed else 0
    sums = FLOAT * _summed(run, n, row.summed_head_dims)
    return row.score_bytes(n, _keys(run, n)) + sums + beside


def _summed(run: RunConfig, n: RankShapes, head_dims: tuple[int, ...]) -> int:
    """Numbers that the backward pass on sm_90 adds up; a bound (`hopper.launch.splits`)."""
    # Of a pair of chunks no more rows than the rank has; all its dK and dV are float32.
    chunks = run.parallel.context_parallel_size > 1
    if (
        run.training.device != "cuda"
        or n.d != n.dv
        or n.d not in head_dims
        or (chunks and run.model.attention_dropout > 0)
    ):
        return 0
    parts = next(x for x in (4, 2, 1) if n.q // n.g % x == 0)
    of_keys = 2 * n.g * n.d * parts if parts > 1 or chunks else 0
    return n.T * (n.q * (n.d + 2) + of_keys)


def _keys(run: RunConfig, n: RankShapes) -> int:
    return n.s * run.parallel.context_parallel_size
