"""Mixtures of experts: a router, the experts as stacked parameters, and the balance of their load.

    x -> router -> logits -> choose -> weights and numbers of the chosen experts, for each token
    x -> experts, for the chosen ones -> one output for each choice -> sum with the weights [+ shared experts]

No token is dropped: every expert that a token chooses computes the token, even if the load of the expert is high. Rows
of tokens are sorted by expert, so that each expert computes one matrix product. Then the results are sorted back into
the order of the tokens. Both sorts are gathers, in forward and in backward, so that sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_launch.distributed.collectives import all_reduced
from titan_launch.models.decoder.table_args import ExpertArgs
from titan_launch.plan.experts import MIN_GROUPED_WIDTH, is_grouped


class ContextGroup(NamedTuple):
    """The process group whose ranks divide the tokens of every sequence (context parallelism)."""

    name: str
    size: int


class ExpertChoice(NamedTuple):
    """The experts that each token chooses."""

    experts: Tensor
    """Numbers of the chosen experts, the best first: int64 (batch, tokens, top_k)."""

    weights: Tensor
    """Factors of the experts' outputs: fp32 (batch, tokens, top_k)."""

    scores: Tensor
    """The scores of all experts: fp32 (batch, tokens, experts)."""


def choose(logits: Tensor, args: ExpertArgs, selection_bias: Tensor | None = None) -> ExpertChoice:
    """Choose the experts of each token, in fp32. `logits`: (batch, tokens, experts). `selection_bias`: (experts); it
    changes which experts are chosen, but not their weights."""
    logits = logits.float()
    scores = logits.softmax(-1) if args.score == "softmax" else logits.sigmoid()
    ranked = scores.detach() if selection_bias is None else scores.detach() + selection_bias
    if args.num_groups > 1:
        grouped = ranked.unflatten(-1, (args.num_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(args.top_k_groups, dim=-1).indices
        is_open = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        ranked = grouped.masked_fill(~is_open[..., None], -torch.inf).flatten(-2)
    experts = ranked.topk(args.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if args.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + torch.finfo(weights.dtype).tiny)
    return ExpertChoice(experts, weights * args.scale, scores)


Compute = Callable[[Tensor, Tensor], Tensor]
"""A function of two tensors: rows that are sorted by expert (rows, dim), and the number of rows of each expert
(experts). The function returns the results of the experts (rows, dim)."""


class Experts(nn.Module):
    """The experts of a layer, with stacked parameters. An expert is a feed-forward layer w2(activation(w1 x) * w3 x).
    With `gate_limit`, the hidden layer has the formula of `ExpertArgs.gate_limit`."""

    dispatch: Callable[[Compute, Tensor, Tensor], Tensor] | None = None
    """Function of (compute, rows, counts) that sends rows to the ranks of their experts, calls `compute` there, and
    returns the results. `parallel.expert_parallel` sets it. None: this rank has all experts."""

    def __init__(self, dim: int, args: ExpertArgs, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        num_experts, hidden = args.num_experts, args.hidden_dim
        self.num_experts = num_experts
        self.activation = activation
        self.gate_limit = args.gate_limit
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.b1 = nn.Parameter(torch.empty(num_experts, hidden)) if args.expert_bias else None
        self.b2 = nn.Parameter(torch.empty(num_experts, dim)) if args.expert_bias else None
        self.b3 = nn.Parameter(torch.empty(num_experts, hidden)) if args.expert_bias else None
        self.lora: nn.ModuleDict | None = None  # `models.lora` adds an adapter for each of w1, w2 and w3
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values from the same distributions as `nn.Linear`."""
        for weights, bias in ((self.w1, self.b1), (self.w2, self.b2), (self.w3, self.b3)):
            bound = weights.shape[2] ** -0.5
            for tensor in (weights, bias):
                if tensor is not None:
                    nn.init.uniform_(tensor, -bound, bound)

    def forward(self, x: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs of the chosen experts, not weighted: (tokens, top_k, dim). `x`: (tokens, dim). `chosen`:
        numbers of experts (tokens, top_k). `counts`: result of `count_choices`."""
        order = chosen.flatten().argsort(stable=True)
        inverse = inverse_of(order).view(chosen.shape)
        rows = _Spread.apply(x, order, inverse)
        results = self.compute(rows, counts) if self.dispatch is None else self.dispatch(self.compute, rows, counts)
        return Permuted.apply(results, inverse, order)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows that are sorted by expert, (rows, dim), to the same shape. `counts`: rows of each expert."""
        multiply = of_adapters = expert_product(rows, counts, self.w1)
        if self.lora is not None:  # w1 has the widths of this rank; the shape of a sharded `b` has those of all ranks
            of_adapters = expert_product(rows, counts, self.w1, self.lora["w1"].get_parameter("a"))

        def product(rows: Tensor, name: str, weights: Tensor, bias: Tensor | None) -> Tensor:
            result = multiply(rows, weights, bias)
            return result if self.lora is None else result + self.lora[name](rows, of_adapters)

        gate, up = product(rows, "w1", self.w1, self.b1), product(rows, "w3", self.w3, self.b3)
        if self.gate_limit is None:
            hidden = self.activation(gate) * up
        else:
            gate, up = gate.clamp(max=self.gate_limit), up.clamp(-self.gate_limit, self.gate_limit)
            hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)  # GELU, approximated with a sigmoid
        return product(hidden, "w2", self.w2, self.b2)


def count_choices(chosen: Tensor, num_experts: int) -> Tensor:
    """Return the number of tokens that chose each expert: int64 (experts). The host does not wait for the device."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))


ExpertProduct = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
"""A function of rows (rows, in), stacked matrices (experts, out, in) and biases (experts, out) or None. The function
multiplies each row by the matrix of its expert, and adds the bias of its expert."""


def expert_product(rows: Tensor, counts: Tensor, *weights: Tensor) -> ExpertProduct:
    """Return a function that multiplies each row by the matrix of its expert. The rows are sorted by expert.

    `rows`: (rows, in). `counts`: number of rows of each expert. `weights`: stacked matrices (experts, out, in) that
    together have all widths of the products. `plan.experts.is_grouped` decides by these widths, the dtype and the
    device whether one kernel computes all experts. If not, the experts are computed one after another, and the host
    waits for the counts.
    """
    if len(rows) and is_grouped(rows.device.type, str(rows.dtype).removeprefix("torch."), widths_of(weights)):
        return grouped_product(counts)
    return looped_product(counts_on_host(counts, len(rows)))


def widths_of(weights: Iterable[Tensor]) -> list[int]:
    """Return the widths of stacked matrices (experts, out, in): out and in of each stack."""
    return [width for stacked in weights for width in stacked.shape[1:]]


def counts_on_host(counts: Tensor, num_rows: int) -> list[int]:
    """Return the number of rows of each expert as Python numbers. The host waits for the device if there are rows. On
    the meta device, tensors have no values. There, all rows count for the first expert, which changes no shape."""
    return [num_rows, *[0] * (len(counts) - 1)] if counts.is_meta or not num_rows else counts.tolist()


def grouped_product(counts: Tensor) -> ExpertProduct:
    """Return a product that computes all experts with one kernel. The host does not wait for the counts."""
    ends = counts.cumsum(0).to(torch.int32)

    def product(rows: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        # From Blackwell on, `F.grouped_mm` gives experts without rows a gradient that is not 0 (pytorch issue 172439).
        if weights.is_cuda and torch.cuda.get_device_capability(weights.device)[0] >= 10:
            weights = _OfUsedExperts.apply(weights, counts)
        result = F.grouped_mm(rows, weights.mT, offs=ends)
        if bias is None:
            return result
        return result + _OfRows.apply(bias, counts, ends, len(rows))

    return product


class _OfUsedExperts(torch.autograd.Function):
    """Return stacked matrices (experts, out, in) unchanged. The backward sets the gradients of experts without rows to
    0."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (counts,) = ctx.saved_tensors
        return gradients[0].masked_fill_((counts == 0)[:, None, None], 0), None


class _OfRows(torch.autograd.Function):
    """Return the bias of each row's expert: (experts, out) to (rows, out). The rows are sorted by expert.

    Autograd's own backward, `index_add_`, adds the rows in bf16. On CUDA, it adds them in an undefined order. This
    backward multiplies the gradient by ones with `F.grouped_mm`, which adds in fp32 and in a fixed order.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, counts: Tensor, ends: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(counts, ends)
        return bias.repeat_interleave(counts, dim=0, output_size=num_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        counts, ends = ctx.saved_tensors
        ones = gradients[0].new_ones(len(gradients[0]), MIN_GROUPED_WIDTH)
        sums = F.grouped_mm(ones.mT, gradients[0], offs=ends)
        return sums[:, 0].masked_fill((counts == 0)[:, None], 0), None, None, None


def looped_product(counts: Sequence[int]) -> ExpertProduct:
    """Return a product that computes the experts one after another. `counts`: number of rows of each expert."""
    return lambda rows, weights, bias: _Looped.apply(rows, weights, bias, counts)


class _Looped(torch.autograd.Function):
    """Compute one product for each expert, directly into the expert's part of the result or of a gradient.

    `F.grouped_mm` does the same on a CPU, but its meta function rejects fp32 before PyTorch 2.15, and it requires that
    each row of a matrix has a multiple of 16 bytes.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, bias: Tensor | None, counts: Sequence[int]) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights)
        ctx.counts = counts
        results = rows.new_empty(len(rows), weights.shape[1])
        parts = zip(results.split(counts), rows.split(counts), weights.mT.unbind(), strict=True)
        for index, (result, own, weight) in enumerate(parts):
            if bias is None:
                torch.mm(own, weight, out=result)
            else:
                torch.addmm(bias[index], own, weight, out=result)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        rows, weights = ctx.saved_tensors
        parts = gradients[0].split(ctx.counts)
        for_rows = for_weights = for_bias = None
        if ctx.needs_input_grad[0]:
            for_rows = gradients[0].new_empty(len(gradients[0]), weights.shape[2])
            for own, part, weight in zip(for_rows.split(ctx.counts), parts, weights.unbind(), strict=True):
                torch.mm(part, weight, out=own)
        if ctx.needs_input_grad[1]:
            for_weights = torch.empty_like(weights)
            for own, part, given in zip(for_weights.unbind(), parts, rows.split(ctx.counts), strict=True):
                torch.mm(part.T, given, out=own)
        if ctx.needs_input_grad[2]:
            for_bias = torch.stack([part.sum(0) for part in parts])
        return for_rows, for_weights, for_bias, None


class _Spread(torch.autograd.Function):
    """Copy the row of each token once for each of its experts, and sort the copies by expert: (tokens, dim) to (rows,
    dim). `order`: result of `argsort` (rows). `inverse`: its inverse (tokens, top_k)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return F.embedding(order // inverse.shape[1], x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return F.embedding(inverse, gradients[0]).sum(1), None, None  # embedding_bag would round ties in bf16 upwards


class Permuted(torch.autograd.Function):
    """Return the rows whose indices are in `places`: (rows, dim) to (*places.shape, dim). `places` is a permutation.

    `inverse`: the inverse of `places` (rows). `F.embedding` copies whole rows, so it is several times faster on a CPU
    than indexing. The result is not a view, because FSDP2 would warn about a view.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return F.embedding(places, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return F.embedding(inverse, gradients[0].flatten(0, -2)), None, None


def inverse_of(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


class MixtureOfExperts(nn.Module):
    """A layer of experts: router, experts, and optionally a feed-forward layer that processes every token."""

    load: Tensor
    """Number of tokens that chose each expert since the last reset, in training on this rank: fp32 (experts)."""

    selection_bias: Tensor | None
    """Biases that are added to the scores only to choose the experts of a token: fp32 (experts). None without
    `selection_bias_rate`."""

    auxiliary_losses: Tensor
    """Sum of the balance losses, and sum of the z-losses, in training on this rank since the last reset: fp32 (2). Each
    loss is multiplied by its weight and `loss_scale`, so the sums of all ranks add up to means over the sequences."""

    loss_scale: float | None = None
    """Factor of the auxiliary losses of a sequence; None for 1 / (sequences of the input). `parallel.expert_balance`
    sets it to 1 / (sequences of a step x tensor-parallel ranks). The losses of all microbatches and ranks of a step
    then add up to means."""

    context_group: ContextGroup | None = None
    """The ranks that have the other tokens of this rank's sequences; None: this rank has whole sequences."""

    def __init__(
        self,
        dim: int,
        args: ExpertArgs,
        activation: Callable[[Tensor], Tensor],
        shared_experts: nn.Module | None = None,
    ):
        """`shared_experts`: the layer that processes every token; None if there is none."""
        super().__init__()
        self.args = args
        self.router = nn.Linear(dim, args.num_experts, bias=args.router_bias)
        self.experts = Experts(dim, args, activation)
        self.shared_experts = shared_experts
        bias = None if args.selection_bias_rate is None else torch.zeros(args.num_experts)
        self.register_buffer("selection_bias", bias)
        self.register_buffer("load", torch.zeros(args.num_experts), persistent=False)
        self.register_buffer("auxiliary_losses", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, dim) to the same shape."""
        logits = self.router(x)
        choice = choose(logits, self.args, self.selection_bias)
        counts = count_choices(choice.experts, self.args.num_experts)
        outputs = self.experts(x.flatten(0, 1), choice.experts.flatten(0, 1), counts).unflatten(0, x.shape[:2])
        combined = _Combined.apply(outputs, choice.weights).to(x.dtype)
        if self.training:
            self.load.add_(counts)
            combined = self._with_losses(combined, logits, choice)
        return combined if self.shared_experts is None else combined + self.shared_experts(x)

    def _with_losses(self, output: Tensor, logits: Tensor, choice: ExpertChoice) -> Tensor:
        args, group = self.args, self.context_group
        scale = 1 / len(logits) if self.loss_scale is None else self.loss_scale
        weights = args.balance_loss * scale, args.z_loss * scale
        functions = (lambda: balance_losses(choice, group)), (lambda: z_losses(logits, group))
        for index, (weight, losses) in enumerate(zip(weights, functions, strict=True)):
            if weight:
                loss = losses().sum() * weight
                self.auxiliary_losses[index].add_(loss.detach())
                output = _WithLoss.apply(output, loss)
        return output


class _Combined(torch.autograd.Function):
    """Return, for each token, the weighted sum of its experts' outputs in fp32, added in the order of
    `ExpertChoice.experts`.

    `outputs`: (..., top_k, dim). `weights`: fp32 (..., top_k). The backward takes less time than autograd's own
    backward, and no memory for a copy of the outputs' gradient.
    """

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(outputs, weights)
        (first, weight), *others = zip(outputs.unbind(-2), weights[..., None].unbind(-2), strict=True)
        total = first * weight
        for output, weight in others:
            total.addcmul_(output, weight)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        outputs, weights = ctx.saved_tensors
        for_outputs = torch.mul(gradients[0][..., None, :], weights[..., None], out=torch.empty_like(outputs))
        return for_outputs, torch.stack([(output * gradients[0]).sum(-1) for output in outputs.unbind(-2)], -1)


def balance_losses(choice: ExpertChoice, group: ContextGroup | None = None) -> Tensor:
    """Return the balance loss of each sequence (`balance_loss` in `ExpertArgs`): fp32 (batch).

    With a context group, the tokens of each expert are counted over all ranks of the group (collective). Each rank
    returns its own tokens' part of the loss, and the sum over the group is the loss of the whole sequence.
    """
    _, tokens, num_experts = choice.scores.shape
    chosen = choice.experts.flatten(1)
    counts = torch.zeros_like(choice.scores[:, 0]).scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float32))
    if group is not None:
        counts, tokens = all_reduced(counts, group.name), tokens * group.size
    shares = choice.scores / choice.scores.sum(-1, keepdim=True)
    return num_experts * (counts / (tokens * choice.experts.shape[2]) * (shares.sum(1) / tokens)).sum(-1)


def z_losses(logits: Tensor, group: ContextGroup | None = None) -> Tensor:
    """Return the z-loss of each sequence: the mean over tokens of the squared logsumexp of the logits, fp32 (batch).
    With a context group, return this rank's part of the mean over the tokens of all ranks."""
    losses = logits.float().logsumexp(-1).square().mean(-1)
    return losses if group is None else losses / group.size


class _WithLoss(torch.autograd.Function):
    """Return `output` unchanged. The backward gives the scalar `loss` the gradient 1."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones((), dtype=ctx.dtype, device=gradients[0].device)
