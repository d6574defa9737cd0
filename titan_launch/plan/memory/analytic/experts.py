"""A mixture of experts without values: the memory that its forward and backward allocate. No torch.

This module copies the local variables of `titan_launch.models.mixture_of_experts`, because they determine which tensors
stay alive. The rows of a rank are divided equally among the experts, as in a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from titan_launch.config.architectures.experts import ExpertArgs
from titan_launch.plan.experts import MIN_GROUPED_WIDTH, is_grouped, received_rows
from titan_launch.plan.memory.analytic import ops
from titan_launch.plan.memory.analytic.autograd import Autograd
from titan_launch.plan.memory.analytic.replay import Compute, ReplayContext
from titan_launch.plan.memory.analytic.tensors import Backward, Tensor
from titan_launch.plan.memory.ledger import Category

_BACKWARD, _GRADIENT = Category.BACKWARD, Category.UNSHARDED_GRADIENTS


@dataclass(frozen=True)
class _Choice:
    experts: Tensor
    weights: Tensor
    scores: Tensor


class AnalyticExperts:
    """`MixtureOfExperts` on one rank."""

    def __init__(self, args: ExpertArgs, dim: int, context: ReplayContext):
        self.args = args
        self.dim = dim
        self.seq_len = context.seq_len
        self.autograd = context.autograd
        self.kernels = context.kernels
        self.weight = context.weight
        self.call = context.call
        self.ranks = context.expert_ranks
        self.load = context.expert_load

    def forward(self, path: str, linear: Callable[[str, Tensor], Tensor], shared: Compute | None, x: Tensor) -> Tensor:
        """Return the output of the layer at `path`. `linear` runs the linear layer at a path; `shared` runs the shared
        experts."""
        autograd = self.autograd
        logits = linear(f"{path}.router", x)
        choice = self._choose(logits)
        counts = self._count(choice.experts)
        experts = f"{path}.experts"
        outputs = self.call(experts, lambda x: self._experts(experts, x), ops.view(autograd, x))
        combined = _combined(autograd, ops.view(autograd, outputs), choice.weights, self.args.top_k)
        combined = ops.cast(autograd, combined, x.dtype)
        combined = self._with_losses(combined, logits, choice)
        del counts
        return combined if shared is None else ops.add(autograd, combined, shared(x))

    def _choose(self, logits: Tensor) -> _Choice:
        autograd, args, new = self.autograd, self.args, self.autograd.new
        logits = ops.cast(autograd, logits, "float32")
        scores = ops.saving_result(autograd, logits)
        num_tokens = scores.numel // args.num_experts
        ranked = new(scores.numel if args.selection_bias_rate is not None else 0, "float32")
        if args.num_groups > 1:
            groups = num_tokens * args.num_groups
            self._largest(2 * groups)
            self._largest(num_tokens * args.top_k_groups)
            is_open = [new(groups, "bool"), new(groups, "bool")]
            masked = new(scores.numel, "float32")
            del is_open[1:]
        experts = self._largest(num_tokens * args.top_k)
        weights = _gather(autograd, scores, experts)
        if args.normalize:
            weights = _divide_by_sum(autograd, weights, num_tokens)
        weights = ops.scale(autograd, weights)
        if args.num_groups > 1:
            del masked, is_open
        del ranked
        return _Choice(experts, weights, scores)

    def _largest(self, number: int) -> Tensor:
        """Return the indices of `topk`, which selective activation checkpointing saves."""
        values = self.autograd.new(number, "float32")
        indices = self.autograd.run_costly("topk", lambda: self.autograd.new(number, "int64"))
        del values
        return indices

    def _count(self, experts: Tensor) -> Tensor:
        counts = self.autograd.new(self.args.num_experts, "int64")
        ones = self.autograd.new(experts.numel, "int64")
        del ones
        return counts

    def _experts(self, path: str, x: Tensor) -> Tensor:
        autograd, top_k = self.autograd, self.args.top_k
        num_rows = x.numel // self.dim * top_k
        values, order = autograd.new(num_rows, "int64"), autograd.new(num_rows, "int64")
        del values
        inverse = _inverse(autograd, order)
        rows = _spread(autograd, x, order, inverse, top_k)
        result = self._compute(path, rows, num_rows) if self.ranks == 1 else self._dispatched(path, rows, num_rows)
        return _permuted(autograd, result, order)

    def _dispatched(self, path: str, rows: Tensor, num_rows: int) -> Tensor:
        """Exchange rows between the ranks that divide the experts (`parallel.expert_parallel.Dispatch`)."""
        autograd, num_received = self.autograd, received_rows(num_rows, self.ranks, self.load)

        def numbers(count: int) -> Tensor:
            return autograd.new(count, "int64")

        there = autograd.run_costly("all_to_all", lambda: numbers(self.args.num_experts))
        rows = _exchanged(autograd, rows, num_received * self.dim)
        experts = [numbers(self.args.num_experts), numbers(self.args.num_experts)]
        experts.pop(0)
        of_rows = [numbers(num_received), numbers(num_received)]
        of_rows.pop(0)
        experts.clear()
        values, order = numbers(num_received), numbers(num_received)
        del values
        of_rows.clear()
        places = _inverse(autograd, order)
        rows = _permuted(autograd, rows, places)
        rows = self._compute(path, rows, num_received)
        rows = _permuted(autograd, rows, order)
        del there
        return _exchanged(autograd, rows, num_rows * self.dim)

    def _compute(self, path: str, rows: Tensor, num_rows: int) -> Tensor:
        autograd, args = self.autograd, self.args
        grouped = is_grouped(self.kernels, rows.dtype, (self.dim, args.hidden_dim))
        product = partial(_product, autograd, args.num_experts // self.ranks, grouped)
        weights = {name: self.weight(f"{path}.w{name}") for name in "123"}
        biases = {name: self.weight(f"{path}.b{name}") if args.expert_bias else None for name in "123"}
        gate, up = (product(rows, weights[name], biases[name], args.hidden_dim) for name in "13")
        if args.gate_limit is None:
            hidden = ops.multiply(autograd, ops.activation(autograd, gate), up)
        else:
            gate, up = _clamp(autograd, gate, 1), _clamp(autograd, up, 2)
            gated = ops.multiply(autograd, gate, ops.saving_result(autograd, ops.scale(autograd, gate)))
            hidden = ops.multiply(autograd, gated, ops.add_number(autograd, up))
            del gated
        return product(hidden, weights["2"], biases["2"], self.dim)

    def _with_losses(self, output: Tensor, logits: Tensor, choice: _Choice) -> Tensor:
        autograd, num_experts = self.autograd, self.args.num_experts
        if self.args.balance_loss:
            num_sequences = choice.experts.numel // (self.args.top_k * self.seq_len)
            loss = _balance_loss(autograd, choice, num_experts, num_sequences)
            output = _with_loss(autograd, output, loss)
        if self.args.z_loss:
            wide = ops.cast(autograd, logits, "float32")
            output = _with_loss(autograd, output, ops.z_loss(autograd, wide, wide.numel // num_experts))
        return output


def _gather(autograd: Autograd, scores: Tensor, experts: Tensor) -> Tensor:
    saved, numel = autograd.save(scores, experts), scores.numel

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        zeros = autograd.new(numel, "float32", _BACKWARD)
        result = autograd.new(numel, "float32", _BACKWARD)
        del zeros
        return (result,)

    return autograd.record(autograd.new(experts.numel, "float32"), (scores,), backward, saved)


def _divide_by_sum(autograd: Autograd, x: Tensor, num_rows: int) -> Tensor:
    """Divide each row by its sum, to which a number is added."""
    before_addition, total = autograd.new(num_rows, "float32"), autograd.new(num_rows, "float32")
    del before_addition
    saved = autograd.save(x, total)
    return autograd.record(autograd.new(x.numel, "float32"), (x,), _divided_by_sum(autograd, x.numel), saved)


def _divided_by_sum(autograd: Autograd, numel: int) -> Backward:
    """Return the backward of rows that are divided by their sums."""

    def new() -> Tensor:
        return autograd.new(numel, "float32", _BACKWARD)

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        temporaries = [new(), new(), new()]
        of_divisor = new()
        temporaries.clear()
        of_dividend = new()
        of_sum = autograd.new(saved[1].numel, "float32", _BACKWARD)
        del of_divisor
        gradient.clear()
        total = new()
        del of_dividend, of_sum
        return (total,)

    return backward


def _spread(autograd: Autograd, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Return the rows of the tokens, one for each of their choices (`_Spread`)."""
    numel, dtype = x.numel, x.dtype
    tokens = autograd.new(order.numel, "int64")
    output = autograd.new(numel * top_k, dtype)
    del tokens

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        rows = autograd.new(numel * top_k, dtype, _BACKWARD)
        total = autograd.new(numel, dtype, _BACKWARD)
        del rows
        return (total,)

    return autograd.record(output, (x,), backward, autograd.save(inverse))


