"""A trained model as a folder that `transformers.pipeline` loads where dpfp-ray is not installed.

    config.json, model.safetensors   the whole model: a frozen encoder is in it too
    modeling_dpfp.py                 its class, which `auto_map` names
    tokenizer.json …                 the tokenizer, truncating where training did

What `scope lora` has trained can also be a folder for PEFT: the change alone, without the encoder.

    adapter_config.json, adapter_model.safetensors   LoRA's A and B, for the encoder
    head.safetensors                                 the head (and the pooler, where it is used)
    config.json, modeling_dpfp.py, tokenizer.json …  as in a whole export; `from_adapter` joins them

Stock classes do not fit: they have other heads, know no mean pooling and bound nothing. Loaded as
one of them, a model would start with a random head and no error; so the folder has a model type of
its own, and transformers asks for trust_remote_code instead.
"""

import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dpfp_ray.data.tokens import token_limit
from dpfp_ray.models import modeling_dpfp
from dpfp_ray.models.modeling_dpfp import DpfpConfig
from dpfp_ray.models.predictor import Predictor
from dpfp_ray.models.scopes import Lora
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import whole_folder

CODE = "modeling_dpfp"
WEIGHTS = "model.safetensors"


def export_model(
    predictor: Predictor, folder: Path, finish: Callable[[Path], None], *, overwrite: bool = False
) -> None:
    """Write the folder, whole or not at all; `finish` adds the card and what else belongs there."""
    with export_folder(predictor, folder, overwrite=overwrite) as built:
        save_tensors(predictor.classifier.state_dict(), built / WEIGHTS)
        finish(built)


@contextmanager
def export_folder(predictor: Predictor, folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder with the model's config, class and tokenizer, for its weights to be put into."""
    check_free(folder, overwrite=overwrite)
    encoder = predictor.classifier.encoder
    if not isinstance(encoder, PreTrainedModel):
        raise UserError(
            f"the encoder is a {type(encoder).__name__} of your own, which transformers cannot "
            f"load; train with --model FOLDER of a transformers encoder to export"
        )
    with whole_folder(folder, keep=lambda _: not overwrite) as built:
        model_config(predictor).save_pretrained(built)
        _save_tokenizer(predictor, built)
        shutil.copy(Path(modeling_dpfp.__file__), built / f"{CODE}.py")
        yield built


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    own = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    save_file(own, path, metadata={"format": "pt"})
    path.chmod((path.parent / "config.json").stat().st_mode)  # it makes owner-only files


def check_free(folder: Path, *, overwrite: bool) -> None:
    """Refuse what is not ours to replace."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; give a folder")
    if any(folder.iterdir()):
        ours = (folder / f"{CODE}.py").is_file()
        if not ours:
            raise UserError(f"{folder} holds other files; give a new folder")
        if not overwrite:
            raise UserError(f"{folder} already holds an export; give a new folder, or --overwrite")
    elif not overwrite:
        folder.rmdir()  # an empty one is as good as none


def model_config(predictor: Predictor) -> DpfpConfig:
    """All that the exported class needs to build itself, with transformers' own label names."""
    classifier = predictor.classifier
    encoder: Any = classifier.encoder
    inner = encoder.config.to_dict()
    for name in ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype"):
        inner.pop(name, None)
    options: dict[str, Any] = {"attn_implementation": encoder.config._attn_implementation}
    if "add_pooling_layer" in inspect.signature(type(encoder).__init__).parameters:
        options["add_pooling_layer"] = getattr(encoder, "pooler", None) is not None
    return DpfpConfig(
        encoder=inner,
        encoder_options=options,
        representation=classifier.representation,
        width=classifier.width,
        bounded=classifier.bounded,
        precision=predictor.precision,
        centred=classifier.centre is not None,
        id2label=dict(enumerate(predictor.labels)),
        label2id={label: number for number, label in enumerate(predictor.labels)},
        architectures=["DpfpForSequenceClassification"],
        problem_type="single_label_classification",
        pad_token_id=predictor.tokenizer.pad_token_id,
        dtype=torch.float32,
        auto_map={
            "AutoConfig": f"{CODE}.DpfpConfig",
            "AutoModelForSequenceClassification": f"{CODE}.DpfpForSequenceClassification",
        },
        custom_pipelines={
            "text-classification": {
                "impl": f"{CODE}.DpfpPipeline",
                "pt": ["AutoModelForSequenceClassification"],
                "type": "text",
            }
        },
    )


def _save_tokenizer(predictor: Predictor, folder: Path) -> None:
    """On a copy's files: the limit of rows as in training, padding on the right."""
    tokenizer = predictor.tokenizer
    kept = tokenizer.model_max_length, tokenizer.padding_side
    tokenizer.model_max_length = token_limit(tokenizer, predictor.max_length, paired=False)
    tokenizer.padding_side = "right"
    try:
        tokenizer.save_pretrained(folder)
    finally:
        tokenizer.model_max_length, tokenizer.padding_side = kept


HEAD, ADAPTER = "head.safetensors", "adapter_model.safetensors"
OURS, THEIRS = "encoder.", "base_model.model."  # how weights of the encoder's layers are called


@dataclass(frozen=True)
class Change:
    """LoRA's weights by their names in a run, and the encoder that they are a change of."""

    lora: Lora
    weights: Mapping[str, Tensor]
    base: str

    @staticmethod
    def of(plan: Plan, weights: Mapping[str, Tensor], base: str) -> "Change":
        own = {name: value for name, value in weights.items() if ".lora_" in name}
        return Change(Lora.of(plan), own, base)

    @property
    def targets(self) -> list[str]:
        """The encoder's layers that it changes."""
        names = (name.removeprefix(OURS).partition(".lora_")[0] for name in self.weights)
        return sorted(set(names))


def export_adapter(
    predictor: Predictor,
    change: Change,
    folder: Path,
    finish: Callable[[Path], None],
    *,
    overwrite: bool = False,
) -> None:
    """Write the folder, whole or not at all."""
    from peft import LoraConfig, TaskType

    classifier = predictor.classifier
    with export_folder(predictor, folder, overwrite=overwrite) as built:
        layers = [classifier.encoder.get_submodule(name) for name in change.targets]
        LoraConfig(
            task_type=TaskType.FEATURE_EXTRACTION,
            base_model_name_or_path=change.base,
            r=change.lora.rank,
            lora_alpha=change.lora.alpha,  # type: ignore[arg-type]  # peft only multiplies with it
            lora_dropout=0.0,
            target_modules=change.targets,
            fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers),
            inference_mode=True,
        ).save_pretrained(str(built))
        renamed = {
            THEIRS + name.removeprefix(OURS).replace(".default.", "."): value
            for name, value in change.weights.items()
        }
        save_tensors(renamed, built / ADAPTER)
        pooler = ".pooler." if classifier.representation == "pooler" else "no pooler"
        rest = {
            name: value
            for name, value in classifier.state_dict().items()
            if name.startswith("head.") or pooler in name
        }
        save_tensors(rest, built / HEAD)
        finish(built)
