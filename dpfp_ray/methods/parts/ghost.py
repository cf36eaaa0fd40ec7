"""Ghost clipping: the norms of per-example gradients without the gradients.

A linear layer's gradient from one row is Σₜ gₜ aₜᵀ over its tokens, so its squared norm is
Σₛₜ (gₛ·gₜ)(aₛ·aₜ): two small Gram matrices instead of one of the weight's size (Li et al. 2022).

Opacus then runs a second backward pass with rescaled losses. We keep the first pass's (a, g) pairs
instead and rescale those: Σᵢ cᵢ Σₜ gₜ aₜᵀ is one matrix product a layer ("book-keeping", Bu et al.
2023). A step costs what plain training costs plus the norms, and what is summed is to the bit what
was measured, also in bf16 on a CPU. On a GPU in bf16, (a, g) are kept as they are and cᵢ gₜ is
rounded to bf16; what that can add to a row's norm is counted before its factor is chosen.

The rows of one person are more tokens of one example: the same formulas hold for them side by side.
Of rows that are packed into one sequence, Gram matrices count where both tokens are of one row.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, functional

from dpfp_ray.data.batches import PLACE, ROW
from dpfp_ray.data.split import by_size
from dpfp_ray.methods.parts.per_example import (
    Clipping,
    add_weighted,
    clip_factors,
    gradient,
    is_norm,
    needs_inputs,
    norm_gradients,
    per_example_gradients,
    product,
    sum_by_example,
    sum_tokens,
    tokens,
)
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.scopes import woken
from dpfp_ray.system.errors import UserError

# A module's input and the gradient at its output, one row per example; of a LayerNorm, which is
# narrow, the gradients of weight and bias themselves.
Use = tuple[Tensor, Tensor]
Squares = dict[Tensor, Tensor]  # by weight
ROUNDING = 2.0**-8  # of a number to bf16, relative to it
CHUNK = 2**25  # numbers in a temporary: rows are taken in groups that keep it within 128 MiB


class GhostClipping(Clipping):
    def __init__(self, model: Module) -> None:
        super().__init__(model)
        self.uses: dict[Module, list[Use]] = {}
        self.rows: dict[Module, Tensor] = {}  # of their tokens, where these are of packed rows

    def take(
        self, module: Module, inputs: Tensor, backprops: Tensor, row: Tensor | None = None
    ) -> None:
        if not needs_inputs(module):
            of_rows = sum_tokens(backprops, row, self.count)
            backprops = of_rows[:, None]  # all that a bias needs of a row
        elif is_norm(module):
            inputs, backprops = norm_gradients(module, inputs, backprops, row, self.count)
        elif row is not None:
            self.rows[module] = row
        self.uses.setdefault(module, []).append((inputs, backprops))

    def squares(self, example: Tensor | None = None) -> Squares:
        """Each example's squared gradient norm, for each weight of which a gradient has arrived."""
        found: Squares = {}
        products = Products(self.count)
        for module, uses in self.uses.items():
            if module in self.rows:
                own = products.squared_norms(module, uses, self.rows[module])
            elif example is None:
                own = squared_norms(module, uses)
            else:
                own = squared_norms_of_groups(module, uses, example)
            for weight, square in own.items():  # of two modules, if they share it
                found[weight] = found[weight] + square if weight in found else square
        return found

    def rounding(self, example: Tensor | None = None) -> Tensor | float:
        """How much longer an example's gradient may become where `add_scaled` rounds it to bf16.

        Rounding changes each number of cgₜ by at most u = 2⁻⁸ of it, so Σₜ cgₜ aₜᵀ by at most
        c u Σₜ ‖gₜ‖‖aₜ‖ (docs/privacy.md, section 7).
        """
        found = []
        for module, uses in self.uses.items():
            if uses[0][1].dtype == torch.bfloat16:
                row = self.rows.get(module)
                own = [_lengths(inputs) * _lengths(outputs) for inputs, outputs in uses]
                of_rows = [one if row is None else sum_tokens(one, row, self.count) for one in own]
                total = torch.stack([one.flatten(1).sum(1) for one in of_rows]).sum(0)
                found.append(sum_by_example(total, example))
        return ROUNDING * torch.stack(found).square().sum(0).sqrt() if found else 0.0

    def add_clipped(
        self, losses: Tensor, clip: float, style: str = "abadi", example: Tensor | None = None
    ) -> Tensor:
        self.run_hooks(losses)
        norms = torch.stack(list(self.squares(example).values())).sum(0).sqrt()
        norms += self.rounding(example)
        finite = sum_by_example(losses.detach(), example).isfinite() & norms.isfinite()
        if not finite.all():
            self.uses.clear()
        scale = clip_factors(norms, clip, style)
        if example is not None:
            finite, scale = finite[example], scale[example]
        while self.uses:
            module, uses = self.uses.popitem()
            row = self.rows.get(module)
            add_scaled(module, uses, scale if row is None else scale[row.clamp(min=0)])
        self.rows.clear()
        return finite


