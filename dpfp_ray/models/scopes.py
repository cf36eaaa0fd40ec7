"""Which weights of a classifier train: the `scope` of a plan.

    all     every weight
    head    the head alone, on a frozen encoder
    bias    all biases, the LayerNorms and the head (BiTFiT: Ben Zaken et al. 2022; with privacy: Bu
            et al. 2022, arXiv 2210.00036)
    lora    the head, and a change B A of low rank to some linear layers (Hu et al. 2022; with
            privacy: Yu et al. 2022, arXiv 2110.06500). A starts random and B at zero, so the
            encoder starts as it was. With A fixed, a step's noise enters the change once and not in
            a product with itself (Sun et al. 2024, arXiv 2403.12313)
    top:K   the last K layers, what comes after them, and the head

The fewer weights train, the less noise there is in sum: it grows with the root of their number.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList, Parameter
from transformers.pytorch_utils import Conv1D

from dpfp_ray.models.classifier import HEAD_STD, Classifier, initialise_head, trainable_parameters
from dpfp_ray.plan.plan import LORA_ALPHA, LORA_RANK, Plan
from dpfp_ray.system.errors import UserError

# What encoders call the layers that make queries and values, or those and keys in one.
_QUERY_AND_VALUE = frozenset(
    {"query", "value", "q", "v", "q_lin", "v_lin", "q_proj", "v_proj", "query_proj", "value_proj"}
    | {"Wqkv", "qkv", "qkv_proj", "in_proj", "c_attn", "query_key_value"}
)
_NOT_OF_THEIR_OWN = (
    "scope top:K needs layers with weights of their own, in one list; this encoder has none: use "
    "scope bias or lora"
)


@dataclass(frozen=True)
class Lora:
    """`targets` are ends of names of linear layers; empty: attention's query and value."""

    rank: int = LORA_RANK
    alpha: float = LORA_ALPHA
    targets: tuple[str, ...] = ()
    freeze_a: bool = False

    @staticmethod
    def of(plan: Plan) -> "Lora":
        if plan.scope != "lora":
            return Lora()
        assert plan.lora_rank is not None
        assert plan.lora_alpha is not None
        return Lora(
            plan.lora_rank, plan.lora_alpha, plan.lora_targets or (), bool(plan.lora_freeze_a)
        )


def restrict(model: Classifier, scope: str, lora: Lora | None = None, seed: int = 0) -> None:
    """Freeze all that `scope` does not train; what is frozen already stays so."""
    if scope == "all":
        return
    if scope == "lora":
        _add_lora(model, lora or Lora())
        initialise(model, seed)
        return
    chosen: set[Parameter] = set()
    if scope == "bias":
        chosen = _biases_and_norms(model.encoder)
    elif scope.startswith("top:"):
        chosen = _top(model, scope)
    chosen.update(model.head.parameters())
    for parameter in model.parameters():
        if parameter not in chosen:
            parameter.requires_grad_(False)


def initialise(model: Classifier, seed: int) -> None:
    """New values for the weights that no checkpoint has: the head's, and LoRA's."""
    initialise_head(model, seed)
    generator = torch.Generator().manual_seed(seed ^ 1)  # others than the head's
    for _, a, b in _lora_pairs(model):
        torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        torch.nn.init.zeros_(b)


def weights_to_keep(model: Classifier) -> dict[str, Tensor]:
    """Weights that, on top of the public checkpoint, make the trained model: LoRA's A also where
    it was fixed, because it was drawn with the run's secret seed, and what is taken off rows."""
    drawn: dict[str, Tensor] = {
        f"{name}.lora_A.default.weight": a for name, a, _ in _lora_pairs(model)
    }
    centre = {} if model.centre is None else {"centre": model.centre}
    return dict(trainable_parameters(model)) | drawn | centre


@contextmanager
def woken(model: Module) -> Iterator[None]:
    """Temporarily replace zero-initialised matrices (LoRA B): gradients reach those below."""
    generator = torch.Generator().manual_seed(0)
    zero = [p for _, p in trainable_parameters(model) if p.ndim > 1 and not p.any()]
    try:
        for parameter in zero:
            values = torch.empty(parameter.shape).normal_(0, HEAD_STD, generator=generator)
            parameter.data.copy_(values)
        yield
    finally:
        for parameter in zero:
            parameter.data.zero_()


