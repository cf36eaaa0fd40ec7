"""DP-SGD by Opacus itself, as its users run it; `dpsgd` is ours by the same rules.

`PrivacyEngine.make_private` is given the model, AdamW and a plain loader, and gives them back with
its own Poisson sampler, per-example gradients and noise. Nothing of the library is changed. σ is
from our accountant, for the rate at which Opacus draws: it knows only rates 1/N, with N batches a
pass, so the loader's batch size is the one whose N is nearest to D/B.

Two things are done for it that its users have to do as well:
- A step whose draw is empty gets no forward pass, because no encoder takes zero rows: its
  per-example gradients are said to be none, and Opacus adds its noise to zero.
- Rows in memory at once are limited by `BatchMemoryManager`; for whole per-example gradients to
  what fits into 1 GB.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dpfp_ray.methods.dpsgd import SPEC as OURS
from dpfp_ray.methods.parts.base import CPU_ROWS
from dpfp_ray.methods.parts.contestant import Contestant, Drawn, installed
from dpfp_ray.plan.method_spec import ByLibrary, MethodSpec
from dpfp_ray.system.cache import cached_number
from dpfp_ray.system.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from dpfp_ray.plan.plan import Plan

GRADIENT_BYTES = 2**30  # whole per-example gradients in memory at once; Opacus needs it thrice
# Of a row of a frozen encoder. Opacus has no rule for rows without a finite gradient: one of them
# makes every weight undefined, so its presence shows. Squares of larger numbers overflow.
LARGEST_NUMBER = 1e15
ACCOUNTANTS = ("prv", "rdp")  # Opacus's own; its gdp is the paper's, which is ours too


def batches_a_pass(plan: Plan) -> int:
    """N, so that each record is drawn with the chance 1/N."""
    return max(1, round(plan.D / plan.B))


class Opacus(Contestant):
    saved: dict[str, Any] | None = None

    def train(self) -> Iterator[Drawn]:
        from opacus.utils.batch_memory_manager import BatchMemoryManager

        self.set_up()
        done = self.steps_done
        try:
            while True:
                with BatchMemoryManager(
                    data_loader=self.loader,
                    max_physical_batch_size=self.max_rows,
                    optimizer=self.optimizer,
                ) as loader:
                    parts = self.resumed(loader, done)
                    ends = done + self.pass_length - done % self.pass_length
                    rows, loss = 0, 0.0
                    while done < ends:
                        for group in self.optimizer.param_groups:
                            group["lr"] = self.plan.learning_rate_at(done)
                        batch = next(parts)
                        loss = loss + self.take_part(batch)
                        rows += len(batch[-1])
                        if self.steps_done > done:
                            done = self.steps_done
                            self.hooks.disable_hooks()  # who looks at the model is no step
                            yield Drawn(rows, loss)
                            self.hooks.enable_hooks()
                            rows, loss = 0, 0.0
        finally:
            self.hooks.cleanup()

    def set_up(self) -> None:
        import torch
        from opacus import PrivacyEngine
        from torch.utils.data import DataLoader

        from dpfp_ray.models.classifier import trainable_parameters

        plan, start = self.plan, self.start
        self.device = next(self.model.parameters()).device
        self.weights = [weight for _, weight in trainable_parameters(self.model)]
        self.draws = torch.Generator().manual_seed(start.random_seed("opacus draws"))
        self.noise = torch.Generator(self.device).manual_seed(start.random_seed("opacus noise"))
        self.model.train()
        rate, decay = plan.learning_rate_at(0), plan.weight_decay or 0.0
        optimizer = torch.optim.AdamW(self.weights, lr=rate, weight_decay=decay, fused=True)
        places: Any = Places(len(self.table))
        loader: Any = DataLoader(
            places, self.loader_batch, generator=self.draws, collate_fn=self.collate
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Secure RNG turned off")  # the statement says it
            self.engine = PrivacyEngine(accountant="prv")
        try:
            self.hooks, self.optimizer, *criterion, self.loader = self.engine.make_private(
                module=self.model,
                optimizer=optimizer,
                data_loader=loader,
                noise_multiplier=start.noise_multiplier,
                max_grad_norm=plan.C,
                noise_generator=self.noise,
                grad_sample_mode=plan.grad_sample_mode,
            )
        except Exception as error:  # its own words, which name the layer
            raise UserError(f"Opacus cannot train this model: {error}") from error
        self.criterion: Any = criterion[0] if criterion else torch.nn.CrossEntropyLoss()
        self.pass_length = len(self.loader.batch_sampler)
        if self.saved:
            self.optimizer.load_state_dict(self.saved["optimizer"])
            self.noise.set_state(self.saved["noise"])
            history = [tuple(steps) for steps in self.saved["history"]]
            self.engine.accountant.load_state_dict({"history": history, "mechanism": "prv"})

    def resumed(self, loader: Any, done: int) -> Iterator[Any]:
        """A pass over the data; each begins by drawing a seed that nothing uses."""
        saved, self.saved = self.saved, None
        if saved and done % self.pass_length == 0:
            self.draws.set_state(saved["draws"])
        parts = iter(loader)
        if saved and done % self.pass_length:
            self.draws.set_state(saved["draws"])
        return parts

    @property
    def max_rows(self) -> int:
        """Ghost clipping never has whole per-example gradients."""
        most = self.plan.max_physical_batch or CPU_ROWS
        if self.plan.grad_sample_mode != "ghost":
            size = sum(weight.numel() for weight in self.weights)
            most = min(most, GRADIENT_BYTES // (4 * size))
        return max(1, most)

    @property
    def loader_batch(self) -> int:
        """Such that the loader has as many batches as the rate says."""
        return -(-len(self.table) // batches_a_pass(self.plan))

    @property
    def steps_done(self) -> int:
        """By Opacus's own count."""
        return sum(steps for *_, steps in self.engine.accountant.history)

    def collate(self, places: list[tuple[int]]) -> tuple[dict[str, Tensor], Tensor]:
        import numpy as np
        import torch

        rows = np.array([place for (place,) in places], dtype=np.int64)
        labels = torch.from_numpy(np.asarray(self.table.labels[rows], dtype=np.int64))
        batch = self.table.collate(rows)
        if "representation" in batch:
            h = batch["representation"]
            fine = (h.abs() < LARGEST_NUMBER).all(1, keepdim=True)
            batch["representation"] = h.where(fine, 0.0)
        return batch, labels

    def take_part(self, batch: Any) -> Any:
        """Rows that fit into memory; the optimizer itself knows when the step is complete."""
        self.optimizer.zero_grad()
        *inputs, labels = batch
        loss: Any = 0.0
        if len(labels):
            tensors = {name: tensor.to(self.device) for name, tensor in inputs[0].items()}
            mean = self.criterion(self.hooks(tensors), labels.to(self.device))
            with warnings.catch_warnings():  # of layers on data, which ask for no gradient
                warnings.filterwarnings("ignore", "Full backward hook is firing")
                mean.backward()
            loss = mean.detach().double() * len(labels)
        else:
            self.say_none_was_drawn()
        self.optimizer.step()
        return loss

    def say_none_was_drawn(self) -> None:
        for weight in self.weights:
            if self.plan.grad_sample_mode == "ghost":
                weight.grad = weight.new_zeros(weight.shape)
            else:
                weight.grad_sample = weight.new_zeros((0, *weight.shape))  # type: ignore[attr-defined]

    def state(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "draws": self.draws.get_state(),
            "noise": self.noise.get_state(),
            "history": [list(steps) for steps in self.engine.accountant.history],
        }

    def resume(self, state: dict[str, Any]) -> None:
        self.saved = state

    def ledger(self) -> list[tuple[float, float, int]]:
        return list(self.engine.accountant.history)

    def epsilons(self) -> dict[str, float]:
        assert self.plan.delta is not None, "a bound private plan has a delta"
        return {name: own_epsilon(name, self.ledger(), self.plan.delta) for name in ACCOUNTANTS}

    def facts(self) -> dict[str, Any]:
        return {
            "grad_sample_mode": self.plan.grad_sample_mode,
            "max_physical_batch_size": self.max_rows,
            "batch_size_of_loader": self.loader_batch,
            "expected_batch_size": self.optimizer.expected_batch_size,
            "loss_reduction": self.optimizer.loss_reduction,
            "poisson_sampling": True,
            "secure_mode": False,
        }

    def notes(self) -> list[str]:
        found = [
            "sums are divided by the whole part of D × rate, which depends on D (opacus#571, "
            "#819); D counts as public here",
            "an empty draw is a step with noise alone; this tool says so to Opacus, whose own "
            "empty batches encoders do not take",
            "noise and draws are from generators with 32 bits of seed (secure_mode off)",
        ]
        if self.plan.scope == "head":
            found.append(
                f"rows with numbers that are not finite, or above {LARGEST_NUMBER:g}, are given to "
                "Opacus as zeros, because one without a finite gradient would show"
            )
        if self.plan.scope == "lora":
            found.append("every matrix was seen to move in the first steps (opacus#820)")
        return found


