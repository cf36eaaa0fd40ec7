"""What a run needs before its first step: data, the calibrated noise, the model.

`representation: auto` is decided from public facts alone (the encoder's shape, D, K, whether
records are pairs, the σ of the budget). No record is looked at, so the choice costs no privacy.
"""

import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from dpfp_ray.data import Split, Table, Task
from dpfp_ray.data.public_text import public_texts
from dpfp_ray.data.split import count_units, number_persons
from dpfp_ray.data.tasks import load_task
from dpfp_ray.data.tokens import (
    PairTable,
    Tokenise,
    TokenTable,
    tokenise,
    tokenise_here,
    tokenise_sides,
)
from dpfp_ray.methods.parts.label_words import head_of_words, phrases_of
from dpfp_ray.methods.parts.one_release import LinearHead
from dpfp_ray.models import pretrained
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.representations import (
    CUSTOM,
    Floats,
    HeadClassifier,
    OwnEncoder,
    RepresentationTable,
    public_centre,
    represent,
)
from dpfp_ray.models.row_store import Encode, encode_here
from dpfp_ray.models.scopes import Lora
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.sampling import keyed_integer
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.dev_scores import fingerprint_rows
from dpfp_ray.training.record import Select


@dataclass(frozen=True)
class TaskFacts:
    """What is public of a task before anything is encoded."""

    records: int
    classes: int
    paired: bool


def choose_representation(plan: Plan, facts: TaskFacts, own: OwnEncoder | None = None) -> str:
    """The plan's own, checked; for "auto" the one that suits."""
    if plan.representation == "pair" and not facts.paired:
        raise UserError("representation pair needs two texts a record; give pair_column, or mean")
    *layers, other = representations_for(plan, facts.paired)
    if own is not None:
        return own.resolve_representation(other)
    if layers:
        # Rows as wide as all layers together have to have at most as much noise as signal.
        assert plan.spec.noise_to_signal is not None
        bound = plan.bind(records=facts.records, classes=facts.classes)
        width = pretrained.width_of_layers(plan.model)
        if plan.spec.noise_to_signal(bound, noise_multiplier(bound), width, facts.classes) <= 1:
            other = "layers"
    return pretrained.resolve_representation(plan.model, other)


def possible_representations(plan: Plan, paired: bool) -> list[str]:
    """What plans read that differ from this one in numbers alone: its budget, B, C, epochs."""
    names = representations_for(plan, paired)
    return [pretrained.resolve_representation(plan.model, name) for name in names]


def representations_for(plan: Plan, paired: bool) -> list[str]:
    """Between which the plan's numbers decide; the last one is for much noise."""
    if plan.representation == "auto" and plan.scope == "head":
        if paired:
            return ["pair"]
        if plan.spec.noise_to_signal is not None:
            return ["layers", "auto"]
    return [plan.representation]


@dataclass
class Data:
    """The task as tables; `dev` maps a split's name to its table."""

    train: Table
    dev: dict[str, Table]


@dataclass
class Public:
    """Public text: its rows as the teacher's encoder sees them, and its tokens for the student."""

    rows: RepresentationTable
    tokens: TokenTable


@dataclass
class Inputs:
    """What many plans can share: the task as tokens, and the encoder's initial weights."""

    data: Data
    label_names: tuple[str, ...]
    representation: str
    # Set when the encoder is not on this machine's disk: in Ray's object store, or the caller's.
    make_model: Callable[[Plan, int], Classifier] | None = None
    records: Split | None = None  # the private records, for the ledger; not on Ray's workers
    dev_records: dict[str, Split] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)  # of dev sets, by split
    columns: Mapping[str, Any] = field(default_factory=dict)  # those that were read, or guessed
    seconds: float = 0.0  # reading, tokenising and encoding, as far as no cache had it
    paired: bool = False
    units: int = 0  # D: records, or persons; 0: as many as `data.train` has
    words: Table | None = None  # phrases for the classes, where a head is made from them
    public: Public | None = None  # what a teacher labels; `data.train` is then the teacher's
    teacher_representation: str | None = None

    def bind(self, plan: Plan) -> Plan:
        return plan.bind(
            records=self.units or count_units(self.data.train),
            representation=self.representation,
            classes=len(self.label_names),
            public_records=len(self.public.tokens) if self.public else None,
            teacher_representation=self.teacher_representation,
        )


@dataclass
class Prepared:
    """A plan bound to its data, calibrated, ready for the first step."""

    plan: Plan
    inputs: Inputs
    noise_multiplier: float
    build_seconds: float = 0.0  # calibration and building the model

    @property
    def data(self) -> Data:
        return self.inputs.data


