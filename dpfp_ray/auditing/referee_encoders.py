"""The referee for methods that train an encoder: a tiny random BERT on made-up tokens.

Records cannot have weights of their own here, but few of them are drawn at once: in many steps
nobody, whose release is noise alone, and in many one record, whose release is its gradient alone.

    noise        in steps without a record, every weight's is of one size
    sensitivity  in steps with one record the release is at most as long as the noise counts on
    additive     a release of several records is the sum of what they release alone: none changes
                 what another one adds
    releases     the weights follow from them by AdamW
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from dpfp_ray.auditing.referee import (
    CHANCE,
    DEVIATIONS,
    OTHER_SEED,
    SEED,
    Engine,
    Finding,
    Floats,
    check_moves,
    small_plan,
)
from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.scopes import Lora, restrict
from dpfp_ray.plan.plan import Plan

Ints = npt.NDArray[np.int64]
RECORDS, BATCH, STEPS = 6, 1, 150  # a third of the draws is empty, four in ten have one record
TINY, LARGE = 1e-6, 1.0  # noise multipliers: next to none, and the usual
WORDS, WIDTH, LONGEST = 40, 16, 9
MISFIT = 5e-3  # of a sum of records, in units of C: rounding, and the norm's offset in Opacus


def check_encoder(asked: Plan, scope: str) -> Iterator[Finding]:
    plan = small_plan(asked, RECORDS, BATCH, STEPS, scope)
    table, about = made_up_texts(), f"encoder, scope {scope}"
    engine = Engine(plan, table, SEED, LARGE, model=tiny_encoder(plan))
    released = [engine.step() for _ in range(STEPS)]
    names = [name for name, _ in trainable_parameters(engine.model)]
    sizes = [weight.numel() for weight in engine.trained]
    engine.close()
    if engine.steps.noise_coordinates != sum(sizes):
        what = "its releases are of other numbers than the weights; not looked at"
        yield Finding(f"releases, {about}", "—", what)
        return
    silent = np.array([release for release, rows in released if rows == 0])
    size = float(silent.std()) / LARGE if len(silent) else 0.0
    if not size > 0:
        yield Finding(f"noise in steps without a record, {about}", "some", "none", "there is none")
        return
    yield noise_of_weights(about, silent / size, names, sizes)
    engine = Engine(plan, table, OTHER_SEED, TINY, model=tiny_encoder(plan))
    quiet = [engine.step() for _ in range(STEPS)]
    engine.close()
    releases = np.array([release for release, _ in quiet]) / size
    rows = np.array([count for _, count in quiet])
    tolerance = 1e-3 + DEVIATIONS / np.sqrt(2 * silent.size)
    yield from single_records(about, releases, rows, 1 + tolerance)
    yield check_moves(about, plan, table, tiny_encoder(plan))


def made_up_texts() -> TokenTable:
    rng = np.random.default_rng(1)
    lengths = rng.integers(3, LONGEST, RECORDS)
    ids = rng.integers(5, WORDS, int(lengths.sum()))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenTable({"input_ids": ids.astype(np.int32)}, offsets, np.arange(RECORDS) % 2, 0)


def tiny_encoder(plan: Plan) -> Classifier:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=2 * LONGEST,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = Classifier(BertModel(config), "mean", 2, head_seed=1)
        restrict(model, plan.scope, Lora.of(plan), seed=1)
    # A head and adapters that start at zero would leave most gradients at zero.
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for _, weight in trainable_parameters(model):
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    return model


def noise_of_weights(about: str, silent: Floats, names: list[str], sizes: list[int]) -> Finding:
    """The least of the deviations of all weights, each over its own numbers and all steps."""
    ends = np.cumsum(sizes)
    parts = [silent[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]
    deviations = np.array([part.std() for part in parts])
    chances = [stats.chi2.cdf((part**2).sum(), part.size) for part in parts]
    least = int(np.argmin(chances))
    fault = f"{names[least]} gets less noise" if chances[least] * len(parts) < CHANCE else ""
    shown = f"{deviations.min():.3g} to {deviations.max():.3g}"
    return Finding(f"noise of each weight, {about}", "1", shown, fault)


def single_records(about: str, releases: Floats, rows: Ints, most: float) -> Iterator[Finding]:
    alone = releases[rows == 1]
    longest = float(np.linalg.norm(alone, axis=1).max()) if len(alone) else 0.0
    fault = f"a record adds {longest:.3g} times what the noise counts on" if longest > most else ""
    yield Finding(f"one record's release, {about}", "at most 1", f"{longest:.3g}", fault)
    different: list[Floats] = []
    for release in alone:
        if all(np.linalg.norm(release - known) > MISFIT for known in different):
            different.append(release)
    fault = "a record does not add the same each time" if len(different) > RECORDS else ""
    shown = f"{len(different)} different releases"
    yield Finding(f"records alone, {about}", f"{RECORDS} at most", shown, fault)
    if fault or not different:
        return
    known, several = np.array(different), releases[rows > 1]
    shares = np.linalg.lstsq(known.T, several.T, rcond=None)[0].round()
    misfit = (
        float(np.linalg.norm(several - shares.T @ known, axis=1).max()) if len(several) else 0.0
    )
    fault = "records change what others add" if misfit > MISFIT and len(known) == RECORDS else ""
    yield Finding(f"records together, {about}", "the sum", f"off by {misfit:.2g} C", fault)
