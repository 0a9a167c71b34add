"""Profiles: records, registry, resolution, evidence."""
