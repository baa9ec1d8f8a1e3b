"""What the package needs, and why. `requirements.txt` pins the versions that are tested together."""

import pathlib
import re

from setuptools import find_packages, setup

root = pathlib.Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (root / "attn_jax" / "__init__.py").read_text(encoding="utf-8"))

setup(
    name="attn_jax",
    version=version[1] if version else "0",
    description="The attention laboratory for JAX: exact attention, experiments about it, and a diagnosis of models",
    long_description=(root / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["attn_jax", "attn_jax.*"]),
    install_requires=[
        "jax>=0.10",
        "flax>=0.12",  # NNX modules
        "numpy>=2.0",
        "einops>=0.8",  # heads are split and merged in its notation
        "jaxtyping>=0.3",  # shapes in signatures
        "optax>=0.2",  # optimizers, schedules, clipping; the search for adversarial weights
        "scipy>=1.13",  # clusters of heads
    ],
    extras_require={
        "models": [  # real checkpoints
            "gguf>=0.19",
            "jinja2>=3.1",  # chat templates, in its sandbox
            "safetensors>=0.4.5",
            "tokenizers>=0.20",
        ],
        "training": [
            "orbax-checkpoint>=0.11",  # writes and reads the arrays of a checkpoint
            "scikit-learn>=1.5",  # brings the digits
            "tokenizers>=0.20",  # learns byte pairs from a text
            "tensorboardX>=2.6",  # curves for TensorBoard; training does without
        ],
        "report": [  # experiments and their report
            "absl-py>=2.0",
            "jinja2>=3.1",
            "matplotlib>=3.9",
            "pandas>=2.2",
            "plotly>=6.0",  # its plotly.js, in the page of a model
            "rich>=13.0",
        ],
        "bench": [  # peers: sides of the benchmark, and makers of the goldens that our models are compared with
            "tokamax>=0.0.12",
            "torch>=2.9",
            "transformers>=5.0",
        ],
        "dev": [
            "beartype>=0.20",  # checks the shapes in signatures as they are called
            "chex>=0.1.90",
            "hypothesis>=6.100",
            "playwright>=1.50",  # drives the system's chromium, which opens the page of a model
            "pyright[nodejs]>=1.1.400",
            "pytest>=8.0",
            "pytest-xdist>=3.6",
            "ruff>=0.9",
        ],
    },
)
