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
from pathlib import Path

from dpfp_ray.plan.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a finished run")
    parser.add_argument("folder", metavar="DIR", help="new folder for the model")
    parser.add_argument("--name", default="", help="the model's name, for its card")
    parser.add_argument("--audit", metavar="DIR", help="folder of an audit of the same method")
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="scope lora: a PEFT adapter, not a whole model",
    )
    parser.add_argument(
        "--ledger", metavar="PATH_OR_URI", help="to state what the training records paid in all"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export in DIR")
    parser.add_argument(
        "--push-to-hub", metavar="NAME", help="also upload to this repository, such as me/model"
    )


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray.cli.statement import record_with_audit
    from dpfp_ray.data.whole_files import write_text
    from dpfp_ray.models.export import check_free, export_model
    from dpfp_ray.models.export_adapter import Change, export_adapter
    from dpfp_ray.privacy.statement_forms import first_line
    from dpfp_ray.report.ledger import known_ledger, spent_on
    from dpfp_ray.report.model_card import base_model, model_card
    from dpfp_ray.report.portable import own_name
    from dpfp_ray.training.load_model import plan_of, predictor, weights_of

    record = record_with_audit(arguments.run, arguments.audit)
    folder = Path(arguments.folder).expanduser()
    check_free(folder, overwrite=arguments.overwrite)
    weights = weights_of(Path(arguments.run).expanduser(), record)
    plan = plan_of(record)
    if arguments.adapter and plan.scope != "lora":
        raise UserError(f"--adapter needs a run of scope lora, this one is of scope {plan.scope}")
    model = predictor(plan, record["labels"], weights)
    name = arguments.name or (arguments.push_to_hub or "").rpartition("/")[2]

    book = known_ledger(arguments.ledger)
    paid = "; ".join(one.sentence() for one in spent_on(book, [record]).sums) if book else ""

    def finish(built: Path) -> None:
        card = model_card(record, name, paid=paid, adapter=arguments.adapter)
        write_text(built / "README.md", card)

    if arguments.adapter:
        change = Change.of(plan, weights, base_model(plan) or own_name(plan.model))
        export_adapter(model, change, folder, finish, overwrite=arguments.overwrite)
    else:
        export_model(model, folder, finish, overwrite=arguments.overwrite)
    print(folder)
    print(first_line(record["statement"]))
    if arguments.push_to_hub:
        print(push(folder, arguments.push_to_hub))
    return 0


def push(folder: Path, name: str) -> str:
    """Upload to the hub; the address. Whatever goes wrong there is one line, the folder stays."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        api = huggingface_hub.HfApi()
        # One short question first: uploads retry for minutes without network.
        api.whoami()
        place = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=place.repo_id, folder_path=folder, commit_message="dpfp export")
        return str(place)
    except errors.LocalTokenNotFoundError:
        reason = "no token; set HF_TOKEN, or run hf auth login"
    except errors.OfflineModeIsEnabled:
        reason = "HF_HUB_OFFLINE forbids it"
    except errors.HFValidationError as error:
        reason = f"not a name for a repository ({error})"
    except Exception as error:  # the hub's client raises its HTTP library's own types
        first = (str(error).strip().splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first[:160]}"
    raise UserError(f"cannot upload to {name}: {reason}. The model is in {folder}")
