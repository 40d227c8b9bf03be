"""Extension of vLLM's workers that packs the experts of a mixture for CPUs after each load of weights.

Release 0.32 packs them after the first load alone, and then takes the plain weights of each update for packed ones.
"""

from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

_once = UnquantizedFusedMoEMethod._setup_kernel


def _each_time(self, layer, w13, w2):
    self.moe_kernel = None  # as before the first load
    _once(self, layer, w13, w2)


class PackedExperts:
    """Adds nothing itself: workers import this file."""

    UnquantizedFusedMoEMethod._setup_kernel = _each_time
