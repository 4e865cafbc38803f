"""Every export is read by the tool that it is for."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from bigmodel.cli.main import app
from bigmodel.plans import (
    DdpOptions,
    Fsdp2Options,
    HorovodOptions,
    Mesh,
    Offload,
    Plan,
    Stages,
)
from bigmodel.plans.document import save
from tests.exports.training import DDP, FSDP2, ZERO, recomputed

PIPELINE = Plan(
    backend="pipeline",
    mesh=Mesh(pipeline=2),
    units=("a", "b"),
    stages=Stages(schedule="gpipe", cuts=(1,)),
)


def export(folder: Path, plan: Plan, to: str, *options: str, code: int = 0):
    """Return what the command wrote into `folder`/out.EXT, and its stderr."""
    path = save(plan, folder / "plan.json")
    result = CliRunner().invoke(
        app, ["export", str(path), "--to", to, "--out", str(folder / "out"), *options]
    )
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    text = (folder / "out").read_text() if code == 0 else ""
    return text, " ".join(result.stderr.split())


def command_in(script: str, program: str) -> tuple[str, list[str]]:
    """Return what stands before the program in its line, and its words after it."""
    (line,) = [line for line in script.splitlines() if f"{program} " in line]
    words = shlex.split(line)
    index = words.index(program)
    return " ".join(words[:index]), words[index + 1 :]


def test_torchrun_reads_its_command(tmp_path) -> None:
    from torch.distributed.run import parse_args

    text, _ = export(tmp_path, DDP, "torchrun", "--script", "my train.py", "--", "-x")
    before, words = command_in(text, "torchrun")
    args = parse_args(words)
    assert before == f"BIGMODEL_PLAN={tmp_path / 'plan.json'}"
    assert (args.nnodes, args.nproc_per_node, args.standalone) == ("1", "2", True)
    assert (args.training_script, args.training_script_args) == ("my train.py", ["-x"])


def test_torchrun_on_several_machines(tmp_path) -> None:
    from torch.distributed.run import parse_args

    plan = replace(DDP, mesh=Mesh(replicate=16))
    text, said = export(tmp_path, plan, "torchrun", "--gpus-per-node", "8")
    _, words = command_in(text, "torchrun")
    args = parse_args(words)
    assert (args.nnodes, args.nproc_per_node) == ("2", "8")
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "$HEAD_NODE:29500")
    assert args.rdzv_id == "$JOB"
    assert "nodes 2 (the plan's 16 processes / 8)" in said
    done = subprocess.run(
        ["bash", str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert done.returncode
    assert "host name of the first machine" in done.stderr


def test_deepspeed_reads_its_command_and_its_configuration(tmp_path) -> None:
    from deepspeed.launcher.runner import parse_args
    from deepspeed.runtime.config import DeepSpeedConfig

    plan = replace(ZERO, mesh=Mesh(shard=4), zero_stage=2, precision="bf16")
    text, _ = export(
        tmp_path, plan, "deepspeed", "--nodes", "2", "--clip-norm", "0.5", "--", "-x"
    )
    before, words = command_in(text, "deepspeed")
    args = parse_args(words)
    assert before.startswith("BIGMODEL_PLAN=")
    assert (args.num_nodes, args.num_gpus) == (2, 2)
    assert (args.hostfile, args.no_local_rank) == ("$HOSTFILE", True)
    assert (args.user_script, args.user_args) == ("train.py", ["-x"])
    written = json.loads((tmp_path / "out.deepspeed.json").read_text())
    config = DeepSpeedConfig(written)
    assert config.zero_optimization_stage == 2
    assert config.bfloat16_config.enabled
    assert config.gradient_clipping == 0.5
    assert config.gradient_accumulation_steps == plan.accumulation


@pytest.mark.parametrize(
    "plan",
    [
        replace(DDP, ddp=DdpOptions()),
        FSDP2,
        ZERO,
        replace(FSDP2, mesh=Mesh(replicate=2, shard=2)),
    ],
    ids=["ddp", "fsdp2", "zero", "hsdp"],
)
def test_accelerate_reads_its_file(tmp_path, plan) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import (
        _validate_launch_command,
        launch_command_parser,
    )

    export(tmp_path, plan, "accelerate")
    path = (tmp_path / "out").rename(tmp_path / "plan.yaml")
    config = load_config_from_file(str(path))
    assert (config.num_processes, config.num_machines) == (plan.world, 1)
    kinds = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "deepspeed": "DEEPSPEED"}
    assert config.distributed_type.value == kinds[plan.backend]
    args = launch_command_parser().parse_args(["--config_file", str(path), "t.py"])
    args, *_ = _validate_launch_command(args)
    if plan.backend == "fsdp2":
        assert args.fsdp_version == 2
        assert args.fsdp_reshard_after_forward is True
        assert args.use_parallelism_config == (plan.mesh.replicate > 1)
        assert args.parallelism_config_dp_replicate_size == plan.mesh.replicate
    if plan.backend == "deepspeed":
        file = json.loads(Path(args.deepspeed_config_file).read_text())
        assert file["zero_optimization"]["stage"] == plan.zero_stage


def test_slurm_script_is_a_shell_script_that_sbatch_reads(tmp_path) -> None:
    plan = replace(FSDP2, mesh=Mesh(shard=16))
    text, said = export(tmp_path, plan, "slurm", "--nodes", "2", "--", "--steps", "5")
    subprocess.run(["bash", "-n", str(tmp_path / "out")], check=True)
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in text.splitlines()
        if line.startswith("#SBATCH")
    )
    assert options["nodes"] == "2"
    assert options["ntasks-per-node"] == "1"
    assert options["gpus-per-node"] == "8"
    assert "srun --kill-on-bad-exit=1 torchrun --nnodes=2 --nproc-per-node=8" in text
    assert text.endswith("train.py --steps 5\n")
    assert "sbatch" in said


def test_slurm_script_starts_a_process_per_machine(tmp_path) -> None:
    """Run the script with commands that only say how they were called."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, body in (
        ("srun", 'printf "%s\\n" "$@"; echo "plan $BIGMODEL_PLAN"'),
        ("scontrol", "printf 'node3\\nnode4\\n'"),
    ):
        tool = tools / name
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)
    plan = replace(DDP, mesh=Mesh(replicate=4))
    export(tmp_path, plan, "slurm", "--nodes", "2")
    done = subprocess.run(
        ["bash", str(tmp_path / "out")],
        env={
            "PATH": f"{tools}:/usr/bin:/bin",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node[3-4]",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--rdzv-endpoint=node3:29500" in done.stdout.splitlines()
    assert "--rdzv-id=77" in done.stdout.splitlines()
    assert f"plan {tmp_path / 'plan.json'}" in done.stdout


def test_train_job_has_what_kubeflow_requires(tmp_path) -> None:
    plan = replace(DDP, mesh=Mesh(replicate=16))
    text, _ = export(
        tmp_path, plan, "k8s", "--nodes", "2", "--image", "me/train:1",
        "--script", "My_Train.py",
    )  # fmt: skip
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == (
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
    )
    assert job["metadata"] == {"generateName": "my-train-"}
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert set(trainer) == {"image", "command", "numNodes", "env", "resourcesPerNode"}
    assert trainer["numNodes"] == 2
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    assert trainer["env"][0]["name"] == "BIGMODEL_PLAN"
    from torch.distributed.run import parse_args

    args = parse_args(trainer["command"][1:])
    assert (args.nnodes, args.nproc_per_node) == ("2", "8")


def test_horovodrun_is_told_the_fusion_buffer(tmp_path) -> None:
    plan = Plan(
        backend="horovod",
        mesh=Mesh(replicate=2),
        horovod=HorovodOptions(fusion_megabytes=64),
    )
    text, _ = export(tmp_path, plan, "horovod")
    _, words = command_in(text, "horovodrun")
    assert words[words.index("-np") + 1] == "2"
    assert words[words.index("--fusion-threshold-mb") + 1] == "64"
    _, said = export(tmp_path, DDP, "horovod", code=2)
    assert "plan with backends=['horovod']" in said


@pytest.mark.parametrize(
    ("plan", "to", "options", "words"),
    [
        (DDP, "nowhere", (), ("--to", "torchrun")),
        (DDP, "torchrun", ("--nodes", "3"), ("must divide", "2 processes")),
        (DDP, "torchrun", ("--nodes", "0"), ("--nodes", "at least 1")),
        (
            DDP,
            "slurm",
            ("--nodes", "2", "--gpus-per-node", "8"),
            ("2 x 8 = 16", "product is 2"),
        ),
        (DDP, "k8s", (), ("--image",)),
        (DDP, "torchrun", ("--clip-norm", "-1"), ("--clip-norm", "positive")),
        (
            PIPELINE,
            "accelerate",
            (),
            ("does not train pipelines", "engine.step(batch)"),
        ),
        (PIPELINE, "trainer", (), ("does not train pipelines", "engine.step(batch)")),
        (
            replace(DDP, precision="bf16", ddp=DdpOptions(hook="fp16")),
            "accelerate",
            (),
            (
                "no fp32 copies",
                "use autocast",
                "ddp.hook",
                "bigmodel.accelerator(plan)",
            ),
        ),
        (replace(FSDP2, precision="autocast"), "trainer", (), ("use bf16",)),
        (
            replace(FSDP2, fsdp2=Fsdp2Options(reshard_after_forward=2)),
            "accelerate",
            (),
            ("takes True or False",),
        ),
        (
            replace(FSDP2, fsdp2=Fsdp2Options(prefetch=2)),
            "trainer",
            (),
            ("fsdp2.prefetch", "train with bigmodel.prepare"),
        ),
        (DDP, "accelerate", (), ("ddp.bucket_megabytes is 1.0", "cannot be told")),
        (replace(DDP, zero_stage=1), "trainer", (), ("'deepspeed' with zero_stage=1",)),
        (recomputed(FSDP2), "accelerate", (), ("recompute", "dropout")),
        (
            replace(FSDP2, recompute=("full", "none")),
            "trainer",
            (),
            ("all blocks in full, or none",),
        ),
        (
            replace(FSDP2, mesh=Mesh(replicate=2, shard=2)),
            "trainer",
            (),
            ("ParallelismConfig(dp_replicate_size=2",),
        ),
        (
            replace(DDP, offload=Offload(optimizer="cpu")),
            "trainer",
            (),
            ("backend 'ddp' offloads activations only",),
        ),
        (FSDP2, "trainer", ("--device", "cpu"), ("leaves FSDP out on CPUs",)),
    ],
)
def test_what_a_tool_cannot_do_is_a_users_error(
    tmp_path, plan, to, options, words
) -> None:
    _, said = export(tmp_path, plan, to, *options, code=2)
    for word in words:
        assert word in said


def test_launch_10_every_setting_has_an_origin(tmp_path) -> None:
    plan = replace(DDP, mesh=Mesh(replicate=4))
    _, said = export(tmp_path, plan, "torchrun")
    assert "nodes 1 (default)" in said
    assert "processes per node 4 (the plan's 4 processes)" in said
    _, said = export(tmp_path, plan, "torchrun", "--nodes", "2")
    assert "nodes 2 (given on the command line)" in said
    assert "processes per node 2 (the plan's 4 processes / 2)" in said


def test_without_a_file_the_text_is_all_of_stdout(tmp_path) -> None:
    path = save(DDP, tmp_path / "plan.json")
    result = CliRunner().invoke(app, ["export", str(path), "--to", "trainer"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["per_device_train_batch_size"] == 2
    zero = save(ZERO, tmp_path / "zero.json")
    result = CliRunner().invoke(app, ["export", str(zero), "--to", "accelerate"])
    assert result.exit_code == 2
    assert "--out plan.yaml" in " ".join(result.stderr.split())


@pytest.mark.skipif(
    shutil.which("sbatch") is None, reason="sbatch of SLURM is not installed"
)
def test_sbatch_reads_the_options(tmp_path) -> None:
    """The lines are parsed before a controller is looked for."""
    text, _ = export(tmp_path, DDP, "slurm")
    # The options are right; only the controller is missing.
    assert "Unable to contact slurm controller" in _sbatch(tmp_path, text)
    wrong = _sbatch(tmp_path, text.replace("--nodes=1", "--nodes=many"))
    assert '"many" is not a valid node count' in wrong


def _sbatch(folder: Path, text: str) -> str:
    script = folder / "job.sh"
    script.write_text(text)
    config = folder / "slurm.conf"
    config.write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\n"
        "AuthType=auth/none\nCredType=cred/none\nMessageTimeout=1\n"
        "GresTypes=gpu\nNodeName=localhost Gres=gpu:2\n"
        "PartitionName=all Nodes=ALL Default=YES\n"
    )
    done = subprocess.run(
        ["sbatch", "--test-only", str(script)],
        env={"PATH": "/usr/bin:/bin", "SLURM_CONF": str(config)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


def test_hvd_check_names_line_call_and_replacement(tmp_path) -> None:
    script = tmp_path / "old.py"
    script.write_text("import horovod.torch as hvd\n\nhvd.init()\n")
    result = CliRunner().invoke(app, ["hvd-check", str(script), "--json"])
    assert result.exit_code == 0, result.output
    uses = {use["call"].split("(")[0]: use for use in json.loads(result.stdout)["uses"]}
    assert uses["hvd.init"]["line"] == 3
    result = CliRunner().invoke(app, ["hvd-check", str(script)])
    assert f"{script}:3: hvd.init" in result.stdout
    script.write_text("print(1)\n")
    result = CliRunner().invoke(app, ["hvd-check", str(script)])
    assert "does not use Horovod" in result.stdout
    result = CliRunner().invoke(app, ["hvd-check", str(tmp_path / "absent.py")])
    assert result.exit_code == 2
