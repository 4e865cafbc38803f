"""Cutting a model of transformers: every stage keeps the model's own forward.

A stage drops what other stages own, and what it drops is replaced by modules that do
nothing, so that rotary embeddings, masks and the loss are computed by the model's code:

    stage      before the blocks   blocks    after the blocks   called with
    first      kept                a slice   nothing            the batch
    between    nothing             a slice   nothing            inputs_embeds
    last       nothing             a slice   kept, head too     inputs_embeds, labels

Hidden states enter as `inputs_embeds`. Whether the model really passes them on to its
first block as they are (Granite multiplies them) is seen in the first run only, and
verified there; so is what comes out after the last block.

Tried against one process, transformers 5.24: BERT, BLOOM, Gemma, Gemma 2, Gemma 3,
GPT-2, GPT-NeoX, Llama, Mixtral, Phi, Qwen2 with tied embeddings, Qwen3, RoBERTa. A
model whose blocks hand each other more than hidden states cannot be cut so.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from bigmodel.backends.engine import Batch, Job
from bigmodel.backends.forward import TARGET_KEYS
from bigmodel.backends.pipeline.cut import AbstractCut
from bigmodel.errors import Violation


class HuggingFaceCut(AbstractCut):
    """One stage of a `transformers.PreTrainedModel`."""

    def __init__(self, job: Job, stage: int) -> None:
        super().__init__(job, stage)
        units = job.plan.stage_units(stage)
        kept = job.plan.units[units.start : units.stop]
        self._base: nn.Module = job.model.base_model  # type: ignore[assignment]
        self._names = tuple(inspect.signature(job.model.forward).parameters)
        # Only these may be given to the base model, which passes the rest on to blocks.
        self._base_names = set(inspect.signature(self._base.forward).parameters)
        outside = _outside(job)
        if not self.is_first:
            for name in outside["before"]:
                _replace(self._base, name)
        if not self.is_last:
            for name in outside["after"]:
                setattr(self._base, name, nn.Identity())
            for name in outside["head"]:
                setattr(job.model, name, nn.Identity())
        blocks = job.model.get_submodule(_list_path(job.plan.units))
        for unit in set(job.plan.units) - set(kept):
            # Slicing the list would number the rest anew and so rename its weights.
            delattr(blocks, unit.rpartition(".")[2])
        _shorten_config(job, units)
        self._first_block = job.model.get_submodule(kept[0])
        self._last_block = job.model.get_submodule(kept[-1])

    def run(self, hidden: Tensor | None, batch: Batch) -> Any:
        """Call the model, or only its base where the next stage has the head."""
        positional, named = self._inputs(batch)
        named = dict(zip(self._names, positional, strict=False)) | named
        if hidden is not None:
            named.pop("input_ids", None)
            named["inputs_embeds"] = hidden
        if self.is_last:
            return self.model(**named)
        return self._base(
            **{
                name: value
                for name, value in named.items()
                if name in self._base_names and name not in TARGET_KEYS
            }
        )[0]

    def watch_first_run(self) -> None:
        """Verify that nothing happens to hidden states outside the blocks."""
        if not self.is_first:
            self._watch_entry()
        if not self.is_last:
            self._watch_exit()

    def _watch_entry(self) -> None:
        sent: list[Tensor] = []

        def enter_base(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            at_base.remove()
            sent.append(kwargs["inputs_embeds"])

        def enter_block(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            at_block.remove()
            got = args[0] if args else kwargs.get("hidden_states")
            self._compare(sent.pop(), got, "before its blocks")

        at_base = self._base.register_forward_pre_hook(enter_base, with_kwargs=True)
        at_block = self._first_block.register_forward_pre_hook(
            enter_block, with_kwargs=True
        )

    def _watch_exit(self) -> None:
        left: list[Tensor] = []

        def leave_block(_: nn.Module, args: Any, output: Any) -> None:
            at_block.remove()
            left.append(output if isinstance(output, Tensor) else output[0])

        def leave_base(_: nn.Module, args: Any, output: Any) -> None:
            at_base.remove()
            self._compare(left.pop(), output[0], "after its blocks")

        at_block = self._last_block.register_forward_hook(leave_block)
        at_base = self._base.register_forward_hook(leave_base)

    def _compare(self, sent: Tensor, got: Any, where: str) -> None:
        same = (
            isinstance(got, Tensor)
            and got.shape == sent.shape
            and torch.allclose(sent, got, rtol=0, atol=0, equal_nan=True)
        )
        if not same:
            self.complaints.append(
                f"{type(self._base).__name__} changes hidden states {where}, so stages "
                "would not compute what the whole model computes; "
                "use fsdp2 or deepspeed for it"
            )


class _Nothing(nn.Module):
    """Stands for an embedding that an earlier stage has added already."""

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return ids.new_zeros(())


class _PassThrough(nn.Module):
    """Stands for a module that makes `inputs_embeds` out of everything (BERT)."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Tensor:
        return inputs_embeds


