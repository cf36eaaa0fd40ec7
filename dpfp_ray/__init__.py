"""dpfp-ray: a Ray-distributed harness for differentially private fine-tuning.

    from dpfp_ray import Plan, calibrate, load_model, load_results, train

    plan = Plan(task="demo", method="dpfp", mode="moments", epsilon=3)
    calibrate(plan, records=9_568).sigma
    run = train(plan, output="runs/one")
    load_model("runs/one").predict(["a warm and funny film"])
    load_results("runs")

Every verb of the command line is a function here, but for those that are only about the command
line: `dpfp submit` sends a command to a cluster.

Names are imported when they are first used, so that `import dpfp_ray` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from dpfp_ray.auditing.audit import audit as audit
    from dpfp_ray.auditing.referee import check as check
    from dpfp_ray.plan.plan import Plan as Plan
    from dpfp_ray.privacy.calibration import calibrate as calibrate
    from dpfp_ray.reports.export import export as export
    from dpfp_ray.reports.glossary import glossary as glossary
    from dpfp_ray.reports.ledger import ledger as ledger
    from dpfp_ray.reports.page import report as report
    from dpfp_ray.reports.statements import statement as statement
    from dpfp_ray.results.predict import evaluate as evaluate
    from dpfp_ray.results.predict import predict as predict
    from dpfp_ray.results.rows import COLUMNS as COLUMNS
    from dpfp_ray.results.store import find_results as find_results
    from dpfp_ray.results.store import load_results as load_results
    from dpfp_ray.results.study import to_optuna as to_optuna
    from dpfp_ray.service.client import ask_service as ask_service
    from dpfp_ray.service.deploy import serve as serve
    from dpfp_ray.service.deploy import stop_serving as stop_serving
    from dpfp_ray.sweeps.compare import compare as compare
    from dpfp_ray.sweeps.compare import preview as preview
    from dpfp_ray.sweeps.space import int_uniform as int_uniform
    from dpfp_ray.sweeps.space import log_uniform as log_uniform
    from dpfp_ray.sweeps.space import power_of_two as power_of_two
    from dpfp_ray.sweeps.space import read_search_space as read_search_space
    from dpfp_ray.sweeps.space import shipped_spaces as shipped_spaces
    from dpfp_ray.sweeps.space import uniform as uniform
    from dpfp_ray.sweeps.submit import find_job as find_job
    from dpfp_ray.sweeps.submit import submit as submit
    from dpfp_ray.sweeps.sweep import best_plan as best_plan
    from dpfp_ray.sweeps.sweep import preview_sweep as preview_sweep
    from dpfp_ray.sweeps.sweep import sweep as sweep
    from dpfp_ray.system.errors import UserError as UserError
    from dpfp_ray.training.bench import bench as bench
    from dpfp_ray.training.load_model import load_model as load_model
    from dpfp_ray.training.train import train as train

# The names of the front door, by the module that has them.
_NAMES = {
    "auditing.audit": "audit",
    "auditing.referee": "check",
    "plan.plan": "Plan",
    "privacy.calibration": "calibrate",
    "reports.export": "export",
    "reports.glossary": "glossary",
    "reports.ledger": "ledger",
    "reports.page": "report",
    "reports.statements": "statement",
    "results.predict": "evaluate predict",
    "results.rows": "COLUMNS",
    "results.store": "find_results load_results",
    "results.study": "to_optuna",
    "service.client": "ask_service",
    "service.deploy": "serve stop_serving",
    "sweeps.compare": "compare preview",
    "sweeps.space": "int_uniform log_uniform power_of_two read_search_space shipped_spaces uniform",
    "sweeps.submit": "find_job submit",
    "sweeps.sweep": "best_plan preview_sweep sweep",
    "system.errors": "UserError",
    "training.bench": "bench",
    "training.load_model": "load_model",
    "training.train": "train",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # stated once, in pyproject.toml
        from importlib.metadata import version

        return version("dpfp-ray")
    if name not in _MODULES:
        raise AttributeError(f"module 'dpfp_ray' has no attribute {name!r}")
    return getattr(import_module(f"dpfp_ray.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
