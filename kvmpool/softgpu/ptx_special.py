"""The special registers of PTX (PTX ISA 10): the C type and expression of each.

Clusters are not supported: every block is its own cluster of one.
"""

from __future__ import annotations

_AXES = "xyz"

SPECIAL: dict[str, tuple[str, str]] = {
    "%laneid": ("uint32_t", "(t->flat & 31)"),
    "%warpid": ("uint32_t", "(t->flat >> 5)"),
    "%nwarpid": ("uint32_t", "32u"),
    "%smid": ("uint32_t", "0u"),
    "%nsmid": ("uint32_t", "1u"),
    "%gridid": ("uint64_t", "t->b->grid_id"),
    "%lanemask_eq": ("uint32_t", "(1u << (t->flat & 31))"),
    "%lanemask_lt": ("uint32_t", "((1u << (t->flat & 31)) - 1)"),
    "%lanemask_le": ("uint32_t", "((2u << (t->flat & 31)) - 1)"),
    "%lanemask_gt": ("uint32_t", "(~((2u << (t->flat & 31)) - 1))"),
    "%lanemask_ge": ("uint32_t", "(~((1u << (t->flat & 31)) - 1))"),
    "%clock": ("uint32_t", "(uint32_t)kp_clock()"),
    "%clock_hi": ("uint32_t", "(uint32_t)(kp_clock() >> 32)"),
    "%clock64": ("uint64_t", "kp_clock()"),
    "%globaltimer": ("uint64_t", "t->b->rt->timer_ns()"),
    "%globaltimer_lo": ("uint32_t", "(uint32_t)t->b->rt->timer_ns()"),
    "%globaltimer_hi": ("uint32_t", "(uint32_t)(t->b->rt->timer_ns() >> 32)"),
    "%total_smem_size": ("uint32_t", "t->b->shared_bytes"),
    "%aggr_smem_size": ("uint32_t", "t->b->shared_bytes"),
    "%dynamic_smem_size": ("uint32_t", "t->b->dynamic_bytes"),
    "%is_explicit_cluster": ("uint8_t", "0"),
    "%cluster_ctarank": ("uint32_t", "0u"),
    "%cluster_nctarank": ("uint32_t", "1u"),
}

for _index, _axis in enumerate(_AXES):
    SPECIAL[f"%tid.{_axis}"] = ("uint32_t", f"t->tid[{_index}]")
    SPECIAL[f"%ntid.{_axis}"] = ("uint32_t", f"t->b->ntid[{_index}]")
    SPECIAL[f"%ctaid.{_axis}"] = ("uint32_t", f"t->b->ctaid[{_index}]")
    SPECIAL[f"%nctaid.{_axis}"] = ("uint32_t", f"t->b->nctaid[{_index}]")
    SPECIAL[f"%clusterid.{_axis}"] = ("uint32_t", f"t->b->ctaid[{_index}]")
    SPECIAL[f"%nclusterid.{_axis}"] = ("uint32_t", f"t->b->nctaid[{_index}]")
    SPECIAL[f"%cluster_ctaid.{_axis}"] = ("uint32_t", "0u")
    SPECIAL[f"%cluster_nctaid.{_axis}"] = ("uint32_t", "1u")
for _index in range(32):
    SPECIAL[f"%envreg{_index}"] = ("uint32_t", "0u")
# The workspace of a cooperative grid, as cooperative_groups reads it (cooperative_groups/details/driver_abi.h).
SPECIAL["%envreg1"] = ("uint32_t", "(uint32_t)(t->b->grid_workspace >> 32)")
SPECIAL["%envreg2"] = ("uint32_t", "(uint32_t)t->b->grid_workspace")
