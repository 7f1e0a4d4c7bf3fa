"""Packaging of megatron-patch: the library, the model zoo, the commands, RLHF and the example scripts."""

from setuptools import find_namespace_packages, setup

PACKAGES = ("megatron_patch", "model_zoo", "toolkits", "rlhf", "examples")
SCRIPTS = ("*.sh", "*.py", "*.yaml", "*.yml", "*.json", "*.txt", "*.md")

REQUIRES = [
    "megatron-core>=0.16.1,<0.20",
    "torch>=2.6",
    "transformers>=5.0",
    "safetensors",
    "datasets",
    "tokenizers",
    "pyyaml",
    "rich",
    "numpy",
    # megatron-core uses these two and does not declare them: without psutil a distributed save hangs.
    "psutil",
    "einops",
]

EXTRAS = {
    "te": ["transformer-engine[pytorch]"],
    "flash": ["flash-attn"],
    "demo": ["gguf", "accelerate", "matplotlib"],
    "test": ["pytest>=8", "pytest-timeout", "hypothesis", "ruff", "tensorboard", "sentencepiece", "setuptools>=70"],
}

COMMANDS = {
    "megatron-patch-convert": "toolkits.convert:main",
    "megatron-patch-verify": "toolkits.verify:main",
    "megatron-patch-plan": "toolkits.plan:main",
    "megatron-patch-families": "toolkits.families:main",
    "megatron-patch-flags": "toolkits.flags:main",
    "megatron-patch-preprocess-data": "toolkits.preprocess_data:main",
    "megatron-patch-doctor": "toolkits.doctor:main",
    "megatron-patch-pretrain": "megatron_patch.pretrain:main",
}

setup(
    name="megatron-patch",
    version="0.1.0",
    description="Hugging Face checkpoints trained by unmodified megatron-core and exported back",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_namespace_packages(
        include=[name + suffix for name in PACKAGES for suffix in ("", ".*")],
        exclude=["*__pycache__*"],
    ),
    package_data={"": list(SCRIPTS)},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": [f"{name} = {target}" for name, target in COMMANDS.items()]},
)
