"""Flags of `experiments.train`, and what they make: a task, a model, an optimizer and a loop."""

import dataclasses

import jax
from tokenizers import Tokenizer

from attn_jax import scaling
from attn_jax.nn import TransformerConfig
from attn_jax.nn.config import POSITIONS
from attn_jax.parallel import Layout, make_mesh
from attn_jax.parallel.meshes import check_divides
from attn_jax.training import AttentionMonitor, Limits, LoopConfig, OptimizerConfig, tasks
from attn_jax.training.optimizers import OPTIMIZERS, SCHEDULES
from attn_jax.training.tasks import Task
from experiments.config import Config, option

DEFAULT_LENGTH = 64
# Flags that act with some tasks only; all others refuse them.
ONLY_WITH = {
    "length": ("text", "recall", "copy"),
    "text_file": ("text",),
    "vocabulary_size": ("text",),
    "num_pairs": ("recall",),
    "distance": ("copy",),
    "num_symbols": ("recall", "copy"),
}
PRESETS = {
    "smoke": {
        "model_width": 32,
        "batch_size": 8,
        "steps": 400,
        "evaluate_every": 100,
        "checkpoint_every": 100,
    },
    "quick": {},
    "full": {
        "num_layers": 4,
        "steps": 8000,
        "evaluate_every": 500,
        "checkpoint_every": 500,
        "evaluation_batches": 16,
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """Flags of `experiments.train`. A number that may be absent is 0 where it is."""

    task: str = option("text", "what is learned", choices=("text", "recall", "relation", "copy", "digits"))
    text_file: str = option("", "UTF-8 text of task=text; empty: the English of pydoc_data.topics, part of Python")
    vocabulary_size: int = option(0, "byte pairs of task=text, at least 256; 0: characters", least=0)
    length: int = option(0, f"tokens of a sequence of text, recall or copy; 0: {DEFAULT_LENGTH}", least=0)
    num_pairs: int = option(0, "pairs of task=recall; 0: 8", least=0)
    num_symbols: int = option(0, "of task=copy, or keys and as many values of recall; 0: 16", least=0)
    distance: int = option(0, "how far back task=copy reaches; 0: 16", least=0)

    num_layers: int = option(2, "blocks", least=1)
    model_width: int = option(128, "D", least=1)
    num_heads: int = option(4, "query heads", least=1)
    num_kv_heads: int = option(0, "key/value heads, which divide num_heads; 0: as many", least=0)
    head_width: int = option(0, "of a head; 0: model_width / num_heads", least=0)
    mlp_width: int = option(0, "inside the MLP; 0: 4 model_width", least=0)
    positions: str = option(
        "rotary", "how a token knows where it sits", choices=tuple(name or "none" for name in POSITIONS)
    )
    scale_rule: str = option("inverse_sqrt", "what multiplies q·k", choices=scaling.RULES)
    tie: bool = option(False, "W_Q = W_K (tie_query_key)")
    qk_norm: str = option("none", "normalisation of queries and keys", choices=("none", "rms", "l2"))
    use_sinks: bool = option(False, "a learned sink in every head")
    window: int = option(0, "tokens that a token sees, itself and those before it; 0: all", least=0)
    dropout_rate: float = option(0.0, "on weights, embeddings and branches", least=0, most=1)

    optimizer: str = option("adamw", "how parameters move", choices=OPTIMIZERS)
    learning_rate: float = option(3e-3, "the largest one", least=0)
    schedule: str = option("cosine", "of the learning rate, after the warm-up, down to nothing", choices=SCHEDULES)
    warmup: float = option(0.05, "share of the steps over which the learning rate grows", least=0, most=1)
    weight_decay: float = option(0.1, "times the learning rate; not on gains and the like", least=0)
    clip_norm: float = option(1.0, "largest norm of a gradient; 0: any", least=0)
    z_loss: float = option(0.0, "weight of the squared log-normaliser in the loss", least=0)

    steps: int = option(2000, "in all", least=1)
    batch_size: int = option(16, "sequences of a step", least=1)
    seeds: int = option(1, "runs at once: seed, seed + 1, …", least=1)
    steps_per_call: int = option(
        10, "steps of one compiled call, which divides steps; signals wait for its end", least=1
    )
    evaluate_every: int = option(200, "steps between evaluations", least=1)
    evaluation_batches: int = option(8, "of an evaluation; fewer where less is held out", least=1)
    checkpoint_every: int = option(200, "steps between checkpoints", least=1)
    keep: int = option(3, "checkpoints that are kept", least=2)

    monitor: bool = option(True, "watch where attention goes while it learns")
    monitor_every: int = option(10, "steps between looks", least=1)
    monitor_rows: int = option(64, "queries of each head that are looked at; 0: all", least=0)
    limits: str = option("", "file of limits that were calibrated on a healthy run; empty: the default ones")

    sample: int = option(200, "tokens that a model of text writes at the end", least=0, most=100_000)
    temperature: float = option(0.7, "of that sample; 0: always the likeliest token", least=0)

    data: int = option(0, "devices that share the sequences of a batch; 0: 1, of several processes all left", least=0)
    heads: int = option(1, "devices that share the heads of attention, and the MLP", least=1)
    sequence: int = option(1, "devices that share the tokens of a sequence", least=1)
    shard_parameters: bool = option(False, "spread parameters over --data instead of copying them")
    coordinator: str = option("", "host:port of process 0 of several; auto: as the cluster says; empty: one process")
    processes: int = option(0, "of a run with a coordinator, which all get the same flags but one; 0: auto", least=0)
    process: int = option(0, "which of them this is: the flag that differs", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.coordinator and (self.processes or self.process):
            raise ValueError(
                f"processes and process have no effect without a coordinator, got {self.processes} and {self.process}"
            )
        for name, kinds in ONLY_WITH.items():
            if getattr(self, name) and self.task not in kinds:
                raise ValueError(
                    f"{name} has no effect with task={self.task}, only with {', '.join(kinds)}; "
                    f"got {getattr(self, name)}"
                )
        for name in ("monitor_every", "monitor_rows", "limits"):
            if not self.monitor and getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"{name} has no effect with monitor=false, got {getattr(self, name)}")
        if self.seed + self.seeds > 2**31:
            raise ValueError(f"seed + seeds must be at most 2³¹, got {self.seed} + {self.seeds}")
        self.optimizer_config(self.steps)
        self.loop_config(None)
        self.transformer(vocabulary_size=2, length=self.length or DEFAULT_LENGTH)

    def make_task(self) -> tuple[Task, Tokenizer | None]:
        """The task, and the tokenizer of a text. Raises ValueError and OSError in one line."""
        if self.task == "text":
            return tasks.language_model(
                self._read(), length=self.length or DEFAULT_LENGTH, vocabulary_size=self.vocabulary_size or None
            )
        if self.task == "digits":
            return tasks.digits(jax.random.key(self.seed)), None
        if self.task == "relation":
            return tasks.Relation(), None
        length, symbols = self.length or DEFAULT_LENGTH, self.num_symbols or 16
        if self.task == "copy":
            return tasks.Copy(num_symbols=symbols, distance=self.distance or 16, length=length), None
        pairs = self.num_pairs or 8
        return tasks.Recall(num_pairs=pairs, num_keys=symbols, num_values=symbols, length=length), None

    def _read(self) -> str:
        try:
            return tasks.read_text(self.text_file or None)
        except OSError as error:
            raise ValueError(f"--text_file={self.text_file} cannot be read: {error.strerror}") from error

    def transformer(self, *, vocabulary_size: int, length: int) -> TransformerConfig:
        """A causal transformer."""
        return TransformerConfig(
            vocabulary_size=vocabulary_size,
            num_layers=self.num_layers,
            model_width=self.model_width,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or None,
            head_width=self.head_width or None,
            mlp_width=self.mlp_width or None,
            positions=_or_none(self.positions),
            max_length=length if self.positions == "learned" else None,
            scale_rule=self.scale_rule,
            tie_query_key=self.tie,
            qk_norm=_or_none(self.qk_norm),
            use_sinks=self.use_sinks,
            local_window_size=(self.window - 1, 0) if self.window else None,
            dropout_rate=self.dropout_rate,
        )

    @property
    def run_seeds(self) -> range:
        """Of each run."""
        return range(self.seed, self.seed + self.seeds)

    def optimizer_config(self, steps: int) -> OptimizerConfig:
        """How parameters move in a run of so many steps."""
        return OptimizerConfig(
            name=self.optimizer,
            schedule=self.schedule,
            warmup_steps=round(self.warmup * steps),
            total_steps=None if self.schedule == "constant" else steps,
            clip_norm=self.clip_norm or None,
            weight_decay=self.weight_decay,
        )

    def attention_monitor(self, length: int) -> AttentionMonitor | None:
        """Who watches sequences of this length. Raises LimitsError if the file of limits cannot be used."""
        if not self.monitor:
            return None
        there = self.batch_size * length
        rows = min(self.monitor_rows or there, there)
        limits = Limits.load(self.limits) if self.limits else Limits()
        return AttentionMonitor(every=self.monitor_every, rows=None if rows == there else rows, limits=limits)

    def layout(self) -> Layout | None:
        """How devices share the run; None: one device does it all. Asks JAX for the devices."""
        several, asked = jax.process_count() > 1, max(self.data, 1) * self.heads * self.sequence
        if not several and asked == 1:
            if self.shard_parameters:
                raise ValueError("shard_parameters has no effect on one device: ask for more by --data")
            return None
        if self.seeds > 1:
            raise ValueError(f"seeds are trained on one device, got seeds={self.seeds} and more devices than one")
        devices = jax.devices()
        data = self.data or (max(len(devices) // (self.heads * self.sequence), 1) if several else 1)
        mesh = make_mesh(
            data=data,
            heads=self.heads,
            sequence=self.sequence,
            devices=devices if several else devices[:asked],
        )
        check_divides("batch_size", self.batch_size, mesh, "data")
        return Layout(mesh, self.shard_parameters)

    def loop_config(self, held_out: int | None) -> LoopConfig:
        """How long, and how often what, where so many sequences are held out (None: any number)."""
        batches = self.evaluation_batches
        if held_out is not None:
            if held_out < self.batch_size:
                raise ValueError(
                    f"batch_size must be at most {held_out}, the sequences held out, got {self.batch_size}"
                )
            batches = min(batches, held_out // self.batch_size)
        return LoopConfig(
            steps=self.steps,
            batch_size=self.batch_size,
            steps_per_call=self.steps_per_call,
            evaluate_every=self.evaluate_every,
            evaluation_batches=batches,
            checkpoint_every=self.checkpoint_every,
            keep=self.keep,
        )


def _or_none(name: str) -> str | None:
    return None if name == "none" else name
