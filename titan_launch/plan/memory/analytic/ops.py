"""Operations without values: the tensors that each operation allocates, saves for backward, and frees. No torch.

Sizes and order are those of PyTorch's kernels and derivative formulas, as a `TorchDispatchMode` shows them.
For CUDA's own kernels (fused RMSNorm, flash attention), sizes follow the derivative formulas. Workspaces inside a
kernel do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from titan_launch.plan.hardware import Kernels
from titan_launch.plan.memory.analytic.autograd import Autograd
from titan_launch.plan.memory.analytic.tensors import Tensor
from titan_launch.plan.memory.ledger import Category

_BACKWARD, _GRADIENT = Category.BACKWARD, Category.UNSHARDED_GRADIENTS


def cast(autograd: Autograd, x: Tensor, dtype: str) -> Tensor:
    """Return `x.to(dtype)`, which is `x` itself if it has that dtype."""
    if x.dtype == dtype:
        return x
    numel, before = x.numel, x.dtype

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return (autograd.new(numel, before, _BACKWARD),)

    return autograd.record(autograd.new(numel, dtype), (x,), backward)


def view(autograd: Autograd, x: Tensor) -> Tensor:
    """Return a view of `x` in another shape. The view shares the memory and has its own node."""
    return autograd.record(Tensor(x.storage, x.numel, x.dtype), (x,), lambda gradient, saved: (gradient.pop(),))


def embedding(autograd: Autograd, weight: Tensor, num_tokens: int, width: int, indices: Tensor | None = None) -> Tensor:
    """Look up rows of a table. Backward needs the indices: by default the tokens, whose memory is already counted."""
    saved = autograd.save(*(() if indices is None else (indices,)))

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return (autograd.new(weight.numel, weight.dtype, _GRADIENT),)

    return autograd.record(autograd.new(num_tokens * width, weight.dtype), (weight,), backward, saved)


def linear(autograd: Autograd, x: Tensor, weight: Tensor, width_in: int, bias: Tensor | None = None) -> Tensor:
    """Multiply with the transpose of a weight [width_out, width_in], and add a bias. The transpose is a view."""
    weight = view(autograd, weight)
    numel, dtype = x.numel, x.dtype
    needs_input, needs_weight = x.node is not None, weight.node is not None
    saved = autograd.save(x) if needs_weight else autograd.save()

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        for_weight = autograd.product(weight.numel, weight.dtype, _GRADIENT) if needs_weight else None
        for_x = autograd.product(numel, dtype, _BACKWARD) if needs_input else None
        if bias is None:
            return for_x, for_weight
        return for_x, for_weight, autograd.new(bias.numel, bias.dtype, _GRADIENT) if bias.node is not None else None

    num_results = numel // width_in * (weight.numel // width_in)
    new = autograd.product if bias is None else autograd.new  # cuBLASLt adds the bias, with 1 MiB
    output = autograd.run_costly("mm", lambda: new(num_results, dtype)).detached()
    return autograd.record(output, (x, weight) if bias is None else (x, weight, bias), backward, saved)


def add_rows(autograd: Autograd, x: Tensor, rows: Tensor) -> Tensor:
    """Add the same rows to each sequence. Their gradient is a sum over the sequences."""
    num_rows, dtype, needs_rows = rows.numel, rows.dtype, rows.node is not None

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return gradient[0], autograd.new(num_rows, dtype, _BACKWARD) if needs_rows else None

    return autograd.record(autograd.new(x.numel, x.dtype), (x, rows), backward)


def add_number(autograd: Autograd, x: Tensor) -> Tensor:
    """Add a number to each element. The gradient is that of the result."""
    return autograd.record(autograd.new(x.numel, x.dtype), (x,), lambda gradient, saved: (gradient.pop(),))


def scale(autograd: Autograd, x: Tensor) -> Tensor:
    """Multiply with a number. Nothing is saved."""
    numel, dtype = x.numel, x.dtype

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return (autograd.new(numel, dtype, _BACKWARD),)

    return autograd.record(autograd.new(numel, dtype), (x,), backward)


def saving_result(autograd: Autograd, x: Tensor) -> Tensor:
    """Compute tanh, sigmoid, softmax or log-softmax. They save their results."""
    numel, dtype, output = x.numel, x.dtype, autograd.new(x.numel, x.dtype)
    saved = autograd.save(output)

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return (autograd.new(numel, dtype, _BACKWARD),)

    return autograd.record(output, (x,), backward, saved)


def add(autograd: Autograd, a: Tensor, b: Tensor) -> Tensor:
    """Add two tensors. Both addends get the same gradient."""

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return gradient[0], gradient.pop()

    return autograd.record(autograd.new(a.numel, a.dtype), (a, b), backward)


def multiply(autograd: Autograd, a: Tensor, b: Tensor) -> Tensor:
    """Multiply elementwise."""
    factors, numel, dtype = (a, b), a.numel, a.dtype
    needed = [x.node is not None for x in factors]
    saved = autograd.save(*(other for other, is_needed in zip(factors[::-1], needed, strict=True) if is_needed))

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return [autograd.new(numel, dtype, _BACKWARD) if is_needed else None for is_needed in needed]

    return autograd.record(autograd.new(numel, dtype), (a, b), backward, saved)


def activation(autograd: Autograd, x: Tensor) -> Tensor:
    """Compute an activation function, SiLU or GELU, and save its input."""
    saved, numel, dtype = autograd.save(x), x.numel, x.dtype

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return (autograd.new(numel, dtype, _BACKWARD),)

    return autograd.record(autograd.new(numel, dtype), (x,), backward, saved)


def rotate(autograd: Autograd, x: Tensor, angles: int = 0) -> Tensor:
    """Apply the rotary embedding (`models.layers.RotaryEmbedding`): a product of complex numbers in fp32.

    Backward needs the angles. They are saved if they are rows of the table for the positions in documents; `angles` is
    then their number of elements. Otherwise they are the table itself, which is a buffer.
    """
    numel, dtype, new = x.numel, x.dtype, autograd.new
    rows = new(angles, "float32")
    wide = x if dtype == "float32" else new(numel, "float32")
    saved = autograd.save(rows)
    rotated = new(numel, "float32")
    output = rotated if dtype == "float32" else new(numel, dtype)
    del wide, rotated, rows

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        wide = gradient.pop() if dtype == "float32" else new(numel, "float32", _BACKWARD)
        gradient.clear()
        conjugate = new(angles, "float32", _BACKWARD)
        rotated = new(numel, "float32", _BACKWARD)
        del wide, conjugate
        return (rotated if dtype == "float32" else new(numel, dtype, _BACKWARD),)

    return autograd.record(output, (x,), backward, *((saved,) if angles else ()))


def attention(
    autograd: Autograd, q: Tensor, k: Tensor, v: Tensor, num_rows: int, seq_len: int, kernels: Kernels
) -> Tensor:
    """Compute causal flash attention. Keys and values may have fewer heads than queries.

    It saves its inputs, its output, and an fp32 logarithm for each of `num_rows` = tokens x query heads. In fp32, CUDA
    runs memory-efficient attention instead. That kernel requires as many key and value heads as query heads, and pads
    the logarithms of each sequence to a multiple of 32.
    """
    if kernels == "cuda" and q.dtype == "float32":
        num_rows = num_rows // seq_len * (-(-seq_len // 32) * 32)
        if k.numel < q.numel:
            k, v = (_repeat(autograd, x, q.numel) for x in (k, v))
    return _fused_attention(autograd, q, k, v, num_rows)


def masked_attention(
    autograd: Autograd, q: Tensor, k: Tensor, v: Tensor, num_rows: int, num_pairs: int, kernels: Kernels
) -> Tensor:
    """Compute attention with a sliding window or documents, or on CUDA with a soft cap or sinks:
    `models.attention.masked_attention`.

    On CUDA, FlexAttention saves the tensors of flash attention. A CPU runs flash attention with a mask of `num_pairs`
    elements, which is made from a table of allowed pairs. With documents each sequence has a mask of its own.
    """
    if kernels == "cuda":
        return _fused_attention(autograd, q, k, v, num_rows)
    allowed = autograd.new(num_pairs, "bool")
    output = _fused_attention(autograd, q, k, v, num_rows, (autograd.new(num_pairs, q.dtype),))
    del allowed
    return output


def _fused_attention(
    autograd: Autograd,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_rows: int,
    mask: tuple[Tensor, ...] = (),
) -> Tensor:
    saved = autograd.save(q, k, v, *mask)
    shapes = [(x.numel, x.dtype) for x in (q, k, v)]

    def compute() -> tuple[Tensor, Tensor]:
        return autograd.new(q.numel, q.dtype), autograd.new(num_rows, "float32")

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return [autograd.new(numel, dtype, _BACKWARD) for numel, dtype in shapes]

    output, logarithms = autograd.run_costly("attention", compute)
    results = autograd.save(output, logarithms)
    return autograd.record(output.detached(), (q, k, v), backward, saved, results)


def attention_sinks(autograd: Autograd, attended: Tensor, weight: Tensor, num_rows: int) -> Tensor:
    """Multiply the result of attention by a number for each of `num_rows` = tokens x heads, in fp32
    (`models.layers.AttentionSinks`). The gradient of the logarithms, which attention takes, is not counted."""
    numel, dtype, num_heads = attended.numel, attended.dtype, weight.numel

    def new(size: int, category: Category = _BACKWARD, dtype: str = "float32") -> Tensor:
        return autograd.new(size, dtype, category)

    differences = new(num_rows, Category.ACTIVATIONS)
    shares = new(num_rows, Category.ACTIVATIONS)
    del differences
    saved = autograd.save(attended, shares)
    product = new(numel, Category.ACTIVATIONS)
    output = product if dtype == "float32" else new(numel, Category.ACTIVATIONS, dtype)
    del product, shares

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        wide = gradient.pop() if dtype == "float32" else new(numel)
        gradient.clear()
        for_attended, products = new(numel), new(numel)
        del wide
        narrow = for_attended if dtype == "float32" else new(numel, dtype=dtype)
        del for_attended
        for_shares = new(num_rows)
        del products
        for_differences = new(num_rows)
        del for_shares
        negative = new(num_rows)
        for_weight = new(num_heads, _GRADIENT, weight.dtype)
        del for_differences, negative
        return narrow, for_weight

    return autograd.record(output, (attended, weight), backward, saved)


def _repeat(autograd: Autograd, x: Tensor, numel: int) -> Tensor:
    """Repeat the heads of keys or values until there are as many as query heads."""
    before, dtype = x.numel, x.dtype

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return (autograd.new(before, dtype, _BACKWARD),)

    return autograd.record(autograd.new(numel, dtype), (x,), backward)


def rms_norm(autograd: Autograd, x: Tensor, weight: Tensor, kernels: Kernels) -> Tensor:
    """Normalize by the root mean square over the last axis: one kernel on CUDA if input and weight have one dtype."""
    if kernels == "cuda" and x.dtype == weight.dtype:
        return _norm(autograd, x, (weight,), x.numel // weight.numel)
    return _composite_rms_norm(autograd, x, weight)


def layer_norm(autograd: Autograd, x: Tensor, weight: Tensor, bias: Tensor, kernels: Kernels) -> Tensor:
    """Normalize in one kernel, which saves mean and inverse standard deviation of each row.

    On CUDA these statistics are fp32. On a CPU they have the input's dtype if the weight has it too, else fp32.
    """
    dtype = x.dtype if kernels == "cpu" and x.dtype == weight.dtype else "float32"
    return _norm(autograd, x, (weight, bias), 2 * (x.numel // weight.numel), dtype)


def batch_norm(autograd: Autograd, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalize in one kernel, which saves the batch's mean and inverse standard deviation of each channel."""
    return _norm(autograd, x, (weight, bias), 2 * weight.numel)


