"""A finished run as a model that plain transformers loads, with its model card.

Examples:

  dpfp export runs/demo models/demo
  dpfp export runs/demo models/demo --audit runs/demo-audit
  dpfp export runs/demo models/demo --push-to-hub me/demo-private
  dpfp export runs/lora models/lora --adapter

and then, wherever transformers is installed (dpfp-ray need not be):

  pipeline("text-classification", "models/demo", trust_remote_code=True)("a warm and funny film")

DIR gets the whole model (a frozen encoder too), its tokenizer, the small file with its class, and a
README.md: what it does, how well, what is promised about the training records and what is not, and
how to make it again. A nominal or refuted ε is said in that card's first line. --audit takes the
folder of a `dpfp audit` of the same method, so that the card states what it measured.

--adapter, for scope lora: a small folder with the LoRA weights in PEFT's form and the head, without
the encoder. Without it they are merged into the encoder.

The hub's token is taken from HF_TOKEN or `hf auth login`; a new repository is private.
"""

import argparse

from dpfp_ray.cli.options import adder, given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("run RUN", "folder of a finished run")
    add("folder DIR", "new folder for the model")
    add("--name", "the model's name, for its card", default="")
    add("--audit DIR", "folder of an audit of the same method")
    add("--adapter", "scope lora: a PEFT adapter, not a whole model")
    add("--ledger PATH_OR_URI", "to state what the training records paid in all")
    add("--overwrite", "replace an earlier export in DIR")
    add("--push-to-hub NAME", "also upload to this repository, such as me/model")


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray import export

    names = ("name", "audit", "adapter", "ledger", "overwrite", "push_to_hub")
    made = export(arguments.run, arguments.folder, **given(arguments, *names))
    print(made.folder)
    print(made.guarantee)
    if made.address:
        print(made.address)
    return 0