@dataclass(frozen=True)
class Run:
    """One run of a prepared plan, from the start or from a saved `state`. `seed` is secret.

    The training loss of a private run is computed from private records without noise: it leaves
    the loop only with `show_training_loss`. `select` says which epoch's weights the run ends with.
    """

    prepared: Prepared
    seed: int
    state: dict[str, Any] | None = None
    seed_known: bool = False
    show_training_loss: bool = False
    select: Select = "last"

    def __post_init__(self) -> None:
        """A resumed run keeps the noise of its first steps, even if calibration has changed."""
        if self.state is not None:
            noise = self.state["noise_multiplier"]
            object.__setattr__(self, "prepared", replace(self.prepared, noise_multiplier=noise))

    @property
    def plan(self) -> Plan:
        return self.prepared.plan


@dataclass(frozen=True)
class Hands:
    """Who works on rows that no cache holds: this process, or others (`sweeps/shared.py`)."""

    tokenise: Tokenise = tokenise_here
    encode: Encode = encode_here


def load_inputs(
    plan: Plan,
    task: Task | None = None,
    own: OwnEncoder | None = None,
    hands: Hands = Hands(),  # noqa: B008 - frozen
) -> Inputs:
    """Load and tokenise; with a frozen encoder, also encode (`representations.py`).

    `task` and `own` are what the caller holds in memory, in place of what the plan would load.
    Nothing here depends on method, budget or seed, but for what `representation: auto` becomes.
    """
    started = time.perf_counter()
    plan = with_precision(plan)
    if own is None and plan.model.startswith(CUSTOM):
        raise UserError(
            f"model {plan.model} is a module in the memory of another call; give encoder= to "
            f"train(), or save it to a folder with save_pretrained and name that"
        )
    task = task or load_task(plan)
    if plan.teacher is not None:
        return load_lesson(plan, task, hands)
    paired, classes = task.train.pairs is not None, len(task.label_names)
    representation = choose_representation(plan, TaskFacts(task.train.units, classes, paired), own)
    tokenizer = own.tokenizer if own else pretrained.load_tokenizer(plan.model)

    def table(split: Split, name: str, centre: Floats | None = None) -> Table:
        if plan.scope != "head":
            return tokenise(split, tokenizer, plan.max_length, name, hands.tokenise)
        tokens = tokens_for(representation, split, tokenizer, plan.max_length, name, hands.tokenise)
        if own:
            return own.represent(tokens, representation, plan.precision, centre)
        made = (tokens, plan.model, representation, plan.precision, name, centre)
        return represent(*made, hands.encode)

    centre: Floats | None = None
    if plan.centring == "dev":
        public = [table(split, name) for name, split in task.dev.items()]
        centre = public_centre([t for t in public if isinstance(t, RepresentationTable)])
    words: Table | None = None
    if plan.start == "words" or not plan.spec.reads_records:
        if paired:
            raise UserError(
                "words for the classes say nothing of two texts together; use a task of one text, "
                "or start zero"
            )
        words = table(phrases_of(plan.label_words, task.label_names), "class words", centre)
    if words is not None and not plan.spec.reads_records:
        train_table = words
    else:
        train_table = table(task.train, f"{task.name} train", centre)
    if isinstance(train_table, RepresentationTable) and isinstance(words, RepresentationTable):
        train_table = replace(train_table, words=words)
    if task.train.users is not None and plan.spec.reads_records:
        train_table = replace(cast(Any, train_table), persons=number_persons(task.train.users))
    data = Data(train_table, {name: table(split, name, centre) for name, split in task.dev.items()})
    make_model = partial(_classifier, own.classifier, data, classes) if own else None
    return Inputs(
        data,
        task.label_names,
        representation,
        make_model,
        task.train,
        task.dev,
        {name: fingerprint_rows(split) for name, split in task.dev.items()},
        task.train.columns,
        time.perf_counter() - started,
        paired,
        task.train.units,
        words,
    )


def load_lesson(plan: Plan, task: Task, hands: Hands) -> Inputs:
    """The teacher's inputs, with public text for it to label, and dev as the student reads it."""
    texts = public_texts(plan, task)
    facts = TaskFacts(task.train.units, len(task.label_names), paired=False)
    representation = choose_representation(plan, facts)
    teacher = load_inputs(plan.private_part, task, hands=hands)
    started = time.perf_counter()
    seen_as, model = teacher.representation, plan.private_part.model
    tokenizer = pretrained.load_tokenizer(model)
    tokens = tokens_for(seen_as, texts, tokenizer, plan.max_length, "public text", hands.tokenise)
    rows = represent(tokens, model, seen_as, plan.precision, "public text", None, hands.encode)
    tokenizer = pretrained.load_tokenizer(plan.model)

    def table(split: Split, name: str) -> TokenTable:
        return tokenise(split, tokenizer, plan.max_length, name, hands.tokenise)

    return replace(
        teacher,
        data=Data(teacher.data.train, {name: table(dev, name) for name, dev in task.dev.items()}),
        representation=representation,
        public=Public(rows, table(texts, "public text")),
        teacher_representation=seen_as,
        seconds=teacher.seconds + time.perf_counter() - started,
    )


