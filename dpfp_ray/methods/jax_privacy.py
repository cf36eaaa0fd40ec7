"""DP-SGD by jax-privacy, for a linear head on frozen rows (`pip install 'dpfp-ray[jax]'`).

Its execution plan is used as its documents show it: `clipped_grad` sums the clipped gradients, its
batch selection draws Poisson samples, its privatizer adds the noise, and its `dp_event` says what
was done. The optimizer is AdamW on the noisy sums, as for every method here: post-processing.

`jax_bandmf.py` is the same with more than one band.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from dpfp_ray.methods.dpsgd import SPEC as OURS
from dpfp_ray.methods.parts.contestant import Contestant, Drawn
from dpfp_ray.plan.method_spec import ByLibrary, MethodSpec
from dpfp_ray.system.cache import cached_number
from dpfp_ray.system.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from dpfp_ray.plan.plan import Plan

SEEDS = 2**31  # what its privatizer takes


class JaxPrivacy(Contestant):
    bands = 1
    skipped = 0  # steps that an earlier part of the run has taken

    def train(self) -> Iterator[Drawn]:
        self.set_up()
        import jax
        import torch

        add_noise, head = self.config.plan.noise_addition_transform, self.model.head
        state = add_noise.init(self.read_weights())
        batches = self.config.plan.batch_selection_strategy.batch_iterator(
            len(self.table), self.start.random_seed("jax draws")
        )
        update = jax.jit(add_noise.update)
        for step, drawn in enumerate(batches):
            weights = self.read_weights()
            if step < self.skipped:  # the same draws and noise again, as if nothing had happened
                _, state = update(jax.tree.map(lambda w: w * 0, weights), state)
                continue
            total = self.sum_of(weights, drawn)
            noisy, state = update(total, state)
            for weight, gradient in zip((head.weight, head.bias), noisy, strict=True):
                weight.grad = torch.from_numpy(jax.device_get(gradient).copy())
            for group in self.optimizer.param_groups:
                group["lr"] = self.plan.learning_rate_at(step)
            self.optimizer.step()
            yield Drawn(len(drawn))

    def set_up(self) -> None:
        import torch

        try:
            import jax
            import jax.numpy as jnp
            from dp_accounting import NeighboringRelation
            from dp_accounting.pld import PLDAccountant
            from jax_privacy.batch_selection import PartitionType
            from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig
        except ImportError as error:
            raise UserError(
                f"{self.plan.spec.title} needs jax-privacy ({error}); pip install 'dpfp-ray[jax]'"
            ) from None
        plan = self.plan
        self.config: Any = BandMFExecutionPlanConfig(
            iterations=plan.steps,
            strategy=self.strategy(),
            epsilon=None,
            delta=None,
            noise_multiplier=self.start.noise_multiplier,
            l2_clip_norm=plan.C,
            rescale_to_unit_norm=False,
            normalize_by=plan.B,
            sampling_prob=plan.p,
            partition_type=PartitionType.INDEPENDENT,
            accountant=PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE),
            noise_seed=self.start.random_seed("jax noise") % SEEDS,
        )
        self.check_event()

        def loss(weights: Any, h: Any, labels: Any) -> Any:
            scores = h @ weights[0].T + weights[1]
            return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1).sum()

        self.gradient = jax.jit(self.config.plan.clipped_grad(loss, batch_argnums=(1, 2)))
        self.optimizer = torch.optim.AdamW(
            self.model.head.parameters(),
            lr=plan.learning_rate_at(0),
            weight_decay=plan.weight_decay or 0.0,
        )
        if self.skipped:
            self.optimizer.load_state_dict(self.saved["optimizer"])

    def strategy(self) -> Any:
        """The first column of the matrix whose inverse correlates the noise of the steps."""
        import numpy as np

        return np.ones(1)

    def check_event(self) -> None:
        """What the library says it does must be what ε was computed for."""
        event = self.config.plan.dp_event
        sampled = event.event
        found = (sampled.event.noise_multiplier, sampled.sampling_probability, event.count)
        asked = (self.start.noise_multiplier, self.plan.p, self.plan.draws)
        if not all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(found, asked, strict=True)):
            raise UserError(
                f"{self.plan.spec.title} would do (σ/C, rate, releases) {found}, but the ε of this "
                f"plan was computed for {asked}"
            )

    def sum_of(self, weights: Any, drawn: np.ndarray[Any, Any]) -> Any:
        """Padded to few different sizes: each new one is compiled."""
        import jax.numpy as jnp
        import numpy as np

        size = max(32, self.plan.B // 4)
        padded = np.full(-(-max(1, len(drawn)) // size) * size, -1)
        padded[: len(drawn)] = drawn
        rows = np.maximum(padded, 0)
        h = self.table.collate(rows)["representation"].numpy()
        labels = np.asarray(self.table.labels)[rows]
        return self.gradient(
            weights, jnp.asarray(h), jnp.asarray(labels), is_padding_example=padded < 0
        )

    def read_weights(self) -> Any:
        import jax.numpy as jnp

        head = self.model.head
        return tuple(jnp.asarray(w.detach().numpy()) for w in (head.weight, head.bias))

    def state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def resume(self, state: dict[str, Any]) -> None:
        self.saved, self.skipped = state, state["done"]

    def epsilons(self) -> dict[str, float]:
        """By dp_accounting, of the library's own event."""
        from dp_accounting import NeighboringRelation
        from dp_accounting.pld import PLDAccountant
        from dp_accounting.rdp import RdpAccountant

        event, delta = self.config.plan.dp_event, self.plan.delta
        relation = NeighboringRelation.ADD_OR_REMOVE_ONE
        accountants: dict[str, Any] = {
            "pld": lambda: PLDAccountant(relation),
            "rdp": lambda: RdpAccountant(neighboring_relation=relation),
        }

        def epsilon(name: str) -> float:
            return float(accountants[name]().compose(event).get_epsilon(delta))

        keys = {name: f"jax-privacy {name} {event} {delta!r}" for name in accountants}
        return {name: cached_number(key, partial(epsilon, name)) for name, key in keys.items()}

    def facts(self) -> dict[str, Any]:
        return {
            "num_bands": self.bands_used,
            "partition_type": "independent",
            "normalize_by": self.plan.B,
            "rescale_to_unit_norm": False,
            "strategy": [round(float(value), 6) for value in self.strategy()],
        }

    @property
    def bands_used(self) -> int:
        return len(self.strategy())

    def notes(self) -> list[str]:
        return [
            "records without a finite gradient add zero (its clipped_grad is nan_safe)",
            "noise is from JAX's Threefry, seeded by 31 bits; draws from numpy's PCG64",
        ]


def rate(plan: Plan) -> float:
    return plan.B / plan.D


SPEC = MethodSpec(
    method="jax_privacy",
    label="jax-privacy DP-SGD",
    order=8,
    compared=False,  # it is an extra
    guarantee="claimed",
    adjacencies=("add_remove",),
    scopes=("head",),
    by_library=ByLibrary(
        library="jax-privacy",
        make=JaxPrivacy,
        rate=rate,
        claim="jax-privacy draws each record with the chance B/D by itself, clips each record's "
        "gradient to C and adds Gaussian noise of deviation σ to each step's sum",
    ),
    noise_generator="JAX's Threefry, from 31 bits of seed",
    noise_to_signal=OURS.noise_to_signal,
    defaults=OURS.defaults_for("head"),
)
