"""One run, described: the frozen plan, its fields, defaults, checks and how it is read."""

from dpfp_ray.plan.plan import Plan

__all__ = ["Plan"]
