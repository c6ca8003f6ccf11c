"""Tune partition, placement and schedule of pipeline-parallel training together."""
