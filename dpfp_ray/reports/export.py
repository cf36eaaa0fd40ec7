"""A finished run as a folder for others: a model for plain transformers, and its card."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfp_ray.models.export import Change, check_free, export_adapter, export_model
from dpfp_ray.privacy.statement import first_line
from dpfp_ray.reports.bundle import own_name
from dpfp_ray.reports.ledger import known_ledger, spent_on
from dpfp_ray.reports.model_card import base_model, model_card
from dpfp_ray.reports.statements import record_with_audit
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import write_text
from dpfp_ray.training.load_model import folder_of, predictor, weights_of
from dpfp_ray.training.record import plan_of


@dataclass(frozen=True)
class Exported:
    """Where a model is. `guarantee` is the first line of its card; `address` its page at the hub,
    None where it was not uploaded."""

    folder: Path
    guarantee: str
    address: str | None = None


def export(
    run: Any,
    folder: str | Path,
    *,
    name: str = "",
    audit: str | Path | None = None,
    adapter: bool = False,
    ledger: str | Path | None = None,
    overwrite: bool = False,
    push_to_hub: str | None = None,
) -> Exported:
    """Write the model of a finished run, with its model card, to a new `folder`.

    run          what `train` gave, or the folder that it wrote
    name         the model's name, for its card
    audit        the folder of an audit of the same method, for the card to state what it measured
    adapter      scope lora: a PEFT adapter in place of a whole model
    ledger       to state what the training records paid in all (default: the user's own, if it has
                 entries)
    overwrite    replace an earlier export
    push_to_hub  also upload it there, such as "me/model"; a new repository is private
    """
    record = record_with_audit(run, audit)
    target = Path(folder).expanduser()
    check_free(target, overwrite=overwrite)
    weights = weights_of(folder_of(run), record)
    plan = plan_of(record)
    if adapter and plan.scope != "lora":
        raise UserError(f"--adapter needs a run of scope lora, this one is of scope {plan.scope}")
    model = predictor(plan, record["labels"], weights)
    title = name or (push_to_hub or "").rpartition("/")[2]
    book = known_ledger(None if ledger is None else str(ledger))
    paid = "; ".join(one.sentence() for one in spent_on(book, [record]).sums) if book else ""

    def finish(built: Path) -> None:
        write_text(built / "README.md", model_card(record, title, paid=paid, adapter=adapter))

    if adapter:
        change = Change.of(plan, weights, base_model(plan) or own_name(plan.model))
        export_adapter(model, change, target, finish, overwrite=overwrite)
    else:
        export_model(model, target, finish, overwrite=overwrite)
    address = push(target, push_to_hub) if push_to_hub else None
    return Exported(target, first_line(record["statement"]), address)


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