def _permuted(autograd: Autograd, rows: Tensor, inverse: Tensor) -> Tensor:
    """Return the rows in another order (`Permuted`)."""
    numel, dtype = rows.numel, rows.dtype

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return (autograd.new(numel, dtype, _BACKWARD),)

    return autograd.record(autograd.new(numel, dtype), (rows,), backward, autograd.save(inverse))


def _exchanged(autograd: Autograd, rows: Tensor, numel: int) -> Tensor:
    """Return the rows that an all-to-all brings. The backward sends gradients the other way."""
    num_sent, dtype = rows.numel, rows.dtype

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return (autograd.new(num_sent, dtype, _BACKWARD),)

    output = autograd.run_costly("all_to_all", lambda: autograd.new(numel, dtype)).detached()
    return autograd.record(output, (rows,), backward)


def _inverse(autograd: Autograd, order: Tensor) -> Tensor:
    places, inverse = autograd.new(order.numel, "int64"), autograd.new(order.numel, "int64")
    del places
    return inverse


def _product(
    autograd: Autograd,
    num_experts: int,
    is_grouped: bool,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    width_out: int,
) -> Tensor:
    """Multiply each row by the matrix of its expert, and add a bias (`grouped_product`, `looped_product`)."""
    weight = ops.view(autograd, weight) if is_grouped else weight
    numel, dtype = rows.numel, rows.dtype
    num_rows = numel * num_experts * width_out // weight.numel
    own_bias = None if is_grouped else bias
    needs_rows, needs_weight = rows.node is not None, weight.node is not None
    new = autograd.new if is_grouped else autograd.product

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        for_rows = new(numel, dtype, _BACKWARD) if needs_rows else None
        for_weight = new(weight.numel, weight.dtype, _GRADIENT) if needs_weight else None
        if own_bias is None:
            return for_rows, for_weight
        if own_bias.node is None:
            return for_rows, for_weight, None
        parts = autograd.new(own_bias.numel, own_bias.dtype, _BACKWARD)
        for_bias = autograd.new(own_bias.numel, own_bias.dtype, _GRADIENT)
        del parts
        return for_rows, for_weight, for_bias

    inputs = (rows, weight) if own_bias is None else (rows, weight, own_bias)
    saved = autograd.save(*((rows,) if needs_weight else ()))

    def compute() -> Tensor:
        return new(num_rows * width_out, dtype)

    output = autograd.run_costly("grouped_mm", compute).detached() if is_grouped else compute()
    result = autograd.record(output, inputs, backward, saved)
    return _add_bias(autograd, result, bias, num_rows) if is_grouped and bias is not None else result


