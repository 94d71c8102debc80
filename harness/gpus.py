"""What GPUs can do on paper: dense peaks, memory and bandwidth, each with its source.

Vendors print tensor-core peaks "with sparsity" in large type; training is dense, which is half of that.
All peaks here are dense, in TFLOP/s, with fp32 accumulation (GeForce cards run that at half the rate of
fp16 accumulation). Memory is in GB (10^9 bytes) as sold; bandwidths are in GB/s. `link` is the
bandwidth to other GPUs in one direction: NVLink's data-sheet figure counts both, so it is halved here.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.common import UserError

SPARSITY = 2.0  # what 2:4 structured sparsity multiplies a peak by on the data sheet
NVIDIA = "https://www.nvidia.com/en-us/data-center/"


@dataclass(frozen=True)
class Gpu:
    """One GPU as sold. `bf16` is None where there is no native bf16 (fp16 with a loss scaler is used)."""

    name: str
    bf16: float | None
    fp16: float
    fp8: float | None
    memory: float
    bandwidth: float
    link: float
    source: str

    @property
    def hopper(self) -> bool:
        return self.name.startswith(("H100", "H200"))

    @property
    def peak(self) -> float:
        """Dense 16-bit peak in TFLOP/s, the one that training in mixed precision is measured against."""
        return self.bf16 if self.bf16 is not None else self.fp16


GPUS: tuple[Gpu, ...] = (
    # name, bf16, fp16, fp8, memory, memory bandwidth, link
    Gpu("T4", None, 65, None, 16, 320, 16, NVIDIA + "tesla-t4/"),
    Gpu("V100", None, 125, None, 32, 900, 150, NVIDIA + "v100/ (SXM2, 32 GB)"),
    Gpu("A10G", 70, 70, None, 24, 600, 32, "AWS G5 / A10G data sheet (140 with sparsity)"),
    Gpu("A10", 125, 125, None, 24, 600, 32, NVIDIA + "products/a10-gpu/"),
    Gpu("L4", 121, 121, 242.5, 24, 300, 32, NVIDIA + "l4/ (242 with sparsity)"),
    Gpu("RTX3090", 71, 71, None, 24, 936, 56, "NVIDIA Ampere GA102 whitepaper"),
    Gpu("RTX4090", 165.2, 165.2, 330.3, 24, 1008, 32, "NVIDIA Ada GPU architecture whitepaper"),
    Gpu("RTX5090", 209.5, 209.5, 419, 32, 1792, 64, "NVIDIA RTX Blackwell GPU architecture whitepaper"),
    Gpu("A100-40", 312, 312, None, 40, 1555, 300, NVIDIA + "a100/ (SXM4)"),
    Gpu("A40", 149.7, 149.7, None, 48, 696, 56, NVIDIA + "a40/ (299.4 with sparsity)"),
    Gpu("A6000", 154.8, 154.8, None, 48, 768, 56, "NVIDIA RTX A6000 data sheet (309.7 with sparsity)"),
    Gpu("L40S", 362, 362, 733, 48, 864, 32, NVIDIA + "l40s/ (733 with sparsity)"),
    Gpu("A100", 312, 312, None, 80, 2039, 300, NVIDIA + "a100/ (SXM4, 80 GB)"),
    Gpu("H100-PCIE", 756, 756, 1513, 80, 2000, 64, NVIDIA + "h100/ (1,513 with sparsity)"),
    Gpu("H100", 989, 989, 1979, 80, 3350, 450, NVIDIA + "h100/ (SXM5; 1,979 with sparsity)"),
    Gpu("H100-NVL", 835, 835, 1671, 94, 3900, 300, NVIDIA + "h100/ (1,671 with sparsity)"),
    Gpu("H200", 989, 989, 1979, 141, 4800, 450, NVIDIA + "h200/ (SXM; 1,979 with sparsity)"),
    Gpu("B200", 2250, 2250, 4500, 180, 8000, 900, NVIDIA + "dgx-b200/ (8 GPUs: 72 PFLOP/s fp8, sparse)"),
)


def find_gpu(name: str) -> Gpu:
    """The GPU that a person names, in any case and with or without separators. Raises UserError."""

    def plain(text: str) -> str:
        return "".join(c for c in text.upper() if c.isalnum()).removeprefix("NVIDIA").removesuffix("GB")

    aliases = {
        "A10080": "A100",
        "H100SXM": "H100",
        "H10080": "H100",
        "4090": "RTX4090",
        "3090": "RTX3090",
        "5090": "RTX5090",
    }
    wanted = plain(name)
    wanted = aliases.get(wanted, wanted)
    for gpu in GPUS:
        if plain(gpu.name) == wanted:
            return gpu
    raise UserError(
        f"GPU {name!r} is not in the table ({', '.join(g.name for g in GPUS)}): "
        "name one of these, or give it by hand with --peak, --memory and --bandwidth"
    )
