"""What `scope lora` has trained, as a folder for PEFT: the change alone, without the encoder.

adapter_config.json, adapter_model.safetensors   LoRA's A and B, for the encoder
head.safetensors                                 the head (and the pooler, where it is used)
config.json, modeling_dpfp.py, tokenizer.json …  as in a whole export; `from_adapter` joins them
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from dpfp_ray.models.export import export_folder, save_tensors
from dpfp_ray.models.predictor import Predictor
from dpfp_ray.models.scopes import Lora
from dpfp_ray.plan.plan import Plan

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
