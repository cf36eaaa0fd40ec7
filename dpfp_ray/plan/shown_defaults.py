"""Defaults in words: those that differ by method for `--help`, those that follow the data for the
start of a run."""

from dpfp_ray.plan.defaults import LEAST_BATCH, SST2_RECORDS
from dpfp_ray.plan.method_spec import MethodSpec, all_specs
from dpfp_ray.plan.plan import Plan

BY_METHOD = (
    "batch_size",
    "micro_batches",
    "clip",
    "learning_rate",
    "epochs",
    "schedule",
    "weight_decay",
    "scaling",
    "ridge",
    "shrinkage",
)
FROM_DATA = ("representation", "batch_size", "epochs", "delta")


def by_method(field: str) -> str:
    """`dpsgd 0.1; dpfp, rgp 1`: what each method that uses the field starts from; else empty."""
    if field not in BY_METHOD:
        return ""
    users: dict[str, list[str]] = {}
    for name, spec in all_specs().items():
        if field not in spec.unused:
            users.setdefault(_value(field, spec), []).append(name)
    shown = "; ".join(f"{', '.join(names)} {value}" for value, names in users.items())
    scopes = any(
        field in changes and field not in spec.unused
        for spec in all_specs().values()
        for changes in spec.scope_changes.values()
    )
    return shown + ("; scopes have their own" if scopes else "")


def _value(field: str, spec: MethodSpec) -> str:
    value = getattr(spec.defaults, field)
    shown = value if isinstance(value, str) else f"{value:g}"
    if field == "batch_size" and spec.defaults.scales_batch:
        return f"{shown}·D/{SST2_RECORDS:,}, {LEAST_BATCH} or more"
    if field == "epochs" and spec.defaults.scales_epochs:
        return f"{shown}·D/{SST2_RECORDS:,}, {shown} or more"
    return str(shown)


def from_data(asked: Plan, bound: Plan) -> str:
    """One line of what the data decided in a plan that left it open: D, K, and what follows."""
    parts = [f"D = {bound.D:,} {bound.unit}s", f"K = {bound.classes} classes"]
    for name in FROM_DATA:
        before, after = getattr(asked, name), getattr(bound, name)
        if before in (None, "auto") and after is not None and name not in bound.spec.unused:
            parts.append(f"{name} {after if isinstance(after, str) else format(after, ',.4g')}")
    return "from the data: " + ", ".join(parts)