def squared_norms_of_groups(module: Module, uses: list[Use], example: Tensor) -> Squares:
    """As `squared_norms`, of the sum of the gradients of all rows with one `example`.

    Examples of equally many rows are taken together, so nothing is padded and none goes alone.
    """
    found: Squares = {}
    for examples, rows in by_size(example.cpu().numpy()):
        index = torch.from_numpy(rows).to(example.device)
        # (examples, rows, tokens, width): their tokens are simply more tokens.
        joined = [(inputs[index], outputs[index]) for inputs, outputs in uses]
        for parameter, squares in squared_norms(module, joined, rows.shape[1]).items():
            whole = found.setdefault(parameter, squares.new_zeros(int(example.max()) + 1))
            whole[torch.from_numpy(examples).to(example.device)] = squares
    return found


class Products:
    """Sums over pairs of tokens of one row, where rows lie side by side in sequences.

    Where tokens of two rows meet, their product counts 0 times. An infinite one so makes its
    neighbours undefined, for which the whole part is computed again, padded.
    """

    def __init__(self, count: int | None) -> None:
        self.count = count
        self.inputs = self.rows = self.of_inputs = self.of_rows = torch.empty(0)

    def among(self, inputs: Tensor) -> Tensor:
        """aₛ·aₜ. Query, key and value have one input, and ask one after the other."""
        if not _same_memory(inputs, self.inputs):
            self.inputs, self.of_inputs = inputs, product(inputs, inputs.mT)
        return self.of_inputs

    def together(self, row: Tensor) -> Tensor:
        """1 where two tokens are of one row, else 0."""
        if not _same_memory(row, self.rows):
            self.rows, self.of_rows = row, (row[:, :, None] == row[:, None, :]).float()
        return self.of_rows

    def squared_norms(self, module: Module, uses: list[Use], row: Tensor) -> Squares:
        """As `squared_norms`; `row` is that of each token."""
        if type(module) is Linear:
            pairs = [(tokens(inputs), tokens(outputs)) for inputs, outputs in uses]
        elif type(module) is Embedding:
            pairs = [_without_padding(module, use) for use in uses]
        else:
            raise TypeError(f"tokens of packed rows have no ghost in a {type(module).__name__}")
        inputs, outputs = (_side_by_side(list(side)) for side in zip(*pairs, strict=True))
        row = row if len(uses) == 1 else _side_by_side([row] * len(uses))
        bias = module.bias if type(module) is Linear else None
        bias = None if bias is None or not bias.requires_grad else bias
        found: dict[Tensor, list[Tensor]] = {module.weight: []}
        group = max(1, CHUNK // (2 * row.shape[1] ** 2))
        for r, a, g in zip(*(side.split(group) for side in (row, inputs, outputs)), strict=True):
            products = product(g, g.mT).mul_(self.together(r))
            if bias is not None:  # its gradient is Σ gₜ
                found.setdefault(bias, []).append(products.sum(2, keepdim=True))
            products *= self.among(a) if type(module) is Linear else a[:, :, None] == a[:, None, :]
            found[module.weight].append(products.sum(2, keepdim=True))
        return {
            weight: sum_tokens(torch.cat(of_tokens), row, self.count)[:, 0].clamp(min=0)
            for weight, of_tokens in found.items()
        }


def squared_norms(module: Module, uses: list[Use], joined: int = 0) -> Squares:
    """Each row's squared gradient norm, for each of the module's trainable weights.

    With `joined` a row is that many of the module's own rows, in a second dimension.
    """
    if type(module) is Linear:
        outputs = _side_by_side([tokens(outputs) for _, outputs in uses])
        squares = {}
        if module.weight.requires_grad:
            inputs = _side_by_side([tokens(inputs) for inputs, _ in uses])
            squares[module.weight] = _linear_squares(inputs, outputs)
        if module.bias is not None and module.bias.requires_grad:
            squares[module.bias] = _wide(outputs).sum(1).square().sum(1)
        return squares
    if is_norm(module):
        found = [torch.stack(part).sum(0) for part in zip(*uses, strict=True)]
        return {
            own: tokens(value).sum(1).square().sum(1)
            for own, value in zip((module.weight, module.bias), found, strict=True)
            if own is not None and own.requires_grad
        }
    if type(module) is Embedding:
        pairs = [_without_padding(module, use) for use in uses]
        ids = _side_by_side([ids for ids, _ in pairs])
        outputs = _side_by_side([outputs for _, outputs in pairs])
        return {module.weight: _embedding_squares(ids, outputs)}
    parts = [
        {p: sample.flatten(1).square().sum(1) for p, sample in samples.items()}
        for _, samples in _whole_gradients(module, uses, joined)
    ]
    return {p: torch.cat([part[p] for part in parts]) for p in parts[0]}


def add_scaled(module: Module, uses: list[Use], scale: Tensor) -> None:
    """Add Σᵢ scaleᵢ · (row i's gradient) to `.grad` of the module's trainable weights; where rows
    are packed, `scale` is that of each token."""
    of_tokens = scale.reshape(len(scale), -1, 1)
    if type(module) is Linear:
        for inputs, outputs in uses:
            scaled = (tokens(outputs) * of_tokens).flatten(0, 1)
            if module.weight.requires_grad:
                a, total = tokens(inputs).flatten(0, 1), gradient(module.weight)
                if a.dtype == torch.bfloat16:
                    total += product(scaled.bfloat16().T, a)
                else:
                    total.addmm_(scaled.T, a)
            if module.bias is not None and module.bias.requires_grad:
                gradient(module.bias).add_(scaled.sum(0))
    elif is_norm(module):
        for use in uses:
            for own, value in zip((module.weight, module.bias), use, strict=True):
                if own is not None and own.requires_grad:
                    add_weighted(own, value, scale)
    elif type(module) is Embedding:
        for use in uses:
            ids, outputs = _without_padding(module, use)
            scaled = (outputs * of_tokens).flatten(0, 1)
            gradient(module.weight).index_add_(0, ids.flatten(), scaled)
    else:
        for rows, samples in _whole_gradients(module, uses):
            for parameter, sample in samples.items():
                add_weighted(parameter, sample, scale[rows])


def _whole_gradients(
    module: Module, uses: list[Use], joined: int = 0
) -> Iterator[tuple[slice, dict[Tensor, Tensor]]]:
    """Fallback for layer types without a ghost norm: per-example gradients in chunks."""
    group = max(1, CHUNK // (max(1, joined) * sum(p.numel() for p in module.parameters())))
    for start in range(0, len(uses[0][0]), group):
        rows = slice(start, start + group)
        total: dict[Tensor, Tensor] = {}
        for inputs, backprops in uses:
            own = inputs[rows], backprops[rows]
            if joined:
                own = own[0].flatten(0, 1), own[1].flatten(0, 1)
            samples = per_example_gradients(module, *own)
            for parameter, sample in samples.items():
                if joined:
                    sample = sample.unflatten(0, (-1, joined)).sum(1)
                total[parameter] = total[parameter] + sample if parameter in total else sample
        yield rows, total


def _lengths(value: Tensor) -> Tensor:
    """Of each token's vector, (rows, tokens, 1)."""
    return torch.linalg.vector_norm(tokens(value), dim=2, keepdim=True, dtype=torch.float32)


def _wide(value: Tensor) -> Tensor:
    """bf16 as fp32, for sums."""
    return value.float() if value.dtype == torch.bfloat16 else value


def _same_memory(one: Tensor, other: Tensor) -> bool:
    # A tensor that wraps another one has the address 0, as all of its kind.
    return one.data_ptr() == other.data_ptr() != 0 and one.shape == other.shape


def _side_by_side(uses: list[Tensor]) -> Tensor:
    """Several uses of a module as one of so many more tokens: gradients add up just the same."""
    return uses[0] if len(uses) == 1 else torch.cat(uses, 1)


def _linear_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    length, width_in, width_out = inputs.shape[1], inputs.shape[2], outputs.shape[2]
    if length == 1:
        return _wide(inputs).square().sum((1, 2)) * _wide(outputs).square().sum((1, 2))
    # Many tokens and narrow layers: the gradient itself is the cheaper way.
    ghost = length * (width_in + width_out) <= width_in * width_out
    group = max(1, CHUNK // (2 * length**2 if ghost else width_in * width_out))
    squares = []
    for a, g in zip(inputs.split(group), outputs.split(group), strict=True):
        if ghost:
            squares.append((product(a, a.mT) * product(g, g.mT)).sum((1, 2)).clamp(min=0))
        else:
            squares.append(torch.linalg.vector_norm(product(g.mT, a).flatten(1), dim=1).square())
    return torch.cat(squares)


def _embedding_squares(ids: Tensor, outputs: Tensor) -> Tensor:
    """‖Σ over equal ids of g‖², summed over ids: the products of all tokens with equal ids."""
    length = ids.shape[1]
    group = max(1, CHUNK // (2 * length**2))
    squares = []
    for i, g in zip(ids.split(group), outputs.split(group), strict=True):
        equal = i[:, :, None] == i[:, None, :]
        squares.append((g @ g.mT).mul_(equal).sum((1, 2)).clamp(min=0))
    return torch.cat(squares)


def _without_padding(module: Embedding, use: Use) -> Use:
    """(rows, tokens) ids and (rows, tokens, width) gradients; padding has none, as in torch."""
    ids, outputs = use[0].reshape(use[0].shape[0], -1), tokens(use[1])
    if module.padding_idx is not None:
        outputs = outputs.masked_fill((ids == module.padding_idx).unsqueeze(-1), 0)
    return ids, outputs


# Weights whose gradient cannot be told apart by row: found by trying, and left untrained.

# Three rows of unlike lengths, so that a tensor shared by the batch cannot pass for one row each.
PROBE_LENGTHS = (7, 5, 4)


def freeze_unsplittable(model: Classifier) -> None:
    """Freeze weights whose gradient cannot be told apart by row, and say which.

    Such weights act once for the whole batch (MPNet's and DeBERTa's relative positions), so a row's
    share in their gradient is lost before any hook sees it. An encoder that has no others (XLNet's
    and Longformer's rows are not in the first dimension) is refused.
    """

    def is_knot(name: str) -> bool:
        parts = model.get_submodule(name.rpartition(".")[0]).children()
        trained = any(p.requires_grad for part in parts for p in part.parameters())
        return trained and model.get_parameter(name).requires_grad

    found = unsplittable(model)
    # Opacus takes a module that has weights and parts as one. Without the weights (the biases of
    # DeBERTa's first version), its parts are seen one by one.
    while knots := [name for name in found if is_knot(name)]:
        _freeze(model, knots)
        found = sorted({*knots, *unsplittable(model)})
    _freeze(model, found)
    if found and not any(p.requires_grad for p in model.encoder.parameters()):
        raise UserError(
            f"{type(model.encoder).__name__}: none of the weights to train has a gradient per "
            f"example, because rows share them; use scope: head"
        )
    if found:
        warnings.warn(
            f"{len(found)} weights act on all rows of a batch at once and have no gradient per "
            f"example; dpsgd leaves them as they are: {', '.join(found[:3])}"
            f"{' …' if len(found) > 3 else ''}",
            stacklevel=3,
        )


def _freeze(model: Classifier, names: list[str]) -> None:
    for name, parameter in trainable_parameters(model):
        if name in names:
            parameter.requires_grad_(False)


def unsplittable(model: Classifier) -> list[str]:
    """Names of trainable weights for which hooks and a row-by-row loop disagree on made-up rows."""
    with probing(model):
        return _compare(model)


@contextmanager
def probing(model: Classifier) -> Iterator[None]:
    """Without dropout, so that a loop sees what a batch saw; no trainable matrix is zero."""
    was_training = model.training
    model.train(not model.dropout)
    try:
        with torch.enable_grad(), woken(model):
            yield
    finally:
        model.train(was_training)


def splits_packed(model: Classifier) -> bool:
    """Whether the gradients of packed rows can be told apart: asked of the encoder, which must give
    the norms that padded rows have."""
    if not model.packs:
        return False
    batch, labels = _probe_rows(model)
    real = batch["attention_mask"].bool()
    number, place = (real.nonzero()[:, side][None] for side in (0, 1))
    beside = {"input_ids": batch["input_ids"][real][None], ROW: number, PLACE: place}
    try:
        with probing(model):
            padded, packed = (_norms(model, inputs, labels) for inputs in (batch, beside))
    except (RuntimeError, TypeError, ValueError):  # each architecture fails in its own way
        return False
    if padded.keys() != packed.keys():
        return False
    expected = torch.stack(list(padded.values()), 1)
    found = torch.stack([packed[weight] for weight in padded], 1)
    return not bool(((found - expected).abs() > _margin(expected)).any())


def _margin(norms: Tensor) -> Tensor:
    """(rows, weights): a gradient that is zero but for rounding (a key's bias) may differ by
    rounding of the row's whole gradient."""
    return 0.02 * norms + 1e-6 * norms.norm(dim=1, keepdim=True)


def _norms(model: Classifier, inputs: dict[str, Tensor], labels: Tensor) -> dict[Tensor, Tensor]:
    clipping = GhostClipping(model)
    try:
        with clipping.packed(inputs.get(ROW)):
            h = model.represent(inputs)
        clipping.run_hooks(functional.cross_entropy(model.head(h), labels, reduction="none"))
        return {weight: squares.sqrt() for weight, squares in clipping.squares().items()}
    finally:
        clipping.remove()


def _compare(model: Classifier) -> list[str]:
    batch, labels = _probe_rows(model)
    # A row that is taken for another one then has another norm, also where a bias is alike for all.
    weights = 2.0 ** torch.arange(len(labels), device=labels.device)
    named = trainable_parameters(model)
    try:
        clipping = GhostClipping(model)
    except NotImplementedError as error:
        raise UserError(
            f"Opacus cannot split this encoder's gradients: {error}; use scope: head"
        ) from error
    try:
        losses = functional.cross_entropy(model(batch), labels, reduction="none")
        clipping.run_hooks(losses * weights, [parameter for _, parameter in named])
        measured = {
            parameter: squares.sqrt()
            for module, uses in clipping.uses.items()
            for parameter, squares in _squares_or_nothing(module, uses, len(labels)).items()
        }
    finally:
        clipping.remove()
    expected = torch.zeros(len(labels), len(named), device=labels.device)
    for row, length in enumerate(PROBE_LENGTHS):
        alone = {name: tensor[row : row + 1, :length] for name, tensor in batch.items()}
        loss = functional.cross_entropy(model(alone), labels[row : row + 1]) * weights[row]
        gradients = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
        for column, value in enumerate(gradients):
            if value is not None:
                expected[row, column] = torch.linalg.vector_norm(value)
    margin = _margin(expected)
    return [
        name
        for column, (name, parameter) in enumerate(named)
        if parameter not in measured
        or bool(((measured[parameter] - expected[:, column]).abs() > margin[:, column]).any())
    ]


def _squares_or_nothing(
    module: Module, uses: list[tuple[Tensor, Tensor]], rows: int
) -> dict[Tensor, Tensor]:
    """Nothing where a use is not one row per example, or where Opacus has no way to split it."""
    if any(len(value) != rows for use in uses for value in use):
        return {}
    try:
        return squared_norms(module, uses)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return {}


def _probe_rows(model: Classifier) -> tuple[dict[str, Tensor], Tensor]:
    device = next(model.parameters()).device
    embedding = model.encoder.get_input_embeddings()  # type: ignore[operator]
    words = getattr(embedding, "num_embeddings", None) or len(embedding.weight)
    padding = getattr(model.encoder.config, "pad_token_id", None) or 0
    rows, length = len(PROBE_LENGTHS), max(PROBE_LENGTHS)
    ids = torch.arange(rows * length).reshape(rows, length) * 7 % (words - 1)
    ids += ids >= padding  # every word but the padding
    mask = torch.arange(length) < torch.tensor(PROBE_LENGTHS)[:, None]
    batch = {"input_ids": ids.where(mask, padding), "attention_mask": mask.long()}
    labels = torch.arange(rows) % model.classes
    return {name: tensor.to(device) for name, tensor in batch.items()}, labels.to(device)
