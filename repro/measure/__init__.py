"""Measure: what a measurement needs of its device, and what may be measured on it at all."""
