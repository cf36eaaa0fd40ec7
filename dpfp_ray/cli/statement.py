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

from dpfp_ray.cli.options import adder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("run RUN", "folder of a finished run")
    add("--format text|json|nist|registry", "default: text", default="text")
    add("--name", "name of the product, for the registry", default="")
    add("--audit DIR", "folder of an audit of the same method")


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray import statement

    text = statement(
        arguments.run, form=arguments.format, name=arguments.name, audit=arguments.audit
    )
    if arguments.format == "text":
        from dpfp_ray.system.terminal import print_prose

        print_prose(text)
    else:
        print(text)
    return 0