def synchronized_batch_norm(autograd: Autograd, x: Tensor, weight: Tensor, bias: Tensor, ranks: int) -> Tensor:
    """Normalize as `parallel.synchronized_batchnorm` does over `ranks` ranks: with several fp32 operations. They save
    the input and two numbers for each channel."""
    numel, dtype, new = x.numel, x.dtype, autograd.new
    is_wide, needs_weight, needs_bias = dtype == "float32", weight.node is not None, bias.node is not None
    wide = None if is_wide else new(numel, "float32")
    deviations = new(numel, "float32")
    del wide, deviations
    gathered = autograd.run_costly("all_gather", lambda: new(ranks * (1 + 2 * weight.numel), "float32"))
    combined = new(2 * ranks * weight.numel, "float32")  # two temporaries [ranks, channels]
    del gathered, combined
    saved = autograd.save(x, new(2 * weight.numel, "float32"))  # mean and inverse std

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        wide = None if is_wide else new(numel, "float32", _BACKWARD)
        deviations = new(numel, "float32", _BACKWARD)
        del wide
        normalized = new(numel, "float32", _BACKWARD)
        del deviations
        wide = None if is_wide else new(numel, "float32", _BACKWARD)  # the gradient in fp32
        products = new(numel, "float32", _BACKWARD)
        del products
        centred = new(numel, "float32", _BACKWARD)
        for_x = centred if is_wide else new(numel, dtype, _BACKWARD)
        del wide, normalized, centred
        for_weight = new(weight.numel, weight.dtype, _GRADIENT) if needs_weight else None
        return for_x, for_weight, new(bias.numel, bias.dtype, _GRADIENT) if needs_bias else None

    return autograd.record(new(numel, dtype), (x, weight, bias), backward, saved)


