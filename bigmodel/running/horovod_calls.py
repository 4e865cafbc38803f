"""The table of Horovod's functions and of what takes their place here."""

from __future__ import annotations

from dataclasses import dataclass

FRAMEWORKS = frozenset({"torch", "tensorflow", "keras", "mxnet", "spark", "ray"})
"""Parts of the package `horovod` that offer the same functions."""

NOT_TORCH = frozenset({"tensorflow", "keras", "mxnet"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What takes the place of one function."""

    replacement: str
    """As it is written; empty where nothing is needed."""
    note: str
    """Why, and what is different."""
    options: tuple[tuple[str, str], ...] = ()
    """Keywords of the call and what becomes of each."""


_NOT_NEEDED = "remove it"
_ENGINE = "engine = bigmodel.prepare(plan, model, optimizer, loss)"
_FIRST = "rank 0's values reach all ranks in bigmodel.prepare"

REPLACEMENTS: dict[str, Row] = {
    "init": Row(
        replacement=_ENGINE,
        note="the process group is made by prepare, and left by engine.close()",
    ),
    "shutdown": Row(replacement="engine.close()", note="or use the engine in `with`"),
    "is_initialized": Row(
        replacement="torch.distributed.is_initialized()", note="the same"
    ),
    "rank": Row(
        replacement="engine.rank",
        note="to print or write once: engine.is_first",
    ),
    "size": Row(
        replacement="plan.world",
        note="a learning rate multiplied by it stays yours to decide; the global batch "
        "is plan.global_batch",
    ),
    "local_rank": Row(
        replacement="engine.device",
        note="prepare chooses the GPU, so torch.cuda.set_device goes too",
    ),
    "local_size": Row(
        replacement='int(os.environ["LOCAL_WORLD_SIZE"])', note="set by torchrun"
    ),
    "cross_rank": Row(
        replacement='int(os.environ["GROUP_RANK"])',
        note="the machine's index, set by torchrun",
    ),
    "cross_size": Row(replacement="", note="machines: processes / local_size"),
    "DistributedOptimizer": Row(
        replacement=_ENGINE,
        note="the optimizer is given as it is, or as a function that makes it; the "
        "plan says how gradients are averaged, and under other backends sharded",
        options=(
            (
                "backward_passes_per_step",
                "backward_passes_per_step becomes Plan(accumulation=...), and losses "
                "are means over the whole window",
            ),
            (
                "compression",
                "Compression.fp16 becomes DdpOptions(hook='fp16')",
            ),
            (
                "gradient_predivide_factor",
                "gradient_predivide_factor: gradients are averaged as they are",
            ),
            ("groups", "groups becomes DdpOptions(bucket_megabytes=...)"),
            ("num_groups", "num_groups becomes DdpOptions(bucket_megabytes=...)"),
            ("op", "only the average is offered; Adasum has no counterpart"),
            ("process_set", "process_set: all ranks of the plan take part"),
            ("named_parameters", "named_parameters are taken from the model"),
        ),
    ),
    "broadcast_parameters": Row(replacement=_NOT_NEEDED, note=_FIRST),
    "broadcast_optimizer_state": Row(
        replacement=_NOT_NEEDED,
        note="engine.load(folder) restores the states on every rank; on a fresh "
        "optimizer the call itself takes a step, in which weight decay moves weights",
    ),
    "broadcast": Row(
        replacement="torch.distributed.broadcast(tensor, src=0)",
        note="in place, as broadcast_ is",
    ),
    "broadcast_": Row(
        replacement="torch.distributed.broadcast(tensor, src=0)", note="in place"
    ),
    "broadcast_object": Row(
        replacement="torch.distributed.broadcast_object_list(objects, src=0)",
        note="takes a list, and fills it on the other ranks",
    ),
    "allreduce": Row(
        replacement="torch.distributed.all_reduce(tensor); tensor /= plan.world",
        note="hvd.allreduce is a mean by default, and leaves its argument alone; "
        "losses are averaged already: engine.step(batch).loss, engine.evaluate(batch)",
    ),
    "allreduce_": Row(
        replacement="torch.distributed.all_reduce(tensor); tensor /= plan.world",
        note="hvd.allreduce_ is a mean by default",
    ),
    "grouped_allreduce": Row(
        replacement="for tensor in tensors: torch.distributed.all_reduce(tensor)",
        note="a sum: divide by plan.world",
    ),
    "allgather": Row(
        replacement="torch.distributed.all_gather(tensors, tensor)",
        note="every rank must have the same shape; hvd.allgather joins other lengths "
        "too: torch.distributed.all_gather_object does",
    ),
    "allgather_object": Row(
        replacement="torch.distributed.all_gather_object(objects, value)",
        note="fills a list of plan.world entries",
    ),
    "reducescatter": Row(
        replacement="torch.distributed.reduce_scatter_tensor(output, tensor)",
        note="a sum: divide by plan.world",
    ),
    "alltoall": Row(
        replacement="torch.distributed.all_to_all_single(output, tensor)",
        note="splits are given as input_split_sizes and output_split_sizes",
    ),
    "barrier": Row(replacement="torch.distributed.barrier()", note="the same"),
    "join": Row(
        replacement=_NOT_NEEDED,
        note="engine.batches(dataset) gives every rank the same number of batches",
    ),
    "synchronize": Row(
        replacement="work.wait()", note="work: what a call with async_op=True returned"
    ),
    "poll": Row(
        replacement="work.is_completed()",
        note="work: what a call with async_op=True returned",
    ),
    "Compression.fp16": Row(
        replacement="DdpOptions(hook='fp16')", note="torch's fp16_compress_hook"
    ),
    "Compression.none": Row(replacement=_NOT_NEEDED, note="the default"),
    "Average": Row(replacement=_NOT_NEEDED, note="gradients are averaged"),
    "Sum": Row(
        replacement="", note="gradients are averaged: multiply the learning rate"
    ),
    "Adasum": Row(replacement="", note="Adasum has no counterpart here"),
    "SyncBatchNorm": Row(
        replacement="torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
        note="before prepare; torch's needs GPUs",
    ),
    "nccl_built": Row(
        replacement="torch.distributed.is_nccl_available()", note="the same question"
    ),
    "gloo_built": Row(
        replacement="torch.distributed.is_gloo_available()", note="the same question"
    ),
    "mpi_built": Row(
        replacement="torch.distributed.is_mpi_available()", note="the same question"
    ),
    "mpi_threads_supported": Row(
        replacement=_NOT_NEEDED, note="processes do not talk over MPI"
    ),
    "ProcessSet": Row(
        replacement="torch.distributed.new_group(ranks)",
        note="groups for training are the axes of the plan's mesh",
    ),
    "add_process_set": Row(
        replacement="torch.distributed.new_group(ranks)",
        note="groups for training are the axes of the plan's mesh",
    ),
    "elastic.run": Row(
        replacement="",
        note="a changed number of processes needs another plan: save often with "
        "engine.save(folder), and restart",
    ),
    "elastic.TorchState": Row(
        replacement="engine.save(folder); engine.load(folder)",
        note="state.commit() becomes engine.save(folder)",
    ),
    "elastic.ElasticSampler": Row(
        replacement="engine.batches(dataset, start=engine.steps)",
        note="goes on where the checkpoint was written",
    ),
    "run": Row(
        replacement="bigmodel run SCRIPT --plan PLAN",
        note="a command; from Python, start processes with torch.multiprocessing",
    ),
    **{
        f"{name}_async{suffix}": Row(
            replacement=f"torch.distributed.{target}(..., async_op=True)",
            note="returns a work to wait for",
        )
        for name, target in {
            "allreduce": "all_reduce",
            "allgather": "all_gather",
            "broadcast": "broadcast",
            "alltoall": "all_to_all_single",
        }.items()
        for suffix in ("", "_")
    },
}
"""From the name under `horovod.torch` to its row."""
