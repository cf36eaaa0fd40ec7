"""The privacy statement of a finished run: in the forms that others ask for, and for a report."""

from pathlib import Path
from typing import Any

from dpfp_ray.privacy import statement_forms
from dpfp_ray.privacy.statement import first_line, render
from dpfp_ray.results.runs import Run
from dpfp_ray.system.errors import UserError, unknown
from dpfp_ray.system.whole_files import to_json
from dpfp_ray.training.load_model import record_of
from dpfp_ray.training.record import Record, plan_of
from dpfp_ray.training.run_folder import read_result

AUDIT_SHARES = ("method", "mode", "scope", "task", "epsilon", "accountant", "adjacency")


def statement(
    run: Any, *, form: str = "text", name: str = "", audit: str | Path | None = None
) -> str:
    """What a run promises about its records.

    run    what `train` gave, or the folder that it wrote; weights are not needed
    form   text, for people; json, the reporting list of Ponomareva et al. 2023; nist, answers to
           the questions of SP 800-226; registry, YAML for the OpenDP deployments registry
    name   of the product, for the registry
    audit  the folder of an audit of the same method, so that what it measured is stated too
    """
    if form not in statement_forms.FORMS:
        raise UserError(unknown("form", form, statement_forms.FORMS))
    record = record_with_audit(run, audit)
    facts, plan, privacy = record["statement"], plan_of(record), record["privacy"]
    if form == "json":
        return to_json(statement_forms.reporting_list(facts, plan, privacy), indent=2)
    if form == "nist":
        asked = statement_forms.nist_questions(facts, plan, privacy)
        answers = (f"\n[{one['layer']}] {one['question']}\n  {one['answer']}" for one in asked)
        return "\n".join([statement_forms.NIST, *answers])
    if form == "registry":
        return as_yaml(statement_forms.registry_entry(facts, plan, privacy, name)).rstrip("\n")
    return f"{first_line(facts)}\n\n{render(facts)}"


def record_with_audit(run: Any, audit: str | Path | None) -> Record:
    """The run's record; its statement has what an audit of the same method measured."""
    record = record_of(run)
    if audit is None:
        return record
    audited = read_result(Path(audit).expanduser())
    if not audited["audit"]:
        raise UserError(f"{audit} holds no audit; give the --output of dpfp audit")
    for name in AUDIT_SHARES:
        ours, theirs = record["plan"].get(name), audited["plan"].get(name)
        if ours != theirs:
            raise UserError(
                f"{audit} audits another plan: its {name} is {theirs}, the run's is {ours}"
            )
    return {**record, "statement": record["statement"] | {"audit": audited["audit"]}}


def as_yaml(entry: dict[str, Any]) -> str:
    """With texts of several lines as blocks, which the registry's own checks ask for."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)

    Dumper.add_representer(str, text)
    yaml_text: str = yaml.dump(entry, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
    return yaml_text


def statement_text(run: Run) -> str | None:
    """The statement as its own module words it; its bare facts if that fails. Runs that failed
    have none."""
    facts = run.record["statement"]
    try:
        return render(facts) if facts else None
    except Exception:  # a statement of another version must not cost the whole report
        return to_json(facts, indent=2)
