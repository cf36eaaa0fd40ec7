"""A trained model that answers as training's own evaluation does (texts truncated to the same
`max_length`, the same precision, bounded rows), and as a folder that `transformers.pipeline` loads
where dpfp-ray is not installed.

    config.json, model.safetensors   the whole model: a frozen encoder is in it too
    modeling_dpfp.py                 its class, which `auto_map` names
    tokenizer.json …                 the tokenizer, truncating where training did

What `scope lora` has trained can also be a folder for PEFT: in place of model.safetensors LoRA's A
and B (adapter_config.json, adapter_model.safetensors) and head.safetensors (with the pooler, where
it is used); `from_adapter` joins them with the encoder.

Stock classes do not fit: loaded as one of them, a model would start with a random head and no
error. So the folder has a model type of its own, and transformers asks for trust_remote_code.
"""

import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dpfp_ray.data import Split, Table
from dpfp_ray.data.batches import PART_COST, split_rows
from dpfp_ray.data.tokens import token_limit, tokenise_once, tokenise_sides
from dpfp_ray.models import modeling_dpfp
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.models.modeling_dpfp import DpfpConfig
from dpfp_ray.models.scopes import Lora
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import whole_folder

ROWS = 256  # in memory at once
Text = str | tuple[str, str]  # a text, or a pair of them


@dataclass(frozen=True)
class Prediction:
    """One row's answer: the likeliest class, its probability, and those of all classes."""

    label: str
    score: float
    probabilities: dict[str, float]


class Predictor:
    """`predict(texts)` for people, `probabilities(texts)` for arithmetic.

    `build` gives the classifier; it is called when the first row comes, so that a run that nobody
    asks anything of costs no encoder.
    """

    def __init__(
        self,
        build: Callable[[], Classifier],
        tokenizer: Any,
        labels: Sequence[str],
        *,
        max_length: int,
        precision: str = "fp32",
    ) -> None:
        self._build = build
        self.tokenizer = tokenizer
        self.labels = tuple(labels)
        self.max_length, self.precision = max_length, precision

    @cached_property
    def classifier(self) -> Classifier:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return self._build().to(device).eval()

    def predict(self, texts: str | Sequence[Text]) -> list[Prediction]:
        """One answer for each text (or pair of texts), in order.

        >>> model.predict(["a warm film", "a dull one"])[0].label  # doctest: +SKIP
        'positive'
        """
        return [self.answer(row) for row in self.probabilities(texts)]

    def answer(self, probabilities: NDArray[np.float64]) -> Prediction:
        best = int(probabilities.argmax())
        shares = dict(zip(self.labels, map(float, probabilities), strict=True))
        return Prediction(self.labels[best], float(probabilities[best]), shares)

    @torch.inference_mode()
    def probabilities(self, texts: str | Sequence[Text]) -> NDArray[np.float64]:
        split = rows_of([texts] if isinstance(texts, str) else texts)
        model = self.classifier
        if model.representation != "pair":
            table: Table = tokenise_once(split, self.tokenizer, self.max_length)
        elif split.pairs is not None:
            table = tokenise_sides(split, self.tokenizer, self.max_length, keep=False)
        else:
            raise UserError("this model was trained on pairs of texts; give two texts a row")
        device = next(model.parameters()).device
        found = np.empty((len(table), len(self.labels)))
        for part in split_rows(table.lengths, ROWS, PART_COST[device.type]):
            h = model.represent_rows(table, part, self.precision)
            found[part] = model.classify(h).double().softmax(1).cpu().numpy()
        return found


def rows_of(texts: Sequence[Text]) -> Split:
    paired = {not isinstance(text, str) for text in texts}
    if len(paired) > 1:
        raise UserError("some rows are one text and others are pairs; give all of them alike")
    pairs = [(text, "") if isinstance(text, str) else (text[0], text[1]) for text in texts]
    for number, row in enumerate(pairs):
        for text in row:
            if not isinstance(text, str):
                raise UserError(f"row {number} is {text!r:.60}; give text")
    seconds = [second for _, second in pairs] if True in paired else None
    return Split([first for first, _ in pairs], seconds, np.zeros(len(pairs), np.int64))


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
        if not (folder / f"{CODE}.py").is_file():
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
    """With the limit of rows as in training, and padding on the right."""
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