def tokens_for(
    representation: str, split: Split, tokenizer: Any, max_length: int, name: str, work: Tokenise
) -> TokenTable | PairTable:
    """As the representation reads them: the two texts of a pair by themselves, or jointly."""
    tokens = tokenise_sides if representation == "pair" else tokenise
    return tokens(split, tokenizer, max_length, name, work)


def _classifier(
    build: Callable[..., Classifier], data: Data, classes: int, plan: Plan, head_seed: int
) -> Classifier:
    """What `build` makes for `plan`, from the user's own encoder or one on disk."""
    parts = {"scope": plan.scope, "lora": Lora.of(plan), "dropout": plan.dropout}
    model = build(plan.representation, classes, head_seed=head_seed, **parts)
    if plan.scope != "head":
        freeze_unreached(model, data)
    return model


def prepare(plan: Plan, inputs: Inputs | None = None) -> Prepared:
    plan = with_precision(plan)
    inputs = inputs or load_inputs(plan)
    started = time.perf_counter()
    bound = inputs.bind(plan)
    noise = noise_multiplier(bound)
    return Prepared(bound, inputs, noise, time.perf_counter() - started)


def with_precision(plan: Plan) -> Plan:
    """The plan, with the precision that suits this machine if it is left open.

    Rows of a frozen encoder are kept for all machines, and other libraries train in fp32. Cards
    without bf16 have no TF32 either: there fp32 it is.
    """
    if plan.precision != "auto":
        return plan
    trains_encoder = plan.scope != "head" and not plan.spec.by_library
    bf16 = (
        trains_encoder
        and default_device().type == "cuda"
        and torch.cuda.is_bf16_supported(including_emulation=False)
    )
    return replace(plan, precision="bf16" if bf16 else "fp32")


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build_model(prepared: Prepared, seed: int, device: torch.device | None = None) -> Classifier:
    started = time.perf_counter()
    plan, head_seed = prepared.plan, keyed_integer(seed, "head")
    classes, table = len(prepared.inputs.label_names), prepared.data.train
    model: Classifier
    if isinstance(table, RepresentationTable) and plan.teacher is None:
        # The encoder has done its work: no trial needs to load it.
        model = HeadClassifier(table.width, classes, plan.representation, head_seed)
        model.bounded = (plan.scaling, plan.C) if plan.one_release else None
        if table.centre is not None:
            model.centre = torch.from_numpy(np.array(table.centre))
    elif prepared.inputs.make_model is not None:
        model = prepared.inputs.make_model(plan, head_seed)
    else:
        build = partial(pretrained.build_classifier, plan.model)
        model = _classifier(build, prepared.data, classes, plan, head_seed)
    if plan.start == "words" and not plan.one_release:
        start_from_words(model, prepared)
    device = device or default_device()
    if device.type == "cuda":  # for `machine.repeatable`; read when CUDA multiplies first
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model = model.to(device)
    prepared.build_seconds += time.perf_counter() - started
    return model


@torch.no_grad()
def start_from_words(model: Classifier, prepared: Prepared) -> None:
    """The head of class words in place of a random one, for rows about as long as theirs."""
    words = prepared.inputs.words
    assert words is not None, "these inputs were loaded for another plan"
    h = model.represent_rows(words, np.arange(len(words)), prepared.plan.precision).numpy()
    norms = np.linalg.norm(h, axis=1, keepdims=True)
    put_head(model, head_of_words(h / norms, words.labels, model.classes), float(norms.mean()))


@torch.no_grad()
def put_head(model: Classifier, head: LinearHead, length: float) -> None:
    """The head for rows u = h/`length` as one for h, which is what the model feeds it."""
    model.head.weight.copy_(torch.from_numpy(head.weight / length))
    model.head.bias.copy_(torch.from_numpy(head.bias))


def freeze_unreached(model: Classifier, data: Data) -> None:
    """Freeze weights on which the output does not depend (some encoders carry unused ones).

    Asked of one dev row, which is public; such weights could neither learn nor leak.
    """
    table = next(iter(data.dev.values()))
    model(table.collate(np.arange(1))).sum().backward()
    unreached = [(name, p) for name, p in trainable_parameters(model) if p.grad is None]
    for _, parameter in unreached:
        parameter.requires_grad_(False)
    model.zero_grad(set_to_none=True)
    if unreached:
        names = ", ".join(name for name, _ in unreached[:3])
        text = f"{len(unreached)} weights do not affect the output and stay as they are: {names}"
        warnings.warn(text, stacklevel=2)
