"""Validation of torch.compile, of the memory of activations, and of fp8."""

from __future__ import annotations

from paceline.args.errors import UnsupportedOption
from paceline.args.mesh import asked_sizes
from paceline.args.sections import Options

# backends that split a joint graph into a forward and a backward pass, so that they choose what is kept in between
BUDGET_BACKENDS = ("inductor", "aot_eager", "aot_eager_decomp_partition")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def check_compilation(options: Options) -> None:
    """Checks the options that torch.compile reads.

    Raises:
        ValueError: one of them without torch.compile, or together with another that it contradicts.
        UnsupportedOption: a backend that does not read it.
    """
    backend = options.torch_compile_backend or "inductor"
    if not is_compiled(options):
        needing = ("torch_compile_dynamic", "compile_cache_dir", "activation_memory_budget")
        asked = [name for name in needing if getattr(options, name) is not None]
        asked = ["compile_regions", *asked] if options.compile_regions else asked
        if asked:
            value = getattr(options, asked[0])
            raise ValueError(f"{asked[0]}={value!r} requires torch_compile: set torch_compile=True too.")
        return
    if options.torch_compile_dynamic and options.torch_compile_mode in CUDA_GRAPH_MODES:
        raise ValueError(
            f"torch_compile_dynamic=True and torch_compile_mode={options.torch_compile_mode!r} exclude each other: "
            "CUDA graphs are recorded for one shape. Leave one of them out, or set "
            "torch_compile_mode='max-autotune-no-cudagraphs'."
        )
    if options.compile_cache_dir is not None and backend != "inductor":
        raise UnsupportedOption(
            f"compile_cache_dir={options.compile_cache_dir!r} with torch_compile_backend={backend!r} is not supported: "
            "only inductor has a cache; leave one of them out."
        )
    if options.activation_memory_budget is not None and backend not in BUDGET_BACKENDS:
        raise UnsupportedOption(
            f"activation_memory_budget={options.activation_memory_budget} with torch_compile_backend={backend!r} is "
            f"not supported: use one of {', '.join(BUDGET_BACKENDS)}, or leave it out."
        )


def check_activations(options: Options) -> None:
    """Checks that at most one way decides which activations are recomputed, and what offloading goes with.

    Raises:
        ValueError: two options contradict each other.
        UnsupportedOption: a way to run the model in which its forward is not called as a whole.
    """
    if options.activation_memory_budget is not None and options.activation_checkpointing:
        raise ValueError(
            f"activation_memory_budget={options.activation_memory_budget} and activation_checkpointing=True both "
            "decide what is recomputed: leave one of them out (activation_checkpointing is also called "
            "gradient_checkpointing)."
        )
    if not options.activation_offload:
        return
    if is_compiled(options) and options.compile_regions is False:
        raise ValueError(
            "activation_offload=True and compile_regions=False exclude each other: between compiled blocks activations "
            "are moved, and within a compiled model they are not; leave one of them out."
        )
    for name in ("deepspeed", "use_cpu"):
        if getattr(options, name):
            raise UnsupportedOption(f"activation_offload=True with {name} is not supported: leave one of them out.")
    refuse_axes(options, "activation_offload", ("pp",))


def check_fp8(options: Options) -> None:
    """Checks that fp8 goes with the other options.

    Raises:
        ValueError: without bf16.
        UnsupportedOption: on a CPU, with DeepSpeed, or with matrices or layers on several processes.
    """
    if not options.fp8:
        return
    if not options.bf16:
        raise ValueError(
            "fp8=True requires bf16=True, the type of everything that is not computed in 8 bits: set it too."
        )
    for name in ("deepspeed", "use_cpu", "use_liger_kernel"):
        if getattr(options, name):
            raise UnsupportedOption(f"fp8=True with {name} is not supported: leave one of them out.")
    refuse_axes(options, "fp8", ("tp", "pp"))


def is_compiled(options: Options) -> bool:
    """Returns True if torch.compile is asked for; its mode and its backend imply it."""
    return bool(options.torch_compile or options.torch_compile_mode or options.torch_compile_backend)


def refuse_axes(options: Options, name: str, axes: tuple[str, ...]) -> None:
    """Refuses a boolean option on a mesh with one of the axes.

    Raises:
        UnsupportedOption: the message names the axis.
    """
    shown, sizes = asked_sizes(options) or ("", {})
    for axis in axes:
        if sizes.get(axis, 1) != 1:
            raise UnsupportedOption(f"{name}=True with {shown} is not supported: leave {name} out.")
