"""Hyperparameters that a method starts from: those of its own paper, so that no baseline is weak.

A plan takes these wherever the user gives no value. Settings that were tuned at one data set's size
are scaled to other sizes the way their authors scaled them.
"""

from dataclasses import dataclass

SST2_RECORDS = 67_349
# A batch that follows D stays this large on small sets, or takes all of them: at SST-2's sampling
# rate, B of 64 records would be one record, which no noise that protects it leaves readable.
LEAST_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Hyperparameters of one method, as found good on SST-2 (D = 67,349)."""

    batch_size: int
    learning_rate: float
    epochs: float
    micro_batches: int = 1
    clip: float = 1.0
    schedule: str = "linear"
    weight_decay: float = 0.0
    scaling: str = "clip"
    ridge: float | None = None
    shrinkage: float | None = None
    scales_batch: bool = False
    scales_epochs: bool = False

    def batch_size_at(self, records: int) -> int:
        """B for D = `records`: fixed, or at the same sampling rate B / D as on SST-2."""
        scaled = max(LEAST_BATCH, round(self.batch_size * records / SST2_RECORDS))
        return max(1, min(records, scaled if self.scales_batch else self.batch_size))

    def epochs_at(self, records: int) -> float:
        """E for D = `records`: fixed, or more passes over larger sets and no fewer over smaller."""
        factor = max(1, round(records / SST2_RECORDS)) if self.scales_epochs else 1
        return self.epochs * factor


def closed_form(*, ridge: float | None, shrinkage: float | None) -> Defaults:
    """For one release of all records (B = D, E = 1) and a head that is solved for.

    Nothing is trained in steps, so learning rate, schedule and weight decay have no effect. Every
    plan holds them, however, and they are part of its hash: they stay what they always were.
    """
    return Defaults(
        batch_size=SST2_RECORDS,
        scales_batch=True,
        epochs=1,
        learning_rate=1e-3,
        weight_decay=0.01,
        scaling="unit",
        ridge=ridge,
        shrinkage=shrinkage,
    )