def _add_bias(autograd: Autograd, result: Tensor, bias: Tensor, num_rows: int) -> Tensor:
    """Add the bias of its expert to each row (`_OfRows`)."""
    index = autograd.new(num_rows, "int64")

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        ones = autograd.new(num_rows * MIN_GROUPED_WIDTH, bias.dtype, _BACKWARD)
        sums = autograd.new(bias.numel * MIN_GROUPED_WIDTH, bias.dtype, _BACKWARD)
        for_bias = autograd.new(bias.numel, bias.dtype, _GRADIENT)
        del ones, sums
        return (for_bias,)

    of_rows = autograd.record(autograd.new(result.numel, bias.dtype), (bias,), backward)
    del index
    return ops.add(autograd, result, of_rows)


def _clamp(autograd: Autograd, x: Tensor, num_limits: int) -> Tensor:
    """Limit a tensor on one or on both sides."""
    saved, numel, dtype = autograd.save(x), x.numel, x.dtype

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        is_inside = [autograd.new(numel, "bool", _BACKWARD) for _ in range(num_limits)]
        result = autograd.new(numel, dtype, _BACKWARD)
        del is_inside
        return (result,)

    return autograd.record(autograd.new(numel, dtype), (x,), backward, saved)


def _combined(autograd: Autograd, outputs: Tensor, weights: Tensor, top_k: int) -> Tensor:
    """Return the weighted sums of the outputs (`_Combined`)."""
    numel, dtype, num_weights = outputs.numel, outputs.dtype, weights.numel
    num_tokens, saved = num_weights // top_k, autograd.save(outputs, weights)

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        for_outputs, of_choices = autograd.new(numel, dtype, _BACKWARD), []
        for _ in range(top_k):
            products = autograd.new(numel // top_k, "float32", _BACKWARD)
            of_choices.append(autograd.new(num_tokens, "float32", _BACKWARD))
            del products
        return for_outputs, autograd.new(num_weights, "float32", _BACKWARD)

    return autograd.record(autograd.new(numel // top_k, "float32"), (outputs, weights), backward, saved)


def _balance_loss(autograd: Autograd, choice: _Choice, num_experts: int, num_sequences: int) -> Tensor:
    """Return the sum of the balance losses (`balance_losses`)."""
    scores, small = choice.scores, num_sequences * num_experts
    numel, num_tokens = scores.numel, scores.numel // num_experts
    counts, ones = autograd.new(small, "float32"), autograd.new(choice.experts.numel, "float32")
    del ones
    total = autograd.new(num_tokens, "float32")
    of_division = autograd.save(scores, total)
    shares = autograd.new(numel, "float32")
    quotients = [autograd.new(small, "float32") for _ in range(3)]
    of_product = autograd.save(quotients[0])
    quotients.append(autograd.new(small, "float32"))
    del quotients, shares, counts, total

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        of_shares = [autograd.new(small, "float32", _BACKWARD) for _ in range(2)]
        return _divided_by_sum(autograd, numel)(of_shares, saved)

    return autograd.record(Tensor(None, 1, "float32"), (scores,), backward, of_division, of_product)


def _with_loss(autograd: Autograd, output: Tensor, loss: Tensor) -> Tensor:
    """Return the output unchanged. In backward, the loss takes the gradient 1 (`_WithLoss`)."""

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return gradient.pop(), Tensor(None, 1, "float32")

    return autograd.record(Tensor(output.storage, output.numel, output.dtype), (output, loss), backward)