def _norm(
    autograd: Autograd, x: Tensor, parameters: Sequence[Tensor], num_statistics: int, dtype: str = "float32"
) -> Tensor:
    numel, input_dtype = x.numel, x.dtype
    saved = autograd.save(x)
    output, statistics = autograd.new(numel, input_dtype), autograd.new(num_statistics, dtype)
    results = autograd.save(statistics)
    needs_input = x.node is not None
    wanted = [(p.numel, p.dtype) if p.node is not None else None for p in parameters]

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        for_x = autograd.new(numel, input_dtype, _BACKWARD) if needs_input else None
        return for_x, *(None if shape is None else autograd.new(*shape, _GRADIENT) for shape in wanted)

    return autograd.record(output, (x, *parameters), backward, saved, results)


def _composite_rms_norm(autograd: Autograd, x: Tensor, weight: Tensor) -> Tensor:
    """Normalize by several fp32 operations. Autograd saves the input and the normalized input."""
    wide = cast(autograd, x, "float32")
    mean_square = _mean_square(autograd, wide, wide.numel // weight.numel)
    normalized = _scale_rows(autograd, wide, mean_square)
    del wide, mean_square
    scaled = _scale_columns(autograd, normalized, weight)
    del normalized
    return cast(autograd, scaled, x.dtype)


def _mean_square(autograd: Autograd, x: Tensor, num_rows: int) -> Tensor:
    """Return rsqrt(mean(x ** 2) + eps) for each of `num_rows` rows."""
    saved, numel = autograd.save(x), x.numel
    squares = autograd.new(numel, "float32")
    result = autograd.new(num_rows, "float32")
    del squares

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        spread = autograd.new(numel, "float32", _BACKWARD)
        power = autograd.new(numel, "float32", _BACKWARD)
        doubled = autograd.new(numel, "float32", _BACKWARD)
        product = autograd.new(numel, "float32", _BACKWARD)
        del spread, power, doubled  # temporaries of one C++ expression
        return (product,)

    return autograd.record(result, (x,), backward, saved)


def _scale_rows(autograd: Autograd, x: Tensor, factor: Tensor) -> Tensor:
    saved, numel, num_rows = autograd.save(x, factor), x.numel, factor.numel

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        for_x = autograd.new(numel, "float32", _BACKWARD)
        products = autograd.new(numel, "float32", _BACKWARD)
        for_factor = autograd.new(num_rows, "float32", _BACKWARD)
        del products
        return for_x, for_factor

    return autograd.record(autograd.new(numel, "float32"), (x, factor), backward, saved)


def _scale_columns(autograd: Autograd, x: Tensor, weight: Tensor) -> Tensor:
    numel, needs_input, needs_weight = x.numel, x.node is not None, weight.node is not None
    saved = autograd.save(x) if needs_weight else autograd.save()

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        for_x = autograd.new(numel, "float32", _BACKWARD) if needs_input else None
        if not needs_weight:
            return for_x, None
        products = autograd.new(numel, "float32", _BACKWARD)
        for_weight = autograd.new(weight.numel, weight.dtype, _GRADIENT)
        del products
        return for_x, for_weight

    return autograd.record(autograd.new(numel, "float32"), (x, weight), backward, saved)


def cross_entropy(autograd: Autograd, logits: Tensor) -> Tensor:
    """Return the scalar loss of fp32 logits."""
    return _negative_log_likelihood(autograd, saving_result(autograd, logits))


def z_loss(autograd: Autograd, logits: Tensor, num_rows: int) -> Tensor:
    """Return the sum of the squared log-sum-exps of fp32 logits. It saves the logits, and one number for each row."""
    numel, of_logits = logits.numel, autograd.save(logits)
    sums = autograd.new(num_rows, "float32")
    of_sums = autograd.save(sums)
    squares = autograd.new(num_rows, "float32")
    del squares

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        of_sums = autograd.new(num_rows, "float32", _BACKWARD)
        temporaries = [autograd.new(numel, "float32", _BACKWARD) for _ in range(2)]  # of one C++ expression
        result = autograd.new(numel, "float32", _BACKWARD)
        del temporaries, of_sums
        return (result,)

    return autograd.record(Tensor(None, 1, "float32"), (logits,), backward, of_logits, of_sums)


def chunked_loss(
    autograd: Autograd, x: Tensor, weight: Tensor, width_in: int, num_chunks: int, is_capped: bool = False
) -> Tensor:
    """Compute the loss in the output layer, in chunks of classes (`models.chunked_loss`): a scalar.

    It saves its inputs and two fp32 numbers for each token, also with a z-loss. `is_capped`: logits have a soft cap.
    """
    x = view(autograd, x)
    rows, dtype, new = x.numel // width_in, x.dtype, autograd.new
    num_classes = weight.numel // width_in
    largest = -(-num_classes // (8 * num_chunks)) * 8
    sizes = [rows * min(largest, num_classes - first) for first in range(0, num_classes, largest)]
    running = new(3 * rows, "float32")
    for size in sizes:
        logits = autograd.product(size, dtype)
        if is_capped:
            quotient = new(size, dtype)
            tangent = new(size, dtype)
            del quotient
            logits = new(size, dtype)  # the product is freed only now
            del tangent
        exponentials = new(size, "float32")
        of_rows = new(6 * rows, "float32")  # indices, and the next running numbers
        del logits, exponentials, of_rows
    needs_input, needs_weight = x.node is not None, weight.node is not None
    saved = autograd.save(x, new(2 * rows, "float32"))
    del running

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        factors = new(4 * rows, "float32", _BACKWARD)
        summed = new(rows * width_in, "float32", _BACKWARD) if needs_input else None
        for_weight = new(weight.numel, weight.dtype, _GRADIENT) if needs_weight else None
        for size in sizes:
            logits = autograd.product(size, dtype, _BACKWARD)
            capped = [new(size, dtype, _BACKWARD) for _ in range(3)] if is_capped else []  # quotient, tanh, logits
            del capped[:1]
            wide = new(size, "float32", _BACKWARD)
            of_logits = wide if dtype == "float32" else new(size, dtype, _BACKWARD)
            del wide
            if is_capped:  # gradients of the product, of tanh and of the quotient
                of_product = new(size, dtype, _BACKWARD)
                of_tanh = new(size, dtype, _BACKWARD)
                del of_product, capped[:1]
                of_logits = new(size, dtype, _BACKWARD)
                del of_tanh, capped[:]
            del logits
            if needs_weight:
                autograd.ledger.product()
            product = autograd.product(rows * width_in, dtype, _BACKWARD) if needs_input else None
            del product, of_logits
        del factors
        if summed is None or dtype == "float32":
            return summed, for_weight
        return new(rows * width_in, dtype, _BACKWARD), for_weight

    return autograd.record(Tensor(None, 1, "float32"), (x, weight), backward, saved)


def _negative_log_likelihood(autograd: Autograd, logarithms: Tensor) -> Tensor:
    saved, numel = autograd.save(logarithms), logarithms.numel

    def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return (autograd.new(numel, "float32", _BACKWARD),)

    return autograd.record(Tensor(None, 1, "float32"), (logarithms,), backward, saved)
