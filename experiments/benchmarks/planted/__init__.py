"""Attention functions and models with one fault each, and healthy ones, to measure an audit and a diagnosis by."""
