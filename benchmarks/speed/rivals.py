"""The same work by others: plain Opacus, and `transformers.Trainer`."""

import contextlib
import tempfile
import time
from typing import Any

import torch
from torch import Tensor

from dpfp_ray.plan.values import make_plan
from dpfp_ray.training.prepare import build_model, prepare
from speed.contestants import Ours, Where, same_rows

HOOKS_BYTES = 2 * 2**30  # per-example gradients at once, as our own hooks allow themselves


def plain_opacus(where: Where, clipping: str, batch_size: int) -> Any:
    """Opacus by its own optimizer classes, one padded batch a step, as its tutorials do it."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    prepared = prepare(make_plan(where.values(batch_size, 2000, method="dpsgd")))
    plan, table, rows = prepared.plan, prepared.data.train, same_rows(prepared)
    model = build_model(prepared, 0, torch.device("cpu"))
    weights = [p for p in model.parameters() if p.requires_grad]
    base = torch.optim.AdamW(weights, lr=1e-6, fused=True)
    options: dict[str, Any] = {
        "noise_multiplier": prepared.noise_multiplier,
        "max_grad_norm": plan.C,
        "expected_batch_size": plan.B,
    }
    criterion: Any = torch.nn.CrossEntropyLoss(reduction="mean")
    ghost = clipping == "ghost"
    if ghost:
        wrapped: Any = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=plan.C, use_ghost_clipping=True
        )
        optimizer: Any = DPOptimizerFastGradientClipping(base, **options)
        criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion, "mean")
    else:
        wrapped = GradSampleModule(model)
        optimizer = DPOptimizer(base, **options)
    wrapped.train()
    size = sum(weight.numel() for weight in weights)
    most = plan.B if ghost else max(1, HOOKS_BYTES // (4 * size))

    def step(number: int) -> None:
        records = rows.draw(number)
        parts = [records[start : start + most] for start in range(0, len(records), most)]
        optimizer.zero_grad()
        for index, part in enumerate(parts):
            batch, labels = table.collate(part), torch.from_numpy(table.labels[part])
            optimizer.signal_skip_step(index < len(parts) - 1)
            criterion(wrapped(batch), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


class Epoch(Ours):
    """Ours: as many steps as the rival's epoch has, on as many rows."""

    def __init__(self, where: Where, steps: int) -> None:
        super().__init__("non_private", where, 32, 32 * steps)
        self.number = steps

    def __call__(self, number: int) -> None:
        for step in range(self.number):
            super().__call__(number * self.number + step)


class ForTrainer(torch.nn.Module):
    """Our classifier as the Trainer wants a model: it gives the loss."""

    def __init__(self, classifier: torch.nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        batch = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            batch["token_type_ids"] = token_type_ids
        logits = self.classifier(batch)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Trainer:
    """An epoch of `transformers.Trainer` with the same model.

    By default as transformers' own example does it (examples/pytorch/text-classification/
    run_glue.py): every row is padded to 128 tokens. At its best: rows of like length together,
    padded to the longest of their batch.
    """

    def __init__(self, where: Where, steps: int, best: bool) -> None:
        from dpfp_ray.models.pretrained import load_tokenizer

        values = where.values(32, 32 * steps, method="non_private")
        prepared = prepare(make_plan(values))
        table = prepared.data.train
        self.model = ForTrainer(build_model(prepared, 0, torch.device("cpu")))
        self.tokenizer: Any = load_tokenizer("minilm")
        self.best = best
        self.how = "grouped by length, dynamic padding" if best else "padded to 128, as run_glue.py"
        self.rows = []
        for index in range(len(table)):
            batch = table.collate([index])  # type: ignore[arg-type]
            row = {name: tensor[0].tolist() for name, tensor in batch.items()}
            if not best:
                row = {name: ids + [0] * (128 - len(ids)) for name, ids in row.items()}
            self.rows.append({**row, "labels": int(table.labels[index])})

    def __call__(self, number: int) -> float:
        """Its seconds from the beginning of the first step to the end of the last."""
        import transformers

        times: list[float] = []

        class Clock(transformers.TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                times.append(time.perf_counter())

            def on_train_end(self, *_: Any, **__: Any) -> None:
                times.append(time.perf_counter())

        collate = (
            transformers.DataCollatorWithPadding(self.tokenizer)
            if self.best
            else transformers.default_data_collator
        )
        grouped: dict[str, Any] = (
            {"train_sampling_strategy": "group_by_length"} if self.best else {}
        )
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
            settings = transformers.TrainingArguments(
                folder,
                per_device_train_batch_size=32,
                num_train_epochs=1,
                seed=number,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
                **grouped,
            )
            trainer = transformers.Trainer(
                self.model,
                settings,
                data_collator=collate,
                train_dataset=self.rows,
                callbacks=[Clock()],
            )
            trainer.train()
        return times[1] - times[0]
