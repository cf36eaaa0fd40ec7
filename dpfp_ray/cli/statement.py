"""What a run promises about its records, in the forms that others ask for.

Examples:

  dpfp statement runs/demo
  dpfp statement runs/demo --format json > reporting.json
  dpfp statement runs/demo --format nist
  dpfp statement runs/demo --format registry > demo.yaml

  text       for people: guarantee, ε by each accountant, what is not protected, assumptions
  json       the reporting list of Ponomareva et al. 2023, "How to DP-fy ML"
  nist       the questions that NIST SP 800-226 has evaluators ask, answered
  registry   YAML for a pull request to the OpenDP deployments registry

What only you can know is left as TO BE FILLED IN. RUN needs no weights. --audit takes the folder of
a `dpfp audit` of the same method, so that what it measured is stated too.
"""

import argparse
from typing import Any

from dpfp_ray.data.whole_files import to_json
from dpfp_ray.plan.errors import UserError

FORMATS = ("text", "json", "nist", "registry")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a finished run")
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: text")
    parser.add_argument("--name", default="", help="name of the product, for the registry")
    parser.add_argument("--audit", metavar="DIR", help="folder of an audit of the same method")


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray.data.terminal import print_prose
    from dpfp_ray.privacy import statement_forms
    from dpfp_ray.privacy.statement_text import render
    from dpfp_ray.training.load_model import plan_of

    record = record_with_audit(arguments.run, arguments.audit)
    facts, plan, privacy = record["statement"], plan_of(record), record["privacy"]
    if arguments.format == "json":
        print(to_json(statement_forms.reporting_list(facts, plan, privacy), indent=2))
    elif arguments.format == "nist":
        print(statement_forms.NIST)
        for asked in statement_forms.nist_questions(facts, plan, privacy):
            print(f"\n[{asked['layer']}] {asked['question']}\n  {asked['answer']}")
    elif arguments.format == "registry":
        entry = statement_forms.registry_entry(facts, plan, privacy, arguments.name)
        print(as_yaml(entry), end="")
    else:
        print_prose(f"{statement_forms.first_line(facts)}\n\n{render(facts)}")
    return 0


def as_yaml(entry: dict[str, Any]) -> str:
    """With texts of several lines as blocks, which the registry's own checks ask for."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)

    Dumper.add_representer(str, text)
    shown: str = yaml.dump(entry, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
    return shown


def record_with_audit(run: str, audit: str | None) -> dict[str, Any]:
    """The run's record; its statement has what an audit of the same method measured."""
    from pathlib import Path

    from dpfp_ray.data.whole_files import read_json
    from dpfp_ray.training.load_model import read_run
    from dpfp_ray.training.run_folder import RESULT

    record = read_run(run)
    if not isinstance(record.get("statement"), dict):
        raise UserError(f"{run} was made before results had statements; run again")
    if audit is None:
        return record
    found = read_json(Path(audit).expanduser() / RESULT)
    if "audit" not in found:
        raise UserError(f"{audit} holds no audit; give the --output of dpfp audit")
    for name in ("method", "mode", "scope", "task", "epsilon", "accountant", "adjacency"):
        ours, theirs = record["plan"].get(name), found["plan"].get(name)
        if ours != theirs:
            raise UserError(
                f"{audit} audits another plan: its {name} is {theirs}, the run's is {ours}"
            )
    return record | {"statement": record["statement"] | {"audit": found["audit"]}}