def is_hugging_face(model: nn.Module) -> bool:
    """Return whether a model comes from transformers, without importing it."""
    return any(
        kind.__module__ == "transformers.modeling_utils"
        and kind.__name__ == "PreTrainedModel"
        for kind in type(model).__mro__
    )


def hugging_face_violations(job: Job) -> list[Violation]:
    """Return why a model of transformers cannot be cut into stages."""
    model: Any = job.model
    plan = job.plan
    kind = type(model).__name__
    parents = {unit.rpartition(".")[0] for unit in plan.units}
    blocks = dict(model.named_modules()).get(_list_path(plan.units))
    listed = (
        tuple(f"{_list_path(plan.units)}.{name}" for name, _ in blocks.named_children())
        if isinstance(blocks, nn.ModuleList)
        else ()
    )
    if len(parents) != 1 or listed != plan.units:
        return [
            Violation(
                field="units",
                got=plan.units,
                rule=f"the units of a pipeline over {kind} must be all blocks of one "
                "nn.ModuleList, in their order",
                cure="make the plan for this model, or use fsdp2",
            )
        ]
    violations = [
        Violation(
            field=f"{type(model.base_model).__name__}.{name}",
            got=type(module).__name__,
            rule="it is not known on which side of the blocks it belongs, so this "
            "model cannot be cut into stages",
            cure="use fsdp2 or deepspeed for it",
        )
        for name, module in _outside(job)["unknown"].items()
    ]
    if "inputs_embeds" not in inspect.signature(model.base_model.forward).parameters:
        violations.append(
            Violation(
                field="model",
                got=kind,
                rule="hidden states enter a stage as inputs_embeds, which its forward "
                "does not take",
                cure="use fsdp2 or deepspeed for it",
            )
        )
    if getattr(model.config, "output_router_logits", False):
        violations.append(
            Violation(
                field="config.output_router_logits",
                got=True,
                rule="the experts' auxiliary loss needs the routers of all stages",
                cure="set it to False, or use fsdp2 or deepspeed",
            )
        )
    return violations


def _outside(job: Job) -> dict[str, dict[str, nn.Module]]:
    """Sort what is not a block by where it runs: before, after, head, unknown."""
    model: Any = job.model
    base: nn.Module = model.base_model
    found: dict[str, dict[str, nn.Module]] = {
        side: {} for side in ("before", "after", "head", "unknown")
    }
    if base is not model:
        found["head"] = {
            name: child for name, child in model.named_children() if child is not base
        }
    blocks = model.get_submodule(_list_path(job.plan.units))
    seen = False
    for name, child in base.named_children():
        if any(module is blocks for module in child.modules()):
            seen = True
            # A container around the list (BERT's encoder) must hold nothing else.
            others = set(child.parameters()) - set(blocks.parameters())
            if others:
                found["unknown"][name] = child
            continue
        side = _side(name, child, seen)
        if side is not None:
            found[side][name] = child
    if not seen or list(base.parameters(recurse=False)):
        found["unknown"][""] = base
    return found


def _side(name: str, module: nn.Module, after_blocks: bool) -> str | None:
    """Return where a child of the base model runs; None: it belongs to every stage."""
    kind = type(module).__name__
    embeds = "emb" in name
    if isinstance(module, nn.Embedding) or kind.endswith("Embeddings"):
        return "before"
    if isinstance(module, nn.Dropout):
        return "after" if after_blocks and not embeds else "before"
    if next(module.parameters(), None) is None:
        return None
    if "Norm" in kind:
        if embeds:
            return "before"
        final = after_blocks or "final" in name or name in ("norm", "ln_f")
        return "after" if final else "unknown"
    return "after" if after_blocks and "pooler" in name else "unknown"


def _replace(base: nn.Module, name: str) -> None:
    module = getattr(base, name)
    if isinstance(module, nn.Embedding):
        setattr(base, name, _Nothing())
    elif type(module).__name__.endswith("Embeddings"):
        setattr(base, name, _PassThrough())
    else:
        setattr(base, name, nn.Identity())


def _list_path(units: tuple[str, ...]) -> str:
    return units[0].rpartition(".")[0]


def _shorten_config(job: Job, units: range) -> None:
    """Give the model a config of the stage's length, where forward loops over it."""
    model: Any = job.model
    count = len(job.plan.units)
    config = copy.deepcopy(model.config)
    for name, value in vars(config).items():
        per_layer = "layer" in name and isinstance(value, (list, tuple))
        if per_layer and len(value) == count:
            vars(config)[name] = value[units.start : units.stop]
    config.num_hidden_layers = len(units)
    config.use_cache = False
    path = _list_path(job.plan.units).split(".")
    for depth in range(len(path)):
        module = model.get_submodule(".".join(path[:depth]))
        if isinstance(getattr(module, "config", None), type(config)):
            module.config = config