def merge_lora(model: Module) -> None:
    """W + BA in place of W and its adapters: the same answers from the encoder's own layers."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.base_layer)


def _lora_pairs(model: Module) -> Iterator[tuple[str, Parameter, Parameter]]:
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "lora_B"):
            yield name, module.lora_A["default"].weight, module.lora_B["default"].weight


def _biases_and_norms(encoder: Module) -> set[Parameter]:
    """By the names that everybody uses: torch has no common class of all its norms."""
    return {
        parameter
        for module in encoder.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name.endswith("bias") or "norm" in type(module).__name__.lower()
    }


def _add_lora(model: Classifier, lora: Lora) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    linears = [name for name, m in model.encoder.named_modules() if isinstance(m, (Linear, Conv1D))]
    wanted = set(lora.targets) or _QUERY_AND_VALUE
    targets = [
        name for name in linears if any(name == end or name.endswith(f".{end}") for end in wanted)
    ]
    if not targets:
        what = f"lora_targets {','.join(lora.targets)}" if lora.targets else "scope lora"
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linears})) or "none"
        raise UserError(f"{what} finds no layer in this encoder; its linear layers are: {known}")
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft only multiplies with it
        lora_dropout=0.0,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(model.encoder.get_submodule(n), Conv1D) for n in targets),
    )
    inject_adapter_in_model(config, model.encoder)  # freezes all but A and B
    if lora.freeze_a:
        for _, a, _ in _lora_pairs(model):
            a.requires_grad_(False)


def first_trained_layer(model: Classifier, scope: str) -> tuple[ModuleList, int]:
    """The encoder's layers, and the number of the first that `scope` trains, counted from 0.

    Whatever is not `top:K` has no frozen layers to speak of: there the first is 0.
    """
    if not scope.startswith("top:"):
        return ModuleList(), 0
    layers, count = _layers(model.encoder), int(scope.removeprefix("top:"))
    if count > len(layers):
        raise UserError(f"scope {scope}: this encoder has {len(layers)} layers; use fewer")
    first = len(layers) - count
    if set(layers[first:].parameters()) & set(layers[:first].parameters()):
        raise UserError(_NOT_OF_THEIR_OWN)
    return layers, first


def _top(model: Classifier, scope: str) -> set[Parameter]:
    layers, first = first_trained_layer(model, scope)
    chosen = {p for layer in list(layers)[first:] for p in layer.parameters()}
    return chosen | _after(model, layers)


def _layers(encoder: Module) -> ModuleList:
    count = getattr(encoder.config, "num_hidden_layers", None)
    lists = [found for found in _outermost_lists(encoder) if count in (None, len(found))]
    if not lists or (count is not None and len(lists) > 1):  # XLM: a list for each part of a layer
        raise UserError(_NOT_OF_THEIR_OWN)
    return max(lists, key=len)


def _outermost_lists(module: Module) -> Iterator[ModuleList]:
    for child in module.children():
        if isinstance(child, ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


@torch.no_grad()
def _after(model: Classifier, layers: ModuleList) -> set[Parameter]:
    """Weights of modules that are entered only when the last layer is done: a last norm, a pooler.

    Found by looking on: names do not tell (DeBERTa's `encoder.LayerNorm` is one for relative
    positions, which every layer uses).
    """
    inside = set(layers.modules())
    others = [module for module in model.encoder.modules() if module not in inside]
    before: set[Module] = set()
    entered: set[Module] = set()
    done = False

    def leave(*_: object) -> None:
        nonlocal done
        done = True

    def enter(module: Module, _: object) -> None:
        (entered if done else before).add(module)

    handles = [layers[-1].register_forward_hook(leave)]
    handles += [module.register_forward_pre_hook(enter) for module in others]
    try:
        with torch.random.fork_rng(devices=[]):
            model.represent(model.probe_batch())
    finally:
        for handle in handles:
            handle.remove()
    return {p for module in entered - before for p in module.parameters(recurse=False)}