class Places:
    """The data set that Opacus sees: row numbers, which the loader's `collate` turns to rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, place: int) -> tuple[int]:
        return (place,)


def own_epsilon(name: str, history: list[tuple[float, float, int]], delta: float) -> float:
    """ε by one of Opacus's accountants; seconds for many steps, so it is kept."""

    def compute() -> float:
        from opacus.accountants import create_accountant

        accountant: Any = create_accountant(name)
        accountant.history = list(history)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of orders at the edge: they only enlarge ε
            return float(accountant.get_epsilon(delta))

    key = f"opacus {installed('opacus')['version']} {name} {history} {delta!r}"
    return cached_number(key, compute)


SPEC = MethodSpec(
    method="opacus",
    label="Opacus DP-SGD",
    order=1,
    guarantee="claimed",
    adjacencies=("add_remove",),
    by_library=ByLibrary(
        library="opacus",
        make=Opacus,
        rate=lambda plan: 1 / batches_a_pass(plan),
        claim="Opacus draws each record with the chance 1/N by itself, clips each record's "
        "gradient to C and adds Gaussian noise of deviation σ to each step's sum",
    ),
    uses=("grad_sample_mode",),
    scopes=tuple(scope for scope in OURS.scopes if scope != "top:K"),
    noise_generator="torch's Mersenne Twister, which is no cipher, from 32 bits of seed",
    # The same as for our own DP-SGD: they are compared.
    noise_to_signal=OURS.noise_to_signal,
    defaults=OURS.defaults,
    scope_changes=OURS.scope_changes,
    token_score=OURS.token_score,
)
