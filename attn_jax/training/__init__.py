"""Training that survives: tasks and losses, a pure step, and a loop that continues to the same bits.

    task = tasks.Copy(num_symbols=16, distance=8)
    config = TransformerConfig(vocabulary_size=16, num_layers=2, model_width=64, num_heads=4)
    optimizer = OptimizerConfig(schedule="cosine", warmup_steps=20, total_steps=500)
    state = init_state(functools.partial(Transformer, config), optimizer, learning_rate=3e-3, seed=0)
    result = train(state, task, config=LoopConfig(steps=500), directory="results/copy", reporter=Console())

With `monitor=AttentionMonitor()` it also measures how the heads route, and says when that goes beyond its `Limits`.
`init_states` begins many runs, of other seeds and learning rates, that are trained at once.
"""

from attn_jax.training import losses, tasks
from attn_jax.training.checkpoints import CheckpointError, Checkpoints
from attn_jax.training.divergence import DivergedError, Divergence
from attn_jax.training.files import RunError
from attn_jax.training.loop import LoopConfig, Trained, train
from attn_jax.training.monitor import AttentionMonitor, Limits, calibrate
from attn_jax.training.objectives import SpreadLoss, token_loss
from attn_jax.training.optimizers import OptimizerConfig
from attn_jax.training.progress import Console, Progress
from attn_jax.training.run_log import RunLog
from attn_jax.training.state import TrainState, init_state, init_states, take_run
from attn_jax.training.step import evaluate, train_step, train_steps

__all__ = [
    "AttentionMonitor",
    "CheckpointError",
    "Checkpoints",
    "Console",
    "DivergedError",
    "Divergence",
    "Limits",
    "LoopConfig",
    "OptimizerConfig",
    "Progress",
    "RunError",
    "RunLog",
    "SpreadLoss",
    "TrainState",
    "Trained",
    "calibrate",
    "evaluate",
    "init_state",
    "init_states",
    "losses",
    "take_run",
    "tasks",
    "token_loss",
    "train",
    "train_step",
    "train_steps",
]
