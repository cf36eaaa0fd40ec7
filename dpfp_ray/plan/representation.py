"""Names of representations: what a frozen or trained encoder's output is made into, h(x).

    pooler, cls, mean    one vector of the last layer, as the encoder was trained for
    layers               the mean of every layer, embeddings first, each scaled to norm 1, joined
    layers:3,4           the same of some layers; 0 is the embeddings
    pair                 of two texts with means u and v: u, v, |u − v| and u v, each scaled, joined
    auto                 what suits encoder, data and noise (`training/representation_choice.py`)

All but the first line's need a frozen encoder (scope head).
"""

import re

from dpfp_ray.plan.errors import UserError, unknown

REPRESENTATIONS = ("auto", "pooler", "cls", "mean", "layers", "layers:I,J", "pair")
_SOME_LAYERS = re.compile(r"layers:\d{1,4}(,\d{1,4})*")


def check_representation(name: str) -> None:
    if name.startswith("layers:"):
        numbers = layer_numbers(name) if _SOME_LAYERS.fullmatch(name) else ()
        if not numbers or list(numbers) != sorted(set(numbers)):
            raise UserError(
                f"representation is {name}; name layers once, in rising order, as in layers:3,4,5,6"
            )
    elif name not in REPRESENTATIONS:
        raise UserError(unknown("representation", name, REPRESENTATIONS))


def layer_numbers(name: str) -> tuple[int, ...]:
    """Those that `layers:3,4` names; none for every other name, `layers` included."""
    numbers = name.partition(":")[2]
    return tuple(int(number) for number in numbers.split(",")) if numbers else ()


def is_joined(name: str) -> bool:
    """Whether it is made of several parts, from a frozen encoder's means."""
    return name == "pair" or name.partition(":")[0] == "layers"
